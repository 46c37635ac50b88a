"""PyTorch traces and transforms the ops: torch.library, torch.compile, torch.func. They give the
bits of a plain call, and the gradients of one."""

import types
import warnings

import ml_dtypes
import numpy as np
import pytest
from support.recorded import (
    assert_equal,
    gradients,
    inputs,
    pure,
    refilled,
    weights,
)
from support.tensors import tensors_in, torch

import linattn
from linattn import autograd

OPS = linattn.OPS
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def operator_arguments(op, x, *, final=True, features=(2, 1e-3, 2, 1e-3, 1, 1e-6, 1)):
    state = x.get("initial_state")
    first, second = state if isinstance(state, tuple) else (state, None)
    gate = next((name for name in ("g", "gamma", "slopes") if name in x), None)
    given = x | {"g": x.get(gate), "initial_state": first, "initial_state_second": second}
    options = {name: default for name, (_, default) in autograd.FIT.items()}
    options |= {"gate": gate}
    if op == "linear_attention":
        options["features"] = list(map(float, features))
    return (
        *map(given.get, autograd._NAMES),
        final,
        *map(options.get, autograd._OPTION_NAMES),
    )


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, rng):
    x = inputs(op, rng, grad=True)
    arguments = operator_arguments(op, x)
    torch.library.opcheck(getattr(torch.ops.linattn, op).default, arguments)
    torch.library.opcheck(
        getattr(torch.ops.linattn, op).default,
        operator_arguments(op, x, final=False),
        test_utils="test_faketensor",
    )
    n = len(autograd._NAMES)
    before, after = arguments[:n], arguments[n + 1 :]
    arrays = [None if y is None else y.detach() for y in before]
    d_states = [None if y is None else weights(y) for y in arrays[-2:]]
    torch.library.opcheck(
        getattr(torch.ops.linattn, op + "_backward").default,
        (weights(arrays[2]), *d_states, *arrays, *after),
    )


def of_one_head(name, y):
    if name == "bonus":
        return y[0]
    return y[0, :, 0] if y.dim() > 1 else y


@pytest.mark.parametrize("op", OPS)
def test_shapes_without_memory(op, rng):
    """The fake implementation, against the core."""
    cu = torch.tensor([0, 2, 5])
    for options in (
        {},
        {"state_v_first": True},
        {"output_final_state": True},
        {"output_final_state": True, "state_v_first": True},
        {"output_final_state": True, "cu_seqlens": cu},
    ):
        for one_head in (False, True):
            for dtype in (np.float64, np.float32, BFLOAT16):
                x = inputs(op, rng, dtype=dtype, state=False, B=1, HV=1 if one_head else 2)
                if one_head:
                    x = {n: of_one_head(n, y) for n, y in x.items()}
                want = tensors_in(getattr(linattn, op)(**x, **options))
                meta = {n: y.to("meta") for n, y in x.items()}
                got = tensors_in(getattr(linattn, op)(**meta, **options))
                described = [[(y.shape, y.dtype, y.stride()) for y in ys] for ys in (got, want)]
                assert described[0] == described[1]


@pytest.fixture
def fresh_dynamo():
    with warnings.catch_warnings():  # PyTorch's own warnings while it loads are ignored
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call):
    return torch.compile(call, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("op", OPS)
def test_compile(op, rng, fresh_dynamo):
    x = inputs(op, rng, grad=True, dtype=np.float32)
    call, given = pure(op, x, output_final_state=True)
    want = call(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = compiled(call)(*given)
    assert_equal(got, want)
    ds = [weights(o) for o in want]
    assert_equal(torch.autograd.grad(got, given, ds), torch.autograd.grad(want, given, ds))


def test_compile_calls_as_people_write_them(rng, fresh_dynamo):
    """Defaults that Python fills in, NumPy's gates, functions as feature maps, no gradients."""

    def phi(y):
        return torch.nn.functional.elu(y) + 1

    slopes = linattn.lightning_slopes(2)
    calls = {
        "retention": lambda x: linattn.retention(x["q"], x["k"], x["v"]),
        "lightning_attention": lambda x: linattn.lightning_attention(
            x["q"], x["k"], x["v"], slopes, chunk_size=4, scale=1
        ),
        "linear_attention": lambda x: linattn.linear_attention(
            x["q"], x["k"], x["v"], feature_map=phi, qk_l2norm=True, normalize="clamp"
        ),
        "gla": lambda x: linattn.gla(x["q"], x["k"], x["v"], alpha=x["g"].exp(), mode="recurrent"),
        "simple_gla": lambda x: linattn.simple_gla(
            x["q"][:1], x["k"][:1], x["v"][:1], x["g"][:1], cu_seqlens=torch.tensor([0, 3, 5])
        ),
    }
    for op, call in calls.items():
        for grad in (False, True):
            x = inputs(op, rng, grad=grad)
            got, want = compiled(call)(x), call(x)
            assert_equal(got[:1], want[:1])
            assert got[0].requires_grad == grad and got[1] is None


def test_compile_for_any_length(rng, fresh_dynamo):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(
        lambda q, k, v, g: linattn.gla(q, k, v, g, output_final_state=True),
        fullgraph=True,
        backend=backend,
        dynamic=True,
    )
    for T in (6, 7, 20):  # no other size is one of these
        x = inputs("gla", rng, T=T, state=False, grad=True)
        assert_equal(call(**x), linattn.gla(**x, output_final_state=True))
    assert len(graphs) == 1


def test_compile_under_autocast(rng, fresh_dynamo):
    x = inputs("gla", rng, dtype=np.float32)
    call, given = pure("gla", x)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(call)(*given), call(*given)
    assert got[0].dtype == torch.bfloat16
    assert_equal(got, want)


def test_export_and_make_fx_see_the_operator(rng):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = inputs("gla", rng)
    graph = make_fx(lambda q: linattn.gla(**x | {"q": q})[0])(x["q"]).graph
    assert torch.ops.linattn.gla.default in [node.target for node in graph.nodes]

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g):
            return linattn.gla(q, k, v, g)[0]

    x.pop("initial_state")
    exported = torch.export.export(Layer(), (), x)
    assert torch.equal(exported.module()(**x), linattn.gla(**x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_sees_the_operator(rng):
    x = inputs("gla", rng)
    traced = torch.jit.trace(lambda q: linattn.gla(**x | {"q": q})[0], (x["q"],))
    q = 2 * x["q"]
    assert torch.equal(traced(q), linattn.gla(**x | {"q": q})[0])


@pytest.mark.parametrize("op", OPS)
def test_functional_gradients(op, rng):
    x = inputs(op, rng)
    call, given = pure(op, x, output_final_state=True)

    def loss(*given):
        return sum((weights(o) * o).sum() for o in call(*given))

    want = gradients(
        op, refilled(x, iter([y.clone().requires_grad_() for y in given])), output_final_state=True
    )
    every = tuple(range(len(given)))
    assert_equal(torch.func.grad(loss, argnums=every)(*given), want)


def mapped(call, dims, given):
    """vmap of a function of all these arrays, and the same by a loop."""
    n = next(x.shape[d] for x, d in zip(given, dims, strict=True) if d is not None)
    calls = [
        [x if d is None else x.select(d, i) for x, d in zip(given, dims, strict=True)]
        for i in range(n)
    ]
    loop = [torch.stack(parts) for parts in zip(*(call(*one) for one in calls), strict=True)]
    return torch.func.vmap(call, in_dims=tuple(dims))(*given), loop


@pytest.mark.parametrize("which", ["all", "q", "states", "gates"])
@pytest.mark.parametrize("op", OPS)
def test_vmap(op, which, rng):
    """One call, with the bits of a loop. Gradients that are sums over rows are a loop."""
    x = inputs(op, rng)
    call, given = pure(op, x, output_final_state=True)
    names = [name for name, y in x.items() for _ in tensors_in(y)]
    chosen = {
        "all": lambda name: True,
        "q": lambda name: name == "q",
        "states": lambda name: name == "initial_state",
        "gates": lambda name: name in ("g", "gamma", "slopes", "beta", "bonus", "eta"),
    }[which]
    dims = [i % 2 if chosen(name) else None for i, name in enumerate(names)]
    if all(d is None for d in dims):
        dims[2] = 0
    several = [
        y if d is None else torch.stack([y, y / 2, y / 4], d)
        for y, d in zip(given, dims, strict=True)
    ]

    def gradients(*given):
        every = tuple(range(len(given)))

        def loss(*given):
            return sum((weights(o) * o).sum() for o in call(*given))

        return torch.func.grad(loss, argnums=every)(*given)

    for function in (call, gradients):
        got, want = mapped(function, dims, several)
        assert_equal(got, want)


def test_vmap_is_one_call(rng, monkeypatch):
    x = inputs("gla", rng)
    qs, counted, real = torch.stack([x["q"], 2 * x["q"]]), [], linattn._linattn.forward
    core = {"forward": lambda *given, **options: counted.append(1) or real(*given, **options)}
    monkeypatch.setattr(
        autograd, "_linattn", types.SimpleNamespace(**vars(linattn._linattn) | core)
    )
    torch.func.vmap(lambda q: linattn.gla(**x | {"q": q})[0])(qs)
    assert len(counted) == 1


def test_vmap_of_what_has_no_axis_for_it(rng):
    """Packed sequences, and one head alone: one call after another."""
    q, k, v = (torch.from_numpy(rng.standard_normal((3, 1, 9, 2, 4))) for _ in range(3))
    ends = torch.tensor([0, 4, 9])
    packed = lambda *x: linattn.linear_attention(*x, cu_seqlens=ends)[:1]  # noqa: E731
    alone = lambda *x: linattn.linear_attention(*x)[:1]  # noqa: E731
    for call, given in (
        (packed, (q, k, v)),
        (alone, (q[:, 0, :, 0], k[:, 0, :, 0], v[:, 0, :, 0])),
    ):
        got, want = mapped(call, (0, 0, 0), given)
        assert_equal(got, want)


def test_vmap_of_scans_and_convolutions(rng):
    f = lambda *shape: torch.from_numpy(rng.standard_normal(shape))  # noqa: E731
    u, delta, A, B, C, S = (
        f(3, 2, 7, 4),
        f(3, 2, 7, 4).abs(),
        -f(4, 5).abs(),
        f(2, 7, 1, 5),
        f(3, 2, 7, 1, 5),
        f(2, 4, 5),
    )

    def scan(u, delta, A, B, C, S):
        return linattn.selective_scan(u, delta, A, B, C, initial_state=S, output_final_state=True)

    def convolve(x, weight):
        return linattn.causal_conv1d(x, weight, output_final_state=True)

    def gradient(u, delta, A, B, C, S):
        loss = lambda A, u: (scan(u, delta, A, B, C, S)[0] ** 2).sum()  # noqa: E731
        return torch.func.grad(loss, argnums=(0, 1))(A, u)

    for call, dims, given in (
        (scan, (0, 0, None, None, 0, None), (u, delta, A, B, C, S)),
        (gradient, (0, 0, None, None, 0, None), (u, delta, A, B, C, S)),
        (convolve, (0, None), (u, f(4, 3))),
        (convolve, (None, 0), (u[0], f(3, 4, 3))),
    ):
        got, want = mapped(call, dims, given)
        assert_equal(got, want)
