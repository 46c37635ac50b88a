"""Rows of tokens that ranks share: random problems, the call of one rank, and one row again.

A problem is a dict of NumPy arrays by the names of a function's arguments, and `d`, the gradients
of its outputs. Processes of support.ranks import this module by its name.
"""

import numpy as np
import pytest

import linattn
from linattn import composed
from linattn.testing import make_inputs, make_output_gradients
from support.compare import over_arrays
from support.composed import assert_near
from support.tensors import to_numpy, to_tensor, torch

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

EXACT = 1e-12  # of float64, relative to the largest number: that of the acceptance rule

# The tokens of each rank, and where packed sequences begin. Some ranks have no tokens, some one.
ROWS = {
    "equal": ([19, 19], None),
    "unequal": ([1, 36], None),
    "nothing first": ([0, 37], None),
    "nothing last": ([30, 7, 0], None),
    "nothing between": ([20, 0, 17], None),
    "short between": ([16, 1, 3, 17], None),
    "a chunk each": ([16, 16, 16, 16], None),
}
PACKED = {
    "one sequence": ([10, 9, 0, 18], [0, 37]),
    "across": ([10, 9, 9, 9], [0, 5, 5, 30, 37]),
    "over three ranks": ([12, 3, 22], [0, 7, 20, 37]),
    "edges on cuts": ([10, 10, 17], [0, 10, 20, 37]),
    "empty ones at the ends": ([0, 20, 3, 14], [0, 0, 21, 21, 37, 37]),
    "many": ([13, 2, 22], [*range(0, 37, 3), 37]),
    "none passes": ([18, 19], [0, 17, 25, 37]),
    "nothing on a rank": ([20, 0, 17], [0, 20, 20, 37]),
}
LAYOUTS = ROWS | PACKED


def is_of_tokens(name, x):
    """Is it an array with axis 1 for tokens? Those that all tokens share have two axes at most."""
    if "state" in name or not hasattr(x, "ndim"):
        return False
    return x.ndim > 2 or "bool" in str(x.dtype)


def problem(op, rng, T, *, edges=None, dtype=np.float64, **options):
    """Of an op of the table: B = 2, or packed; two heads of keys, four of values."""
    sizes = {"B": 1 if edges else 2, "T": T, "H": 2, "HV": 4, "K": 5, "V": 3} | {
        name: options.pop(name) for name in ("H", "HV", "K", "V") if name in options
    }
    made = {name: options[name] for name in ("normalize", "x") if name in options}
    x = make_inputs(op, rng, **sizes, dtype=dtype, initial_state=True, cu_seqlens=edges, **made)
    d = make_output_gradients(op, rng, x)
    x.pop("cu_seqlens", None)
    return x | {name: value for name, value in options.items() if name != "x"}, d


def scan_problem(op, rng, T, *, edges=None, pairs=False, dtype=np.float64, **options):
    """Of a scan or the short convolution. pairs: with complex numbers."""
    B, D, N = 1 if edges else 2, 6, 4
    S = len(edges) - 1 if edges else B

    def normal(*shape):
        x = rng.standard_normal(shape)
        return x + 1j * rng.standard_normal(shape) if pairs and shape[-1] == N else x

    tokens = (B, T, D)
    if op == "hgrn":
        x = {"x": normal(*tokens), "g": -rng.exponential(0.5, tokens)}
    elif op == "rg_lru":
        x = {"x": normal(*tokens), "r": rng.uniform(0, 1, tokens), "i": rng.uniform(0, 1, tokens)}
        x |= {"Lambda": normal(D), "reset": rng.random((B, T)) < 0.05}
    elif op == "causal_conv1d":
        x = {"x": normal(*tokens), "weight": normal(D, 5), "bias": normal(D)}
        options = {"activation": "silu"} | options
    else:
        A = -rng.uniform(0.1, 2, (D, N)) + (1j * normal(D, N).real if pairs else 0)
        if op == "s4d":
            x = {"u": normal(*tokens), "dt": rng.uniform(0.1, 0.5, D), "A": A}
            x |= {"B": normal(D, N), "C": normal(D, N), "D": normal(D)}
        else:
            x = {"u": normal(*tokens), "delta": normal(*tokens), "A": A}
            x |= {"B": normal(B, T, 2, N), "C": normal(B, T, 2, N), "D": normal(D)}
            x |= {"z": normal(*tokens), "delta_bias": normal(D)}
            options = {"delta_softplus": True} | options
    state = {"hgrn": (S, D), "rg_lru": (S, D), "causal_conv1d": (S, D, 4)}.get(op, (S, D, N))
    x["initial_state"] = normal(*state)
    d = {"do": normal(*tokens), "d_final_state": normal(*state)}
    kinds = {"f": dtype, "c": np.result_type(dtype, np.complex64)}
    x, d = (over_arrays(lambda a: a.astype(kinds.get(a.dtype.kind, a.dtype)), y) for y in (x, d))
    return x | options, d


def system_problem(op, rng, T, *, edges=None, dtype=np.float64, **options):
    """Of a system over an op. Keys have norm 1."""
    B, H, HV, R = 1 if edges else 2, 2, 4, 1
    K, V = options.pop("K", 5), options.pop("V", 3)
    if op == "gated_delta_product":
        R, options = 2, {"num_householder": 2} | options

    def unit(*shape):
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def share(*shape):
        return rng.uniform(0, 1, shape)

    q, k, v = unit(B, T, H, K), unit(B, T * R, H, K), rng.standard_normal((B, T * R, HV, V))
    gates = {"g": -rng.exponential(0.3, (B, T, HV)), "beta": share(B, T * R, HV)}
    by_key = -rng.exponential(0.3, (B, T, HV, K))
    N = len(edges) - 1 if edges else B
    state, d_state = rng.standard_normal((2, N, HV, K, V))
    name = "initial_state"
    if op == "comba":
        x = {"q": q, "k": k, "v": v, "x": k * share(B, T, H, 1)} | gates
    elif op == "gdn2":
        x = {"q": q, "k": k, "v": v, "b": share(B, T, H, K), "w": share(B, T, HV, V), "g": by_key}
    elif op == "hgrn2":
        x = {"q": unit(B, T, HV, K), "g": by_key, "v": v}
    elif op == "iplr_delta_rule":
        x = {"q": q, "k": k, "v": v, "a": -k, "b": k * share(B, T, H, 1)}
    elif op == "mamba3":
        x = {"x": v, "dt": share(B, T, HV), "A": -share(B, T, HV), "B": q, "C": unit(B, T, H, K)}
        x |= {"trap": share(B, T, HV), "angles": rng.uniform(-3, 3, (B, T, HV, 2))}
        x |= {"D": share(HV), "z": rng.standard_normal(v.shape)}
        name, rows = "initial_states", [(N, HV, 2), (N, HV, V, K), (N, HV, K), (N, HV, V)]
        state, d_state = (tuple(map(rng.standard_normal, rows)) for _ in range(2))
    elif op == "mlstm":
        x = {"q": q, "k": k, "v": v, "i": 3 * rng.standard_normal((B, T, HV))}
        x["f"] = 2 + 3 * rng.standard_normal((B, T, HV))
        state, d_state = (
            (S, *map(rng.standard_normal, [(N, HV, K), (N, HV)])) for S in (state, d_state)
        )
    elif op == "precond_gated_delta_rule":
        x = {"q": q, "k": k, "v": v, "preconditioner": 0.5 + share(B, T, H, K)} | gates
    elif op == "rwkv7":
        r, kk = unit(B, T, HV, K), unit(B, T, HV, K)
        x = {"r": r, "w": by_key, "k": kk, "v": v, "a": -kk, "b": kk * share(B, T, HV, K)}
    elif op == "ssd":
        x = {"x": v, "dt": share(B, T, HV), "A": -share(HV), "B": q, "C": unit(B, T, H, K)}
        x |= {"D": share(HV), "z": rng.standard_normal(v.shape), "dt_bias": share(HV)}
        state, d_state, name = state.swapaxes(2, 3), d_state.swapaxes(2, 3), "initial_states"
        options = {"dt_softplus": True} | options
    else:
        x = {"q": q, "k": k, "v": v} | gates
    x[name] = state
    d = {"do": rng.standard_normal((B, T, HV, V)), "d_final_state": d_state}
    x, d = (over_arrays(lambda a: a.astype(dtype), y) for y in (x, d))
    return x | options, d


def states_of(x):
    """The argument that is the state before the tokens, and the one that asks for the last."""
    initial = next(name for name in x if name.startswith("initial"))
    return initial, {"initial_states": "return_final_states"}.get(initial, "output_final_state")


def tokens_of(name, y, begin, n, T):
    """Tokens begin to begin + n of T. A token may have several rows of an array."""
    if not is_of_tokens(name, y):
        return y
    times = y.shape[1] // max(T, 1)
    return y[:, begin * times : (begin + n) * times]


def leaves_of(x):
    """The arrays as tensors, those with gradients as leaves; a pair of states stays one."""

    def leaf(a):
        y = to_tensor(np.array(a))
        return y.requires_grad_() if y.is_floating_point() or y.is_complex() else y

    return over_arrays(leaf, x)


def cut(group, x, lengths):
    """A rank's part of the arrays, as leaves."""
    begin, n, T = sum(lengths[: group.rank()]), lengths[group.rank()], sum(lengths)
    return leaves_of({name: tokens_of(name, y, begin, n, T) for name, y in x.items()})


def prompt_and_steps(group, op, x, lengths, tokens):
    """A prompt by all ranks, then tokens by the last one."""
    import linattn.distributed as lad
    from linattn.distributed._calls import names_of_states

    own = {name: y.detach() for name, y in cut(group, x, lengths).items()}
    _, S = getattr(lad, op)(**own, group=group, **{names_of_states(op)[1]: True})
    if group.rank() + 1 < group.size():
        return None
    reads = []
    for t in range(next(iter(tokens.values())).shape[1]):
        token = {n: y[:, t] if is_of_tokens(n, y) else y for n, y in tokens.items()}
        token = {n: to_tensor(np.ascontiguousarray(y)) for n, y in token.items()}
        reads.append(getattr(linattn, f"{op}_step")(**token, state=S).numpy())
    return np.stack(reads, 1)


def pair_of(S):
    return S if isinstance(S, tuple) else (S,)


def gradients(x, outputs, d):
    """By name. The gradient of an array that took no part is zeros. An output that nothing is
    recorded of, such as the unit of mlstm's state, has none."""
    names = [name for name, y in x.items() if tensors_of(y)]
    flat = [y for name in names for y in tensors_of(x[name])]
    pairs = [(y, dy) for y, dy in zip(outputs, d, strict=True) if y.requires_grad]
    outputs, d = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, flat, d, allow_unused=True))
    given = ((y, next(found)) for y in flat)
    zeros = iter([torch.zeros_like(y) if g is None else g for y, g in given])
    return {name: tuple(next(zeros) for _ in tensors_of(x[name])) for name in names}


def tensors_of(y):
    return [t for t in pair_of(y) if isinstance(t, torch.Tensor) and t.requires_grad]


def one_process(op, x, d, lengths, edges):
    """Outputs and gradients of the whole row by one process. A row that is not packed is cut, so
    that the states between the ranks have gradients too."""
    x = leaves_of(x)
    f = getattr(linattn, op)
    initial, final = states_of(x)
    if edges is not None:
        o, S = f(**x, **{final: True}, cu_seqlens=torch.tensor(edges))
        outputs, weights = [o, *pair_of(S)], [d["do"], *pair_of(d["d_final_state"])]
        weights = [to_tensor(w) for w in weights]
        return [o], pair_of(S), gradients(x, outputs, weights)
    outputs, weights, reads, S, begin = [], [], [], x[initial], 0
    for j, n in enumerate(lengths):
        cut = slice(begin, begin + n)
        part = {name: tokens_of(name, y, begin, n, sum(lengths)) for name, y in x.items()}
        o, S = f(**part | {initial: S, final: True})
        reads.append(o)
        outputs += [o, *pair_of(S)]
        weights.append(to_tensor(d["do"][:, cut].copy()))
        weights += [to_tensor(w) * (j + 1) for w in pair_of(d["d_final_state"])]
        begin += n
    return reads, pair_of(S), gradients(x, outputs, weights)


def on_rank(group, op, x, d, lengths, edges, backend=None):
    """The same on one rank, of its tokens: NumPy's arrays, and which parts begin and end here.

    backend: of torch.compile, which makes one graph of the call."""
    import linattn.distributed as lad

    cp = lad.context(group, lengths=lengths, cu_seqlens=edges)
    mine = slice(cp.start, cp.start + lengths[cp.rank])

    def local(name, y):
        if "state" in name:
            return over_arrays(lambda a: a[cp.sequences], y)
        return tokens_of(name, y, cp.start, lengths[cp.rank], sum(lengths))

    x = leaves_of({name: local(name, y) for name, y in x.items()})

    def call(x):
        return getattr(lad, op)(**x, **{states_of(x)[1]: True}, group=cp)

    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend=backend)
    o, S = call(x)
    states = pair_of(S)
    weights = [to_tensor(d["do"][:, mine].copy())]
    for w in pair_of(d["d_final_state"]):
        if edges is None:
            weights.append(to_tensor(w) * (cp.rank + 1))
        else:
            weights.append(to_tensor(w[cp.sequences].copy()))
            if cp.share.goes_on:
                weights[-1][-1] = 0
    found = gradients(x, [o, *states], weights)
    found = {name: tuple(numbers(y) for y in ys) for name, ys in found.items()}
    at = {"begins": cp.begins, "ends": cp.ends}
    return numbers(o), tuple(map(numbers, states)), found, at


def numbers(x):
    x = x.detach().resolve_conj()
    return x.numpy() if x.is_complex() else to_numpy(x)


def assembled(answers, edges):
    """What the ranks returned, as one process would have returned it."""
    o = np.concatenate([o for o, *_ in answers], 1)
    keep = [np.array(at["ends"], bool) for *_, at in answers]
    if edges is None:
        states = answers[-1][1]
    else:
        parts = [[S[k] for S in states] for (_, states, *_), k in zip(answers, keep, strict=True)]
        states = tuple(np.concatenate(x) for x in zip(*parts, strict=True))
    found = {}
    for name in answers[0][2]:
        pieces = [g[name] for _, _, g, _ in answers]
        if "state" in name and edges is not None:
            begins = [np.array(at["begins"], bool) for *_, at in answers]
            for ys, b in zip(pieces, begins, strict=True):
                assert not any(y[~b].any() for y in ys), "a state that does not begin here"
            pieces = [[y[b] for y in ys] for ys, b in zip(pieces, begins, strict=True)]
            found[name] = tuple(np.concatenate(ys) for ys in zip(*pieces, strict=True))
        elif "state" not in name and is_of_tokens(name, pieces[0][0]):
            found[name] = (np.concatenate([ys[0] for ys in pieces], 1),)
        else:
            found[name] = tuple(sum(ys) for ys in zip(*pieces, strict=True))
    return o, states, found


def drawn(op, rng, layout, **options):
    lengths, edges = LAYOUTS[layout]
    x, d = maker_of(op)(op, rng, sum(lengths), edges=edges, **options)
    return x, d, lengths, edges


def maker_of(op):
    if op in composed.__all__:
        return system_problem
    return problem if op in linattn.OPS else scan_problem


def through(ranks, op, x, d, lengths, edges):
    return assembled(ranks.run(len(lengths), on_rank, op, x, d, lengths, edges), edges)


def agree(got, want):
    """Outputs, final states and gradients."""
    (o, states, gradients), (reads, whole, by_name) = got, want
    near(o, torch.cat(reads, 1), "o")
    for S, T in zip(states, whole, strict=True):
        near(S, T, "final state")
    assert gradients.keys() == by_name.keys()
    for name, ds in gradients.items():
        for a, b in zip(ds, by_name[name], strict=True):
            near(a, b, f"gradient of {name}")


def near(found, expected, name):
    pairs = [np.stack([x.real, x.imag]) for x in (found, numbers(expected))]
    assert_near(*pairs, EXACT, name)


def check(ranks, op, x, d, lengths, edges):
    agree(through(ranks, op, x, d, lengths, edges), one_process(op, x, d, lengths, edges))
