"""fla's names on tokens that ranks share: cp_context and build_cp_context of linattn.compat.fla."""

import numpy as np
import pytest
from support.ranks import Failure
from support.shared_rows import near, torch

import linattn.distributed as lad
from linattn.compat import _fla_modules, fla

B, T, H, HV, K, V = 1, 24, 2, 4, 5, 3
EDGES = [0, 5, 5, 19, 24]  # of three ranks with 8 tokens each; a sequence is on all of them


def unit(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def problem(name, rng):
    """The arrays of a function, and its options."""
    times = 2 if "product" in name else 1
    heads = H if name in ("chunk_rwkv7", "chunk_dplr_delta_rule") else HV
    q, k = unit(rng, B, T, H, K), unit(rng, B, T * times, H, K)
    v, beta = rng.standard_normal((B, T * times, heads, V)), rng.random((B, T * times, HV))
    g, wide = -rng.random((B, T, HV)), -rng.random((B, T, heads, K))
    arrays = {"q": q, "k": k, "v": v}
    options = {}
    if name == "chunk_gated_delta_rule":
        arrays |= {"g": g, "beta": beta}
        options = {"state_v_first": True}
    elif name == "chunk_kda":
        arrays |= {"g": wide, "beta": beta, "A_log": rng.random(HV), "dt_bias": rng.random(HV * K)}
        options = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    elif name == "chunk_gdn2":
        arrays |= {"g": wide, "b": rng.random((B, T, HV, K)), "w": rng.random((B, T, HV, V))}
    elif name == "chunk_gated_delta_product":
        arrays |= {"g": g, "beta": beta}
        options = {"num_householder": 2}
    elif name == "chunk_rwkv7":
        arrays = {"r": q, "k": k, "v": v, "w": wide, "a": -k, "b": k * rng.random((B, T, H, 1))}
    else:
        arrays |= {"a": -k, "b": k * rng.random((B, T, H, 1)), "gk": wide}
    return arrays, options


NAMES = (
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_gdn2",
    "chunk_gated_delta_product",
    "chunk_rwkv7",
    "chunk_dplr_delta_rule",
)


def computed(name, arrays, options, d):
    """o, the final states, and the gradients of the arrays."""
    leaves = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    o, state = getattr(fla, name)(**leaves, **options, output_final_state=True)
    loss = (o * torch.from_numpy(np.ascontiguousarray(d))).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return o.detach().numpy(), state.detach().numpy(), [y.numpy() for y in gradients]


def on_a_rank(group, name, arrays, options, d, names_its_edges):
    cp = fla.build_cp_context(torch.tensor(EDGES), group, conv1d_kernel_size=4)
    begin, length = cp.start, cp.lengths[cp.rank]

    def own(a):
        if a.ndim < 3:
            return a
        times = a.shape[1] // T
        return a[:, begin * times : (begin + length) * times]

    arrays = {n: own(a) for n, a in arrays.items()}
    options = options | {"cp_context": cp}
    if names_its_edges:
        options["cu_seqlens"] = cp.cu_seqlens.clone()
    return computed(name, arrays, options, own(d))


@pytest.mark.parametrize("names_its_edges", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_functions(name, names_its_edges, ranks, rng):
    arrays, options = problem(name, rng)
    d = rng.standard_normal((B, T, *arrays["v"].shape[2:]))
    answers = ranks.run(3, on_a_rank, name, arrays, options, d, names_its_edges)
    alone = options | {"cu_seqlens": torch.tensor(EDGES)}
    want, states, gradients = computed(name, arrays, alone, d)
    near(np.concatenate([o for o, *_ in answers], 1), torch.from_numpy(want), "o")
    near(answers[-1][1], torch.from_numpy(states[-2:]), "state")
    for i, (n, whole) in enumerate(zip(arrays, gradients, strict=True)):
        found = [own[i] for *_, own in answers]
        got = np.concatenate(found, 1) if arrays[n].ndim > 2 else sum(found)
        near(got, torch.from_numpy(whole), f"gradient of {n}")


def convolved_on_a_rank(group, x, weight):
    cp = fla.build_cp_context(torch.tensor(EDGES), group)
    own = torch.from_numpy(np.ascontiguousarray(cp.shard(torch.from_numpy(x)))).requires_grad_()
    y, last = _fla_modules.causal_conv1d(
        own, torch.from_numpy(weight), residual=own, activation="silu", cp_context=cp
    )
    assert last is None
    with pytest.raises(ValueError, match=r"^output_final_state: expected False beside cp_context"):
        _fla_modules.causal_conv1d(
            own, torch.from_numpy(weight), output_final_state=True, cp_context=cp
        )
    return y.detach().numpy(), torch.autograd.grad(y.square().sum(), own)[0].numpy()


def test_short_convolution(ranks, rng):
    x, weight = rng.standard_normal((B, T, 6)), rng.standard_normal((6, 4))
    answers = ranks.run(3, convolved_on_a_rank, x, weight)
    whole = torch.from_numpy(x).requires_grad_()
    want, _ = _fla_modules.causal_conv1d(
        whole,
        torch.from_numpy(weight),
        residual=whole,
        activation="silu",
        cu_seqlens=torch.tensor(EDGES),
    )
    near(np.concatenate([y for y, _ in answers], 1), want, "y")
    gradient = torch.autograd.grad(want.square().sum(), whole)[0]
    near(np.concatenate([d for _, d in answers], 1), gradient, "gradient of x")


ATTRIBUTES = (
    "num_seqs is_first_rank pre_num_ranks is_last_rank post_num_ranks pre_num_conv_tokens "
    "conv1d_kernel_size is_cp_enabled layout"
).split()


def attributes_on_a_rank(group, edges):
    cp = fla.build_cp_context(torch.tensor([9, 9]), group, 4, cu_seqlens_cpu=torch.tensor(edges))
    assert cp.copy_for_backward() is cp
    assert torch.equal(cp.cu_seqlens, cp.cu_seqlens_cpu)
    return cp.cu_seqlens.tolist(), *(getattr(cp, name) for name in ATTRIBUTES)


# By hand: the second sequence has its tokens on three ranks, the third begins on the last one.
WANTED = [
    ([0, 5, 8], 2, True, 0, False, 2, 0, 4, True, "contiguous"),
    ([0, 8], 1, False, 1, False, 1, 3, 4, True, "contiguous"),
    ([0, 3, 8], 2, False, 2, True, 0, 11, 4, True, "contiguous"),
]


def test_attributes(ranks):
    assert ranks.run(3, attributes_on_a_rank, [0, 5, 19, 24]) == WANTED


def wrong_on_a_rank(group, what):
    edges = torch.tensor(EDGES)
    if what == "odd":
        return fla.build_cp_context(torch.tensor([0, 5]), group)
    if what == "nothing":
        return fla.build_cp_context(torch.tensor([0, 0]), group)
    if what == "zigzag":
        return fla.build_cp_context(edges, group, layout="zigzag")
    if what == "tf32":
        return fla.build_cp_context(edges, group, use_tf32x3_affine_chain=False)
    cp = fla.build_cp_context(edges, group)
    q, g = torch.zeros(1, 12, H, K), torch.zeros(1, 12, H)
    return fla.chunk_gated_delta_rule(q, q, q, g, g, cu_seqlens=edges, cp_context=cp)


WRONG = {
    "odd": r"^cu_seqlens: expected tokens that 2 ranks share equally, got 5; linattn\.distributed",
    "nothing": r"^cu_seqlens: expected tokens that 2 ranks share equally, got 0;",
    "zigzag": r"^layout: expected 'contiguous', got 'zigzag'",
    "tf32": r"^use_tf32x3_affine_chain: expected True, got False",
    "edges": r"^cu_seqlens: expected None beside cp_context, or its own \[0, 5, 5, 12\], got \[0, ",
}


@pytest.mark.parametrize("what", WRONG)
def test_contexts_that_cannot_be(what, ranks):
    with pytest.raises(Failure, match=WRONG[what].removeprefix("^")):
        ranks.run(2, wrong_on_a_rank, what)


def unequal_on_a_rank(group, arrays):
    cp = lad.context(group, lengths=[3, 21], cu_seqlens=EDGES)
    own = {n: cp.shard(torch.from_numpy(a)).contiguous() for n, a in arrays.items()}
    return fla.chunk_gated_delta_rule(**own, cp_context=cp)[0].numpy()


def test_a_context_of_linattn_distributed(ranks, rng):
    arrays, _ = problem("chunk_gated_delta_rule", rng)
    answers = ranks.run(2, unequal_on_a_rank, arrays)
    whole = {n: torch.from_numpy(a) for n, a in arrays.items()}
    want, _ = fla.chunk_gated_delta_rule(**whole, cu_seqlens=torch.tensor(EDGES))
    near(np.concatenate(answers, 1), want, "o")
