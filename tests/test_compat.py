"""linattn.compat.fla: fla's names and arguments, and what its functions compute."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from support.compare import agree
from support.device import imported
from support.variants import PAIR_DECAY

from linattn import VARIANTS, reference
from linattn.compat import (
    _fla_polynomials,
    _fla_precond,
    _fla_rules,
    _fla_scans,
    _fla_slots,
    fla,
)
from linattn.testing import make_inputs

# Parameters of fla.ops, fla-core 0.6.0, in order, with their defaults. Those that fla reads from
# **kwargs are keyword-only here.
COMMON = "scale=None, initial_state=None, output_final_state=False"
L2 = "use_qk_l2norm_in_kernel=False"
OLD = "transpose_state_layout=None"
# fmt: off
SIGNATURES = {
    "chunk_linear_attn": f"q, k, v, {COMMON}, normalize=True, cu_seqlens=None",
    "fused_recurrent_linear_attn":
        f"q, k, v, {COMMON}, reverse=False, normalize=False, cu_seqlens=None",
    "chunk_retention": f"q, k, v, {COMMON}, cu_seqlens=None, *, chunk_size=None",
    "fused_recurrent_retention":
        f"q, k, v, {COMMON}, reverse=False, state_v_first=False, cu_seqlens=None, *, {OLD}",
    "chunk_lightning_attn":
        f"q, k, v, layer_idx, num_layers, {COMMON}, cu_seqlens=None, *, chunk_size=None",
    "fused_recurrent_lightning_attn":
        f"q, k, v, layer_idx, num_layers, {COMMON}, reverse=False, cu_seqlens=None",
    "chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, {COMMON}, state_v_first=False, "
                        f"cu_seqlens=None, cu_seqlens_cpu=None, *, chunk_size=None, {OLD}",
    "fused_chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, {COMMON}, cu_seqlens=None",
    "fused_recurrent_simple_gla":
        f"q, k, v, g=None, g_gamma=None, {COMMON}, reverse=False, state_v_first=False, "
        f"cu_seqlens=None, *, {OLD}",
    "chunk_gla": f"q, k, v, g, {COMMON}, state_v_first=False, cu_seqlens=None, "
                 f"cu_seqlens_cpu=None, *, {OLD}",
    "fused_recurrent_gla": f"q, k, v, gk=None, gv=None, {COMMON}, reverse=False, "
                           f"state_v_first=False, cu_seqlens=None, *, {OLD}",
    "chunk_delta_rule": f"q, k, v, beta, {COMMON}, {L2}, cu_seqlens=None, cu_seqlens_cpu=None, "
                        "*, chunk_size=None",
    "fused_recurrent_delta_rule": f"q, k, v, beta=None, {COMMON}, {L2}, cu_seqlens=None",
    "chunk_gated_delta_rule":
        f"q, k, v, g, beta, {COMMON}, {L2}, use_beta_sigmoid_in_kernel=False, "
        "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
        "chunk_indices=None, cp_context=None, *, chunk_size=None, use_gate_in_kernel=False, "
        f"A_log=None, dt_bias=None, {OLD}",
    "fused_recurrent_gated_delta_rule":
        f"q, k, v, g=None, gk=None, gv=None, beta=None, {COMMON}, {L2}, "
        "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, "
        f"allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, *, {OLD}",
    "chunk_kda":
        f"q, k, v, g, beta, {COMMON}, {L2}, use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, "
        "use_graph=False, max_num_seqs=None, *, chunk_size=None, A_log=None, dt_bias=None, "
        f"{OLD}",
    "fused_recurrent_kda":
        f"q, k, v, g, beta, A_log=None, dt_bias=None, {COMMON}, {L2}, use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, "
        f"state_v_first=False, cu_seqlens=None, *, {OLD}",
}
# fmt: on
ALIASES = {
    "fused_chunk_linear_attn": "chunk_linear_attn",
    "fused_chunk_retention": "chunk_retention",
    "chunk_gdn": "chunk_gated_delta_rule",
    "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule",
}
# fla's name for an op -> ours, where they differ
OURS = {"linear_attn": "linear_attention", "lightning_attn": "lightning_attention"}
LAYER, LAYERS = 3, 8
# These must be refused by name, wherever they are parameters.
UNSUPPORTED = {
    "reverse": True,
    "gv": np.zeros(1),
    "return_intermediate_states": True,
}
# These have tests of their own, under "gates and betas before their activation".
ACTIVATION = {
    "use_gate_in_kernel",
    "A_log",
    "dt_bias",
    "lower_bound",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
}
NO_EFFECT = {
    "cu_seqlens_cpu": np.array([0, 1]),
    "chunk_indices": np.zeros((1, 2)),
    "safe_gate": True,
    "disable_recompute": True,
    "use_graph": True,
    "max_num_seqs": 4,
    "chunk_size": 16,
}
functions = pytest.mark.parametrize("name", SIGNATURES)


def split(name):
    """The mode and our op."""
    kind, _, op = name.removeprefix("fused_").partition("_")
    return kind, OURS.get(op, op)


def parameters(name):
    return inspect.signature(getattr(fla, name)).parameters


def for_both(name, rng, dtype=np.float64, B=2, T=70, H=2, HV=2, K=8, V=12):
    """For our op and for fla's function, the same problem."""
    _, op = split(name)
    x = make_inputs(op, rng, B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype)
    theirs = dict(x)
    if op == "linear_attention":
        x |= {"feature_map": "identity", "normalize": False}
        theirs["normalize"] = False
    if op == "retention":
        x["gamma"] = 1 - 2.0 ** (-5 - np.arange(HV))
        del theirs["gamma"]
    if op == "lightning_attention":
        x["slopes"] = 8 / HV * (1 - LAYER / LAYERS) * np.arange(HV)
        del theirs["slopes"]
        theirs |= {"layer_idx": LAYER, "num_layers": LAYERS}
    if name == "fused_recurrent_gla":
        theirs["gk"] = theirs.pop("g")
    return x, theirs


def test_every_name_is_there():
    files = (_fla_polynomials, _fla_precond, _fla_rules, _fla_scans, _fla_slots)
    elsewhere = {name for file in files for name in file.__all__} - {"by_value"}
    elsewhere |= {"chunk_gdn2", "fused_recurrent_gdn2", "use_linattn"}  # test_compat_slots.py
    elsewhere |= {"parallel_retention", "parallel_simple_gla"}
    elsewhere |= {"build_cp_context"}  # test_compat_ranks.py
    assert sorted(fla.__all__) == sorted([*SIGNATURES, *ALIASES, *elsewhere])
    for alias, name in ALIASES.items():
        assert getattr(fla, alias) is getattr(fla, name)


@functions
def test_the_parameters_are_flas(name):
    found = [str(p.replace(annotation=p.empty)) for p in parameters(name).values()]
    kinds = [p.kind for p in parameters(name).values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        found.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    assert ", ".join(found) == SIGNATURES[name]


@functions
def test_it_computes_our_op(name, rng):
    _, op = split(name)
    x, theirs = for_both(name, rng)
    want, state = getattr(reference, op)(**x)
    o, final = getattr(fla, name)(**theirs, output_final_state=True)
    agree(o, want)
    agree(final, state)
    assert getattr(fla, name)(**theirs)[1] is None
    # on from there, and another scale
    want, state = getattr(reference, op)(**x, initial_state=state, scale=0.3)
    o, final = getattr(fla, name)(**theirs, initial_state=final, scale=0.3, output_final_state=True)
    agree(o, want)
    agree(final, state)


@functions
def test_sequences_layouts_and_norms(name, rng):
    _, op = split(name)
    x, theirs = for_both(name, rng, B=1)
    cu = np.array([0, 5, 5, 70])
    more = {}
    if "use_qk_l2norm_in_kernel" in parameters(name):
        x["qk_l2norm"], more["use_qk_l2norm_in_kernel"] = True, True
    v_first = "state_v_first" in parameters(name)
    if v_first:
        more["state_v_first"] = True
    want, state = getattr(reference, op)(**x, cu_seqlens=cu)
    o, final = getattr(fla, name)(**theirs, cu_seqlens=cu, output_final_state=True, **more)
    agree(o, want)
    agree(final.swapaxes(2, 3) if v_first else final, state)


@functions
def test_what_only_changes_how_is_taken(name, rng):
    _, theirs = for_both(name, rng)
    taken = {what: value for what, value in NO_EFFECT.items() if what in parameters(name)}
    want, _ = getattr(fla, name)(**theirs)
    agree(getattr(fla, name)(**theirs, **taken)[0], want)


@functions
def test_what_is_not_supported_is_refused_by_name(name, rng):
    _, theirs = for_both(name, rng)
    tried = [what for what in UNSUPPORTED if what in parameters(name)]
    for what in tried:
        with pytest.raises(ValueError, match=rf"^{what}: not supported"):
            getattr(fla, name)(**theirs | {what: UNSUPPORTED[what]})
    if "cp_context" in parameters(name):
        with pytest.raises(TypeError, match=r"^cp_context: expected a context of .*, got .*object"):
            getattr(fla, name)(**theirs, cp_context=object())
    with pytest.raises(TypeError, match="head_first"):
        getattr(fla, name)(**theirs, head_first=True)
    # every parameter is used, refused, or documented to make no difference
    known = {
        *theirs,
        *UNSUPPORTED,
        *NO_EFFECT,
        *ACTIVATION,
        "scale",
        "initial_state",
        "output_final_state",
        "cu_seqlens",
        "cp_context",
        "normalize",
        "state_v_first",
        "use_qk_l2norm_in_kernel",
        "g",
        "gk",
        "g_gamma",
        "transpose_state_layout",
    }
    assert set(parameters(name)) <= known


@pytest.mark.parametrize("name", ["chunk_linear_attn", "fused_recurrent_linear_attn"])
def test_a_normaliser_and_its_state(name, rng):
    q, k = (rng.random((2, 33, 3, 6)) for _ in range(2))
    v = rng.standard_normal((2, 33, 3, 5))
    z = k.cumsum(1)
    den = 6**-0.5 * (q * z).sum(-1, keepdims=True) + 1e-10
    plain = getattr(fla, name)(q, k, v, normalize=False)[0]
    o, (S, last) = getattr(fla, name)(q, k, v, normalize=True, output_final_state=True)
    agree(o, plain / den)
    assert last.shape == (2, 1, 3, 6)
    agree(last[:, 0], z[:, -1])
    half = getattr(fla, name)(
        q[:, :20], k[:, :20], v[:, :20], normalize=True, output_final_state=True
    )
    rest = getattr(fla, name)(
        q[:, 20:],
        k[:, 20:],
        v[:, 20:],
        initial_state=half[1],
        normalize=True,
        output_final_state=True,
    )
    agree(np.concatenate([half[0], rest[0]], 1), o)
    agree(rest[1][0], S)
    pair = r"initial_state: expected the pair \(S, z\) of a normalised state, got "
    for wrong, error, said in (
        (S, ValueError, pair + "<class 'numpy.ndarray'>"),
        ([S, last], ValueError, pair + "<class 'list'>"),
        ((S, last, S), ValueError, pair + "a tuple of 3"),
        ((S, None), TypeError, r"initial_state\[1\]: expected an array, got <class 'NoneType'>"),
        ((None, last), TypeError, r"initial_state\[0\]: expected an array, got None"),
        ((S, last[:, 0]), ValueError, r"initial_state\[1\]: expected \[N,1,H,K\], got \(2, 3, 6\)"),
        (
            (S, k[:, :2]),
            ValueError,
            r"initial_state\[1\]: expected \[N,1,H,K\], got \(2, 2, 3, 6\)",
        ),
    ):
        with pytest.raises(error, match=f"^{said}$"):
            getattr(fla, name)(q, k, v, initial_state=wrong, normalize=True)


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name.endswith("simple_gla")])
def test_decays_per_token_per_head_both_or_none(name, rng):
    x, theirs = for_both(name, rng)
    g, function = theirs.pop("g"), getattr(fla, name)
    gamma = -rng.random(2)
    whole = np.broadcast_to(gamma, g.shape)
    for given, same in (
        ({"g": g}, g),
        ({"g_gamma": gamma}, whole),
        ({"g": g, "g_gamma": gamma}, g + whole),
        ({}, 0 * g),
    ):
        agree(function(**theirs, **given)[0], reference.simple_gla(**x | {"g": same})[0])


def test_the_gated_delta_rules_gates(rng):
    name = "fused_recurrent_gated_delta_rule"
    x, theirs = for_both(name, rng, HV=4)
    g, beta, function = theirs.pop("g"), theirs.pop("beta"), getattr(fla, name)
    gk = -rng.random((*g.shape, 8))
    for given, same in (
        ({"gk": gk}, gk),
        ({"g": g, "gk": gk}, g[..., None] + gk),
        ({}, np.zeros_like(gk)),
    ):
        want = reference.kda(**x | {"g": same})[0]
        agree(function(**theirs, beta=beta, **given)[0], want)
    want = reference.gated_delta_rule(**x | {"beta": np.ones_like(beta)})[0]
    agree(function(**theirs, g=g)[0], want)  # beta is 1 by default
    x, theirs = for_both("fused_recurrent_delta_rule", rng)
    want = reference.delta_rule(**x | {"beta": np.ones_like(x["beta"])})[0]
    agree(fla.fused_recurrent_delta_rule(theirs["q"], theirs["k"], theirs["v"])[0], want)


def test_no_decay_at_all_in_gla(rng):
    x, theirs = for_both("fused_recurrent_gla", rng)
    del theirs["gk"]
    want = reference.gla(**x | {"g": np.zeros_like(x["g"])})[0]
    agree(fla.fused_recurrent_gla(**theirs)[0], want)


@functions
def test_pytorchs_tensors(name, rng):
    torch = imported("torch")
    _, theirs = for_both(name, rng, dtype=np.float32)
    want, _ = getattr(fla, name)(**theirs)
    tensors = {
        what: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for what, a in theirs.items()
    }
    o, state = getattr(fla, name)(**tensors, output_final_state=True)
    assert isinstance(o, torch.Tensor) and isinstance(state, torch.Tensor)
    np.testing.assert_array_equal(o.numpy(), want)


@functions
def test_the_old_name_of_state_v_first(name, rng):
    _, theirs = for_both(name, rng)
    function = getattr(fla, name)
    if "state_v_first" not in parameters(name):
        with pytest.raises(TypeError, match="transpose_state_layout"):
            function(**theirs, transpose_state_layout=True)
        return
    for v_first, more in (
        (True, {}),
        (False, {}),
        (True, {"state_v_first": True}),
        (False, {"state_v_first": False}),
    ):
        state = some_state("", rng, np.float64)
        state = state.swapaxes(2, 3) if v_first else state
        given = {"initial_state": state, "output_final_state": True}
        want, last = function(**theirs, **given, state_v_first=v_first)
        said = r"^transpose_state_layout: deprecated, its new name is state_v_first$"
        with pytest.warns(DeprecationWarning, match=said) as caught:
            o, final = function(**theirs, **given, transpose_state_layout=v_first, **more)
        assert [w.filename for w in caught] == [__file__]
        np.testing.assert_array_equal(o, want)
        np.testing.assert_array_equal(final, last)
    with pytest.raises(ValueError, match=r"^transpose_state_layout: expected .* state_v_first"):
        function(**theirs, state_v_first=True, transpose_state_layout=False)
    for wrong in ({"transpose_state_layout": 1}, {"state_v_first": 1}):
        with pytest.raises(TypeError, match=rf"^{next(iter(wrong))}: expected True or False, got"):
            function(**theirs, **{"transpose_state_layout": True} | wrong)


STATES = (np.float16, ml_dtypes.bfloat16, np.float64)


def some_state(name, rng, dtype, B=2, H=2, K=8, V=12):
    """An initial state; the pair where fla's function normalises by default."""
    S = rng.standard_normal((B, H, K, V)).astype(dtype)
    if name == "chunk_linear_attn":
        return S, (9 + rng.random((B, 1, H, K))).astype(dtype)
    return S


def each(function, state):
    return tuple(map(function, state)) if isinstance(state, tuple) else function(state)


def parts(state):
    return state if isinstance(state, tuple) else (state,)


def by_default(name, theirs):
    """These arguments without `normalize`, so that it is as fla has it."""
    return {what: x for what, x in theirs.items() if what != "normalize"}


@pytest.mark.parametrize("dtype", STATES)
@functions
def test_an_initial_state_of_any_float_dtype(name, dtype, rng):
    _, theirs = for_both(name, rng, dtype=np.float32)
    theirs, function = by_default(name, theirs), getattr(fla, name)
    given = some_state(name, rng, dtype)
    kept = each(np.copy, given)
    o, final = function(**theirs, initial_state=given, output_final_state=True)
    same = each(lambda x: x.astype(np.float32), given)
    want, state = function(**theirs, initial_state=same, output_final_state=True)
    assert {x.dtype for x in (o, *parts(final))} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(o, want)
    for got, same in zip(parts(final) + parts(given), parts(state) + parts(kept), strict=True):
        np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@functions
def test_sums_in_float64_take_a_state_of_any_float_dtype(name, dtype, rng):
    _, theirs = for_both(name, rng)
    state = some_state("", rng, dtype)
    o, final = getattr(fla, name)(**theirs, initial_state=state, output_final_state=True)
    want, _ = getattr(fla, name)(**theirs, initial_state=state.astype(np.float64))
    assert o.dtype == final.dtype == np.float64
    np.testing.assert_array_equal(o, want)


@functions
def test_a_state_that_is_no_float_is_refused(name, rng):
    _, theirs = for_both(name, rng, dtype=np.float16)
    for state, got in ((some_state("", rng, np.int64), "int64"), (3.0, "<class 'float'>")):
        with pytest.raises(TypeError, match=rf"^initial_state: expected .*, got {got}$"):
            getattr(fla, name)(**theirs, initial_state=state)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@functions
def test_the_gradient_of_a_state_has_its_dtype(name, dtype, rng):
    torch = imported("torch")
    _, theirs = for_both(name, rng, dtype=np.float32)
    theirs = {
        what: torch.from_numpy(a) if isinstance(a, np.ndarray) else a
        for what, a in by_default(name, theirs).items()
    }
    state = each(
        lambda x: torch.from_numpy(x).to(getattr(torch, dtype)), some_state(name, rng, np.float32)
    )

    def gradients(state):
        state = each(lambda x: x.detach().requires_grad_(), state)
        o, final = getattr(fla, name)(**theirs, initial_state=state, output_final_state=True)
        assert {x.dtype for x in parts(final)} == {torch.float32}
        loss = o.square().sum() + sum(x.sum() for x in parts(final))
        return torch.autograd.grad(loss, state)

    exact = gradients(each(lambda x: x.float(), state))
    for got, want in zip(gradients(state), exact, strict=True):
        assert got.dtype == getattr(torch, dtype)
        assert torch.equal(got, want.to(got.dtype))


RECURRENT = [name for name in SIGNATURES if name.startswith("fused_recurrent")]
# whether fla's o has the dtype of q or of v
O_LIKE = dict.fromkeys(RECURRENT, "q") | {
    "fused_recurrent_gated_delta_rule": "v",
    "fused_recurrent_kda": "v",
}
DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
MIXED = [  # q, k, v, and a dtype that holds all three
    ("float32", "float32", "float16", "float32"),
    ("float16", "float16", "float32", "float32"),
    ("bfloat16", "bfloat16", "float32", "float32"),
    ("bfloat16", "bfloat16", "float16", "float32"),
    ("float32", "float32", "float64", "float64"),
    ("float64", "float64", "bfloat16", "float64"),
    ("bfloat16", "float32", "bfloat16", "float32"),
]
recurrent = pytest.mark.parametrize("name", RECURRENT)
mixed = pytest.mark.parametrize("dtypes", MIXED, ids="-".join)


def of_dtypes(theirs, q, k, v, *_):
    return theirs | {
        what: theirs[what].astype(DTYPES[dtype]) for what, dtype in (("q", q), ("k", k), ("v", v))
    }


@mixed
@recurrent
def test_q_k_and_v_of_several_dtypes_token_by_token(name, dtypes, rng):
    _, theirs = for_both(name, rng, T=9, dtype=np.float32)
    theirs, function, wide = of_dtypes(theirs, *dtypes), getattr(fla, name), DTYPES[dtypes[3]]
    more = {"initial_state": some_state("", rng, np.float16), "output_final_state": True}
    o, final = function(**theirs, **more)
    want, state = function(**theirs | {what: theirs[what].astype(wide) for what in "qkv"}, **more)
    assert o.dtype == theirs[O_LIKE[name]].dtype and final.dtype == wide
    np.testing.assert_array_equal(o, want.astype(o.dtype))
    np.testing.assert_array_equal(final, state)


@mixed
def test_several_dtypes_and_no_gate(dtypes, rng):
    for name, gates in (
        ("fused_recurrent_gated_delta_rule", ("g", "beta")),
        ("fused_recurrent_gla", ("gk",)),
        ("fused_recurrent_simple_gla", ("g",)),
        ("fused_recurrent_delta_rule", ("beta",)),
    ):
        _, theirs = for_both(name, rng, T=9, dtype=np.float32)
        theirs = {x: a for x, a in of_dtypes(theirs, *dtypes).items() if x not in gates}
        assert getattr(fla, name)(**theirs)[0].dtype == theirs[O_LIKE[name]].dtype


@mixed
def test_several_dtypes_and_a_normaliser(dtypes, rng):
    """fla divides o, in q's dtype, by a denominator in the common dtype of q and k."""
    _, theirs = for_both("fused_recurrent_linear_attn", rng, T=9, dtype=np.float32)
    theirs = of_dtypes(theirs | {what: abs(theirs[what]) for what in "qk"}, *dtypes)
    o, final = fla.fused_recurrent_linear_attn(
        **theirs | {"normalize": True}, output_final_state=True
    )
    assert o.dtype == (theirs["q"].dtype if dtypes[0] == dtypes[1] else np.float32)
    assert {x.dtype for x in final} == {np.dtype(DTYPES[dtypes[3]])}


@mixed
@recurrent
def test_gradients_of_several_dtypes(name, dtypes, rng):
    torch = imported("torch")
    _, theirs = for_both(name, rng, T=9, dtype=np.float32)
    theirs = {
        what: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for what, a in theirs.items()
    }
    given = {
        what: theirs[what].to(getattr(torch, dtype)).requires_grad_()
        for what, dtype in zip("qkv", dtypes, strict=False)
    }
    o, _ = getattr(fla, name)(**theirs | given)
    assert o.dtype == given[O_LIKE[name]].dtype
    loss = o.float().sum()
    wide = {
        what: x.detach().to(getattr(torch, dtypes[3])).requires_grad_() for what, x in given.items()
    }
    same = getattr(fla, name)(**theirs | wide)[0].float().sum()
    want = torch.autograd.grad(same, list(wide.values()))
    found = torch.autograd.grad(loss, list(given.values()))
    for got, exact, x in zip(found, want, given.values(), strict=True):
        assert got.dtype == x.dtype
        assert torch.equal(got, exact.to(got.dtype))


@functions
def test_other_dtypes_of_v_are_refused(name, rng):
    torch = imported("torch")
    _, theirs = for_both(name, rng, T=9, dtype=np.float32)
    v = theirs["v"]
    wrong = [(v.astype(np.int32), "int32"), (torch.from_numpy(v).half(), "float16")]
    if name not in RECURRENT:
        wrong.append((v.astype(np.float16), "float16"))
    for x, got in wrong:
        with pytest.raises(TypeError, match=rf"^v: expected float32 .*, got {got}$"):
            getattr(fla, name)(**theirs | {"v": x})


def test_every_op_that_fla_has_is_in_the_table():
    """The ops with keys of their own have other letters there: test_compat_rules.py."""
    one_key = {op for op, row in VARIANTS.items() if row.rule in ("additive", "delta")}
    assert {split(name)[1] for name in SIGNATURES} == one_key - set(PAIR_DECAY)


# ---- gates and betas before their activation ----

PER_HEAD = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
PER_KEY = ["chunk_kda", "fused_recurrent_kda"]
activated = pytest.mark.parametrize("name", PER_HEAD + PER_KEY)


def raw(name, rng, dtype=np.float64, H=2, HV=4, K=8):
    """A problem with g and beta before their activation, and the parameters of the gate."""
    x, theirs = for_both(name, rng, T=40, H=H, HV=HV, K=K, dtype=dtype)
    for what in ("g", "beta"):
        theirs[what] = rng.normal(0, 3, theirs[what].shape).astype(dtype)
    bias = HV * K if name in PER_KEY else HV
    return x, theirs, rng.uniform(0, 2, HV).astype(dtype), rng.standard_normal(bias).astype(dtype)


def by_hand(g, A_log, dt_bias, lower_bound=None):
    """A log decay from its formula, a head and a key at a time."""
    out = np.empty(g.shape)
    for at in np.ndindex(g.shape[2:]):
        bias = 0 if dt_bias is None else dt_bias.reshape(g.shape[2:])[at]
        rate = 1 if A_log is None else np.exp(A_log[at[0]])
        u = g[(..., *at)] + bias
        if lower_bound is None:
            out[(..., *at)] = -rate * np.log1p(np.exp(u))
        else:
            out[(..., *at)] = lower_bound / (1 + np.exp(-rate * u))
    return out


@pytest.mark.parametrize("biased", [True, False])
@activated
def test_a_gate_in_the_kernel(name, biased, rng):
    _, op = split(name)
    x, theirs, A_log, dt_bias = raw(name, rng)
    dt_bias = dt_bias if biased else None
    want, state = getattr(reference, op)(
        **x | {"g": by_hand(theirs["g"], A_log, dt_bias), "beta": theirs["beta"]}
    )
    given = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    o, final = getattr(fla, name)(**theirs, **given, output_final_state=True)
    agree(o, want)
    agree(final, state)
    given["A_log"] = A_log.reshape(1, 1, -1, 1)  # fla's kernels read the numbers in their order
    if biased:
        given["dt_bias"] = dt_bias.reshape(theirs["g"].shape[2:])
    agree(getattr(fla, name)(**theirs, **given)[0], want)


@pytest.mark.parametrize("lower_bound", [-5.0, -20])
@pytest.mark.parametrize("rate", [True, False])
@pytest.mark.parametrize("name", PER_KEY)
def test_a_bounded_gate_in_the_kernel(name, rate, lower_bound, rng):
    x, theirs, A_log, dt_bias = raw(name, rng)
    A_log = A_log if rate else None
    g = by_hand(theirs["g"], A_log, dt_bias, lower_bound)
    want, _ = reference.kda(**x | {"g": g, "beta": theirs["beta"]})
    given = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    more = {"safe_gate": True} if "safe_gate" in parameters(name) else {}
    agree(getattr(fla, name)(**theirs, **given, lower_bound=lower_bound, **more)[0], want)


@pytest.mark.parametrize("twice", [True, False])
@activated
def test_a_beta_in_the_kernel(name, twice, rng):
    _, op = split(name)
    x, theirs, *_ = raw(name, rng)
    theirs["g"] = x["g"]
    beta = (1 + twice) / (1 + np.exp(-theirs["beta"]))
    want, _ = getattr(reference, op)(**x | {"beta": beta})
    given = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": twice}
    agree(getattr(fla, name)(**theirs, **given)[0], want)


def test_the_gates_of_keys_have_no_activation_beside_that_of_heads(rng):
    name = "fused_recurrent_gated_delta_rule"
    x, theirs, A_log, dt_bias = raw(name, rng)
    gk = -rng.random((*theirs["g"].shape, 8))
    given = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "gk": gk}
    g = by_hand(theirs["g"], A_log, dt_bias)[..., None] + gk
    want, _ = reference.kda(**x | {"g": g, "beta": theirs["beta"]})
    agree(getattr(fla, name)(**theirs, **given)[0], want)


def test_no_beta_before_its_activation_is_one(rng):
    """As in fla, which puts ones in its place first."""
    name = "fused_recurrent_gated_delta_rule"
    x, theirs = for_both(name, rng, HV=4)
    beta = np.full_like(theirs.pop("beta"), 1 / (1 + np.exp(-1)))
    want, _ = reference.gated_delta_rule(**x | {"beta": beta})
    agree(getattr(fla, name)(**theirs, use_beta_sigmoid_in_kernel=True)[0], want)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@activated
def test_gates_of_half_numbers_are_computed_in_float32(name, dtype, rng):
    _, theirs, A_log, dt_bias = raw(name, rng, dtype=np.float32)
    given = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    given["use_beta_sigmoid_in_kernel"] = True
    narrow = {what: theirs[what].astype(dtype) for what in ("g", "beta")}
    same = {what: a.astype(np.float32) for what, a in narrow.items()}
    got, want = (getattr(fla, name)(**theirs | gates, **given)[0] for gates in (narrow, same))
    np.testing.assert_array_equal(got, want)


@activated
def test_gradients_flow_through_the_activation(name, rng):
    torch = imported("torch")
    F = torch.nn.functional
    _, theirs, A_log, dt_bias = raw(name, rng)
    tensors = {
        what: torch.from_numpy(a).requires_grad_()
        for what, a in (theirs | {"A_log": A_log, "dt_bias": dt_bias}).items()
    }
    flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    o, _ = getattr(fla, name)(**tensors, **flags, allow_neg_eigval=True)
    found = torch.autograd.grad(o.square().sum(), list(tensors.values()))
    made = dict(tensors)
    rate, bias = made.pop("A_log").exp(), made.pop("dt_bias")
    if name in PER_KEY:
        rate, bias = rate[:, None], bias.reshape(4, 8)
    made["g"] = -rate * F.softplus(made["g"] + bias, threshold=100)
    made["beta"] = 2 * made["beta"].sigmoid()
    same, _ = getattr(fla, name)(**made)
    want = torch.autograd.grad(same.square().sum(), list(tensors.values()))
    for what, got, exact in zip(tensors, found, want, strict=True):
        assert exact.abs().sum() > 0, what
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-11)


@activated
def test_activations_that_do_not_fit_are_refused(name, rng):
    _, theirs, A_log, dt_bias = raw(name, rng)
    per_key, function = name in PER_KEY, getattr(fla, name)
    on = {"use_gate_in_kernel": True, "A_log": A_log}
    unless = " and without lower_bound" if per_key else ""
    bias = r"\[HV\*K\] = \(32,\)" if per_key else r"\[HV\] = \(4,\)"
    letters = r"\[B,T,HV,K\]" if per_key else r"\[B,T,HV\]"
    flag = "with use_gate_in_kernel=True"
    without = "expected None without use_gate_in_kernel=True"
    cases = [
        (ValueError, {"A_log": A_log}, f"A_log: {without}, got an array"),
        (ValueError, {"dt_bias": dt_bias}, f"dt_bias: {without}, got an array"),
        (
            ValueError,
            {"use_gate_in_kernel": True},
            rf"A_log: expected an array \[HV\] {flag}{unless}, got None",
        ),
        (ValueError, on | {"A_log": A_log[:3]}, r"A_log: expected \[HV\] = \(4,\), got \(3,\)"),
        (TypeError, on | {"A_log": 0.5}, r"A_log: expected an array \[HV\], got 0.5"),
        (ValueError, on | {"dt_bias": dt_bias[1:]}, rf"dt_bias: expected {bias}, got \(\d+,\)"),
        (ValueError, on | {"g": theirs["g"][0]}, rf"g: expected {letters}, got .*"),
        (TypeError, on | {"g": None}, rf"g: expected an array {letters} {flag}, got None"),
        (
            ValueError,
            {"allow_neg_eigval": True},
            "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got False",
        ),
        (
            TypeError,
            {"use_beta_sigmoid_in_kernel": True, "beta": 0.5},
            r"beta: expected an array \[B,T,HV\] with use_beta_sigmoid_in_kernel=True, got 0.5",
        ),
    ]
    if per_key:
        cases += [
            (ValueError, {"lower_bound": -5.0}, f"lower_bound: {without}, got -5.0"),
            (
                ValueError,
                on | {"lower_bound": 1.0},
                "lower_bound: expected a finite number < 0, got 1.0",
            ),
        ]
    for error, wrong, text in cases:
        with pytest.raises(error, match=f"^{text}$"):
            function(**theirs | wrong)
