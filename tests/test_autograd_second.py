"""PyTorch takes other derivatives than the first gradients from a second text of each op
(linattn/_by_pytorch.py): that text gives the core's outputs, and its derivatives are those of
finite differences."""

import warnings

import numpy as np
import pytest
from support.recorded import inputs, pure, setting, tensors
from support.scans import HGRN, RGLRU, S4D, Selective
from support.tensors import tensors_in, torch
from support.variants import PREDICTS

import linattn
from linattn import _by_pytorch, autograd

OPS = linattn.OPS
# PyTorch's own, as it loads what forward mode needs
pytestmark = pytest.mark.filterwarnings(
    "default::FutureWarning", "default:.*torch.jit:DeprecationWarning"
)


def drawn(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).requires_grad_()


def between_0_and_1(rng, *shape):
    return torch.from_numpy(rng.uniform(0.1, 0.9, shape)).requires_grad_()


def assert_derivatives(call, given):
    """Forward mode has the outputs of a plain call, and its derivatives are right. So are second
    ones."""
    from torch.autograd import forward_ad

    with torch.no_grad():
        want = tensors_in(call(*given))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in given]
        got = [forward_ad.unpack_dual(y).primal for y in tensors_in(call(*duals))]
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x.detach(), y, rtol=1e-12, atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some orders are tried that PyTorch has no use for
        assert torch.autograd.gradcheck(
            call, given, check_forward_ad=True, check_backward_ad=False, fast_mode=True
        )
        assert torch.autograd.gradgradcheck(
            call, given, check_fwd_over_rev=True, check_undefined_grad=False, fast_mode=True
        )


# ---- ops ----


@pytest.mark.parametrize("name", ["v first", "l2norm"])
@pytest.mark.parametrize("op", OPS)
def test_ops(op, name, rng):
    x, options = setting(op, rng, name, grad=True, T=3)
    assert_derivatives(*pure(op, x, output_final_state=True, **options))


@pytest.mark.parametrize("op", OPS)
def test_packed_sequences(op, rng):
    made = linattn.testing.make_inputs(
        op,
        rng,
        B=1,
        T=4,
        H=2,
        HV=4,
        K=2,
        V=2,
        dtype=np.float64,
        initial_state=True,
        cu_seqlens=np.array([0, 2, 2, 4]),
    )
    cu_seqlens = torch.from_numpy(made.pop("cu_seqlens"))
    x = tensors(made, grad=True)
    assert_derivatives(*pure(op, x, output_final_state=True, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("op", PREDICTS)
def test_a_key_that_predicts(op, rng):
    assert_derivatives(*pure(op, inputs(op, rng, grad=True, x=True, T=3)))


@pytest.mark.parametrize("normalize", [True, "add", False])
@pytest.mark.parametrize("phi", ["elu+1", "relu+eps", "relu2", "exp"])
def test_feature_maps(phi, normalize, rng):
    def call(q, k, v):
        return linattn.linear_attention(q, k, v, feature_map=phi, normalize=normalize)[0]

    assert_derivatives(call, [drawn(rng, 1, 4, 2, 3) for _ in "qkv"])


@pytest.mark.parametrize("normalize", [True, False])
def test_noncausal_with_other_keys(normalize, rng):
    def call(q, k, v):
        return linattn.linear_attention(q, k, v, normalize=normalize, causal=False)[0]

    assert_derivatives(call, [drawn(rng, 2, T, 2, 3) for T in (3, 5, 5)])


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_titans_in_batches(batch, rng):
    def call(q, k, v, beta, alpha):
        return linattn.titans(q, k, v, beta=beta, alpha=alpha, batch=batch)[0]

    gates = [between_0_and_1(rng, 1, 5, 2) for _ in "ba"]
    assert_derivatives(call, [*(drawn(rng, 1, 5, 2, 3) for _ in "qkv"), *gates])


def test_comba_predicts_before_the_decay(rng):
    def call(q, k, v, p, g, beta):
        return linattn.comba(q, k, v, p, g=-g, beta=beta)[0]

    gates = [between_0_and_1(rng, 1, 4, 2) for _ in "gb"]
    assert_derivatives(call, [*(drawn(rng, 1, 4, 2, 3) for _ in "qkvp"), *gates])


@pytest.mark.parametrize("packed", [False, True])
def test_one_head(packed, rng):
    cu_seqlens = torch.tensor([0, 1, 5]) if packed else None

    def call(q, k, v, beta):
        return linattn.delta_rule(
            q, k, v, beta, cu_seqlens=cu_seqlens, output_final_state=True, state_v_first=True
        )

    assert_derivatives(call, [*(drawn(rng, 5, 3) for _ in "qkv"), between_0_and_1(rng, 5)])

    def normalised(q, k, v):
        o, (S, z) = linattn.linear_attention(q, k, v, output_final_state=True)
        return o, S, z

    assert_derivatives(normalised, [drawn(rng, 4, 3) for _ in "qkv"])
    assert_derivatives(lambda *x: linattn.retention(*x)[0], [drawn(rng, 4, 3) for _ in "qkv"])


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(op, rng):
    """The state is passed on."""
    x = inputs(op, rng, T=0, grad=True)
    _, state = getattr(linattn, op)(**x, output_final_state=True)
    given = tensors_in([x["initial_state"]])
    cubes = sum((S**3).sum() for S in tensors_in([state]))
    first = torch.autograd.grad(cubes, given, create_graph=True)
    second = torch.autograd.grad(sum(d.sum() for d in first), given)
    for d, S in zip(second, given, strict=True):
        torch.testing.assert_close(d, 6 * S.detach())


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
def test_dtypes(dtype, rng):
    """Of a gradient's gradient too: those of the arrays."""
    x = inputs("gated_delta_rule", rng, dtype=dtype, grad=True)
    call, given = pure("gated_delta_rule", x, output_final_state=True)
    first = torch.autograd.grad(sum(y.sum() for y in call(*given)), given, create_graph=True)
    second = torch.autograd.grad(sum((d.float() ** 2).sum() for d in first), given)
    wide = [y.detach().double().requires_grad_() for y in given]
    want = torch.autograd.grad(sum(y.sum() for y in call(*wide)), wide, create_graph=True)
    want = torch.autograd.grad(sum((d**2).sum() for d in want), wide)
    bound = 1e-5 if dtype == np.float32 else 2e-2
    for d, given_x, w in zip(second, given, want, strict=True):
        assert d.dtype == given_x.dtype
        assert (d.double() - w).abs().max() <= bound * w.abs().max()


# ---- scans and the convolution ----

SCANS = [
    Selective("selective_scan", all=True),
    Selective("selective_scan", pairs=True),
    S4D("s4d"),
    S4D("s4d", real=True),
    HGRN("hgrn"),
    RGLRU("rg_lru"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scan", SCANS, ids=repr)
def test_scans(scan, packed, rng):
    shape = {"B": 1, "S": 3} if packed else {"B": 2}
    arrays = scan.draw(rng, T=4, D=4, N=2, G=2, **shape)
    options = {"cu_seqlens": torch.tensor([0, 3, 3, 4])} if packed else {}
    x = {name: torch.from_numpy(a).requires_grad_() for name, a in arrays.items()}

    def call(*given):
        named = dict(zip(x, given, strict=True))
        return scan.forward(**named, **scan.keywords, **options, output_final_state=True)

    assert_derivatives(call, list(x.values()))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_convolution(packed, activation, rng):
    cu_seqlens = torch.tensor([0, 1, 1, 5]) if packed else None
    B, S = (1, 3) if packed else (2, 2)

    def call(x, weight, bias, state):
        return linattn.causal_conv1d(
            x,
            weight,
            bias,
            activation=activation,
            initial_state=state,
            cu_seqlens=cu_seqlens,
            output_final_state=True,
        )

    given = drawn(rng, B, 5, 3), drawn(rng, 3, 4), drawn(rng, 3), drawn(rng, S, 3, 3)
    assert_derivatives(call, given)


def test_no_sequences(rng):
    x, weight = drawn(rng, 1, 0, 3), drawn(rng, 3, 4)
    none = torch.tensor([0])
    for call in (
        lambda: linattn.causal_conv1d(x, weight, cu_seqlens=none, output_final_state=True),
        lambda: linattn.hgrn(x, x, cu_seqlens=none, output_final_state=True),
    ):
        y, state = call()
        (first,) = torch.autograd.grad(y.sum() + state.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, allow_unused=True)
        assert second is None or second.shape == x.shape


# ---- systems and layers, which are made of these ----


@pytest.mark.parametrize(
    "name, options",
    [
        ("GatedDeltaProduct", {"num_heads": 2, "head_dim": 4}),
        ("KimiDeltaAttention", {"num_heads": 2, "head_dim": 4}),
        ("Mamba", {}),
        ("Mamba2", {"headdim": 4}),
        ("RWKV7", {"head_dim": 4}),
    ],
)
def test_layers(name, options, rng):
    layer = getattr(linattn.nn, name)(8, **options).double()
    assert_derivatives(lambda x: layer(x)[0], [drawn(rng, 1, 3, 8)])


# ---- PyTorch's transforms ----


def test_transforms(rng):
    """Hessians by every order of the two modes, a product with a vector, a third derivative."""
    from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

    k, v, q = (torch.from_numpy(rng.standard_normal((1, 4, 1, 2))) for _ in "kvq")
    g, beta = (x.detach() for x in (-between_0_and_1(rng, 1, 4, 1), between_0_and_1(rng, 1, 4, 1)))

    def loss(q):
        return linattn.gated_delta_rule(q, k, v, g=g, beta=beta)[0].sin().sum()

    want = torch.autograd.functional.hessian(loss, q)
    for by in (hessian, jacfwd(jacfwd(loss)), jacrev(jacrev(loss)), jacrev(jacfwd(loss))):
        got = by(loss)(q) if by is hessian else by(q)
        torch.testing.assert_close(got, want)
    _, along = jvp(grad(loss), (q,), (torch.ones_like(q),))
    torch.testing.assert_close(along, want.flatten(4).sum(-1))
    torch.testing.assert_close(vmap(hessian(loss))(torch.stack([q, 2 * q]))[0], want)

    def squares(q):
        return (grad(loss)(q) ** 2).sum()

    third = grad(lambda q: (grad(squares)(q) ** 2).sum())
    step = 1e-6 * torch.ones_like(q)
    ends = [(grad(squares)(q + s) ** 2).sum() for s in (step, -step)]
    torch.testing.assert_close(third(q).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_wrong_arguments_are_named(rng):
    """By the core, which checks shapes and dtypes where there is no memory."""
    from torch.func import jvp

    x = inputs("delta_rule", rng)
    one = torch.ones_like(x["q"])
    for bad, error, text in (
        ({"beta": x["q"]}, ValueError, r"beta: expected \[B,T,HV\]"),
        ({"v": x["v"].int()}, TypeError, "v: expected float64"),
        ({"chunk_size": 0}, ValueError, "chunk_size: expected"),
    ):
        with pytest.raises(error, match=text):
            jvp(lambda q, bad=bad: linattn.delta_rule(**x | {"q": q} | bad)[0], (x["q"],), (one,))
    u = torch.ones(1, 3, 2)
    with pytest.raises(ValueError, match=r"weight: expected \[D,W\]"):
        jvp(lambda u: linattn.causal_conv1d(u, torch.ones(3, 4))[0], (u,), (u,))


def test_out_has_no_derivatives(rng):
    from torch.autograd import forward_ad

    x, u = inputs("gla", rng), torch.from_numpy(rng.standard_normal((1, 3, 2)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x["q"], torch.ones_like(x["q"]))
        with pytest.raises(ValueError, match="out: expected None where PyTorch takes derivatives"):
            linattn.gla(**x | {"q": dual}, out=torch.empty_like(x["v"]))
        dual = forward_ad.make_dual(u, torch.ones_like(u))
        with pytest.raises(ValueError, match="out: expected None where PyTorch"):
            linattn.causal_conv1d(dual, torch.ones(2, 2), out=torch.empty_like(u))
        assert torch.equal(linattn.gla(**x)[0], linattn.gla(**x)[0])


def test_an_array_that_the_second_text_lacks_is_refused(rng):
    """A new line of csrc/arrays.def has first gradients at once. Others would be wrong."""
    x = inputs("gla", rng)
    options = {name: default for name, (_, default) in autograd.FIT.items()}
    given = dict.fromkeys(autograd._NAMES) | x | options | {"gate": "g"}
    assert _by_pytorch.op("gla", given)[0].shape == x["v"].shape
    with pytest.raises(NotImplementedError, match="offset: expected None where gla"):
        _by_pytorch.op("gla", given | {"offset": x["v"]})
