"""Where the ops meet: one op with arguments for which another one, or a sum written out, is right.

Every identity is asked of every mode, of the forward pass and, by the chain, of its gradients. What
a usual mistake would compute is asked to differ: an identity that cannot fail shows nothing.
"""

import numpy as np
import pytest
from support.compare import leaves
from support.device import ops as linattn
from support.variants import PREDICTS

from linattn.testing import make_inputs, make_output_gradients

MODES = ("chunk", "recurrent", "parallel")
RUNS = [{"mode": mode} for mode in MODES] + [{"chunk_size": 5}, {"chunk_size": 1}]
runs = pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run.values())))
SHAPE = {"B": 2, "T": 37, "H": 2, "HV": 4, "K": 6, "V": 5}


def problem(op, rng, *, state=True, **options):
    """The op's arguments, and the gradients of its outputs."""
    x = make_inputs(op, rng, **SHAPE, initial_state=state, **options)
    return x, make_output_gradients(op, rng, x)


def of_value_heads(x):
    """An array of keys, [B,T,H,K], for each value head that reads it."""
    return np.repeat(x, SHAPE["HV"] // SHAPE["H"], axis=2)


def with_own_heads(x):
    """The same problem with as many heads of keys as of values: gates may then scale the keys."""
    more = {name: of_value_heads(x[name]) for name in ("q", "k", "x", "y") if name in x}
    return x | more | ({"bonus": np.repeat(x["bonus"], 2, axis=0)} if "bonus" in x else {})


def forward(op, x, run):
    return leaves(getattr(linattn, op)(**x, output_final_state=True, **run))


def backward(op, x, d, run):
    return getattr(linattn, f"{op}_backward")(**d, **x, **run)


def same(got, want, scale=1.0):
    for x, y in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13 * scale * max(1, np.abs(y).max()))


def different(got, want):
    """Some number is not just rounded otherwise: it is off by a hundredth of the largest."""
    (x, *_), (y, *_) = leaves(got), leaves(want)
    assert np.abs(x - y).max() > 0.01 * np.abs(y).max()


# ---- rwkv6: read before the decay, and a bonus ----


def one_token_later(x):
    """gla's problem whose token t + 1 writes what token t of x writes, and reads before it."""

    def later(a, first=0):
        return np.concatenate([np.full_like(a[:, :1], first), a], axis=1)

    q = np.concatenate([x["q"], np.zeros_like(x["q"][:, :1])], axis=1)
    shifted = {"q": q, "k": later(x["k"]), "v": later(x["v"]), "g": later(x["g"])}
    return shifted | {"initial_state": x["initial_state"], "scale": 1}


def own_write(x):
    """(q . (bonus * k)) v of every token."""
    own = (x["q"] * x["bonus"] * x["k"]).sum(-1)
    return of_value_heads(own)[..., None] * x["v"]


@runs
def test_rwkv6_is_gla_a_token_later(run, rng):
    x, _ = problem("rwkv6", rng)
    o, state = forward("gla", one_token_later(x), run)
    same(forward("rwkv6", x, run), (o[:, :-1] + own_write(x), state))


@runs
def test_the_gradients_of_rwkv6_are_those_of_gla_a_token_later(run, rng):
    x, d = problem("rwkv6", rng)
    got = backward("rwkv6", x, d, run)
    do = np.concatenate([d["do"], np.zeros_like(d["do"][:, :1])], axis=1)
    of_gla = backward("gla", one_token_later(x), d | {"do": do}, run)
    # was o = gla's + own v, own = q . (bonus * k); a head of keys has the sum of its value heads
    down = (d["do"] * x["v"]).sum(-1).reshape(2, 37, 2, 2).sum(-1)[..., None]
    own = of_value_heads((x["q"] * x["bonus"] * x["k"]).sum(-1))[..., None]
    same(got.dq, of_gla.dq[:, :-1] + down * x["bonus"] * x["k"])
    same(got.dk, of_gla.dk[:, 1:] + down * x["bonus"] * x["q"])
    same(got.dv, of_gla.dv[:, 1:] + own * d["do"])
    same(got.dg, of_gla.dg[:, 1:])
    same(got.dbonus, (down * x["q"] * x["k"]).sum((0, 1)), scale=10)
    same(got.d_initial_state, of_gla.d_initial_state)


@runs
def test_a_bonus_on_top_of_an_ordinary_read_is_another_op(run, rng):
    """o + ((bonus - 1) * k) . q v: the read has decayed the state once more."""
    x, _ = problem("rwkv6", rng)
    plain = {name: a for name, a in x.items() if name != "bonus"}
    o, _ = forward("gla", plain | {"scale": 1}, run)
    mistaken = o + own_write(x | {"bonus": x["bonus"] - 1})
    different(forward("rwkv6", x, run)[0], mistaken)
    no_decay = {"g": np.zeros_like(x["g"])}
    o, _ = forward("gla", plain | no_decay | {"scale": 1}, run)
    same(forward("rwkv6", x | no_decay, run)[0], o + own_write(x | {"bonus": x["bonus"] - 1}))


@runs
def test_rwkv6_of_a_decay_of_zero_remembers_one_token(run, rng):
    x, _ = problem("rwkv6", rng, state=False)
    o, state = forward("rwkv6", x | {"g": np.full_like(x["g"], -np.inf)}, run)
    q, k, v = of_value_heads(x["q"]), of_value_heads(x["k"]), x["v"]
    before = np.zeros_like(v)
    before[:, 1:] = (q[:, 1:] * k[:, :-1]).sum(-1, keepdims=True) * v[:, :-1]
    same((o, state), (before + own_write(x), k[:, -1][..., None] * v[:, -1][:, :, None]))


# ---- the delta rules with x ----


@pytest.mark.parametrize("op", PREDICTS)
@runs
def test_x_that_is_k_is_the_op_without_x(run, op, rng):
    x, d = problem(op, rng)
    given = x | {"x": x["k"]}
    same(forward(op, given, run), forward(op, x, run))
    got, want = backward(op, given, d, run), backward(op, x, d, run)
    same(got._replace(dk=got.dk + got.dx, dx=None), want)


@pytest.mark.parametrize("op", PREDICTS)
@runs
def test_x_of_another_key_is_another_op(run, op, rng):
    x, _ = problem(op, rng, x=True)
    without = {name: a for name, a in x.items() if name != "x"}
    different(forward(op, x, run), forward(op, without, run))


@runs
def test_beta_may_stand_in_x_and_v(run, rng):
    """beta k (v - S'k)' = k (beta v - S'(beta k))': so Gated DeltaNet 2 is kda with x = b * k."""
    x, d = problem("kda", rng)
    x = with_own_heads(x)
    beta = x["beta"][..., None]
    moved = x | {"x": beta * x["k"], "v": beta * x["v"], "beta": np.ones_like(x["beta"])}
    same(forward("kda", moved, run), forward("kda", x, run))
    got, want = backward("kda", moved, d, run), backward("kda", x, d, run)
    same(got.dq, want.dq)
    same(got.dk + beta * got.dx, want.dk)
    same(beta * got.dv, want.dv)
    same((got.dv * x["v"]).sum(-1) + (got.dx * x["k"]).sum(-1), want.dbeta)
    same((got.dg, got.d_initial_state), (want.dg, want.d_initial_state))


@pytest.mark.parametrize("op", PREDICTS)
def test_the_l2_norm_leaves_x(op, rng):
    """q and k are normed, x is not: a longer x predicts more."""
    x, _ = problem(op, rng, x=True)
    normed = {n: x[n] / np.sqrt((x[n] ** 2).sum(-1, keepdims=True) + 1e-6) for n in "qk"}
    got = forward(op, x | {"qk_l2norm": True}, {})
    same(got, forward(op, x | normed, {}))
    different(got, forward(op, x | {"x": 3 * x["x"], "qk_l2norm": True}, {}))


# ---- dplr_delta_rule: a look before the decay, and two rows that are written ----


def decayed(x):
    """The decay [B,T,HV,K] or [B,T,HV,1]."""
    a = np.exp(x["g"])
    return a if a.ndim == 4 else a[..., None]


def as_dplr(x, look):
    """A delta rule's problem for dplr_delta_rule, its beta in y and v. look: the key that predicts,
    of the state before its decay."""
    beta = x["beta"][..., None]
    made = {name: x[name] for name in ("q", "initial_state")}
    made |= {"k": x["k"], "v": beta * x["v"], "x": look, "y": beta * x["k"]}
    return made | {"g": np.broadcast_to(np.log(decayed(x)), (*x["g"].shape[:3], SHAPE["K"]))}


@runs
def test_dplr_is_the_gated_delta_rule(run, rng):
    """y = exp(g) beta k: one decay for all keys may stand in y."""
    x, _ = problem("gated_delta_rule", rng)
    x = with_own_heads(x)
    made = as_dplr(x, x["k"])
    made["y"] = decayed(x) * made["y"]
    same(forward("dplr_delta_rule", made, run), forward("gated_delta_rule", x, run))


@runs
@pytest.mark.parametrize("other_key", [False, True], ids=["k", "x"])
def test_dplr_is_kda(other_key, run, rng):
    """x = exp(g) k looks before the decay as k does after it; so does another key than k."""
    x, d = problem("kda", rng, x=other_key)
    x = with_own_heads(x)
    look, a, beta = x.get("x", x["k"]), decayed(x), x["beta"][..., None]
    made = as_dplr(x, a * look)
    same(forward("dplr_delta_rule", made, run), forward("kda", x, run))
    got, want = backward("dplr_delta_rule", made, d, run), backward("kda", x, d, run)
    same(got.dq, want.dq)
    same(got.dk + beta * got.dy + (0 if other_key else a * got.dx), want.dk)
    same(beta * got.dv, want.dv)
    same((got.dv * x["v"]).sum(-1) + (got.dy * x["k"]).sum(-1), want.dbeta)
    same(got.dg + a * look * got.dx, want.dg)
    same(got.d_initial_state, want.d_initial_state)
    if other_key:
        same(a * got.dx, want.dx)


@runs
def test_a_look_after_the_decay_is_another_op(run, rng):
    """With zeros as the first state the two differ from the second token on."""
    x, _ = problem("kda", rng, state=False)
    x = with_own_heads(x) | {"initial_state": np.zeros((2, 4, 6, 5))}
    o, _ = forward("dplr_delta_rule", as_dplr(x, x["k"]), run)
    after, _ = forward("kda", x, run)
    same(o[:, 0], after[:, 0])
    different(o[:, 1], after[:, 1])


@runs
@pytest.mark.parametrize("name", ["x", "y"])
def test_dplr_without_a_look_is_gla(name, run, rng):
    """x = 0 looks nothing up, y = 0 takes nothing off."""
    x, d = problem("dplr_delta_rule", rng)
    x[name] = np.zeros_like(x[name])
    plain = {other: a for other, a in x.items() if other not in "xy"}
    same(forward("dplr_delta_rule", x, run), forward("gla", plain, run))
    got, want = backward("dplr_delta_rule", x, d, run), backward("gla", plain, d, run)
    same(got._replace(dx=None, dy=None), want)


@runs
def test_dplr_is_its_transition(run, rng):
    """S <- (diag(a) - y x') S + k v', written out with a decay of 0 among the others."""
    x, _ = problem("dplr_delta_rule", rng)
    x = with_own_heads(x)
    x["g"][rng.random(x["g"].shape) < 0.2] = -np.inf
    a, S, o = np.exp(x["g"]), x["initial_state"], []
    for t in range(SHAPE["T"]):
        diagonal = a[:, t][..., None] * np.eye(SHAPE["K"])
        transition = diagonal - x["y"][:, t][..., None] * x["x"][:, t][:, :, None]
        S = transition @ S + x["k"][:, t][..., None] * x["v"][:, t][:, :, None]
        o.append(SHAPE["K"] ** -0.5 * (x["q"][:, t][:, :, None] @ S)[:, :, 0])
    same(forward("dplr_delta_rule", x, run), (np.stack(o, 1), S))


# ---- titans: a memory with momentum ----


def memory(x):
    """A titans problem without its momentum, which is zero."""
    return {n: a for n, a in x.items() if n != "eta"} | {
        "initial_state": (x["initial_state"][0], np.zeros_like(x["initial_state"][1]))
    }


@runs
def test_titans_without_momentum_is_dplr(run, rng):
    x, d = problem("titans", rng)
    x = memory(with_own_heads(x))
    beta = x["beta"][..., None]
    made = as_dplr(x | {"initial_state": x["initial_state"][0]}, x["k"])
    o, M, Y = forward("titans", x, run)
    same((o, M), forward("dplr_delta_rule", made, run))
    # the momentum that it leaves is the last write
    before = linattn.titans(
        **{n: a if n == "initial_state" else a[:, :-1] for n, a in x.items()},
        output_final_state=True,
        **run,
    )[1][0]
    k, v = x["k"][:, -1], x["v"][:, -1]
    error = v - (k[:, :, None] @ before)[:, :, 0]
    same(Y, k[..., None] * (x["beta"][:, -1][..., None] * error)[:, :, None])
    dM = d["d_final_state"][0]
    got = backward("titans", x, d | {"d_final_state": (dM, np.zeros_like(dM))}, run)
    want = backward("dplr_delta_rule", made, d | {"d_final_state": dM}, run)
    same(got.dq, want.dq)
    same(got.dk, want.dk + want.dx + beta * want.dy)
    same(got.dv, beta * want.dv)
    same(got.dbeta, (want.dv * x["v"]).sum(-1) + (want.dy * x["k"]).sum(-1))
    same(got.dg, want.dg.sum(-1), scale=10)
    same(got.d_initial_state[0], want.d_initial_state)
    assert got.deta is None


@runs
def test_titans_without_momentum_is_the_gated_delta_rule(run, rng):
    """beta / a and a v: the memory predicts before it decays."""
    x, _ = problem("titans", rng)
    x = memory(x)
    a = np.exp(x["g"])
    made = x | {"beta": x["beta"] / a, "v": a[..., None] * x["v"]}
    made["initial_state"] = x["initial_state"][0]
    o, M, _ = forward("titans", x, run)
    same((o, M), forward("gated_delta_rule", made, run))
    mistaken = forward("gated_delta_rule", x | {"initial_state": x["initial_state"][0]}, run)
    different(o, mistaken)


@runs
def test_titans_without_momentum_and_decay_is_the_delta_rule(run, rng):
    x, _ = problem("titans", rng)
    x = memory(x)
    plain = {n: a for n, a in x.items() if n != "g"} | {"initial_state": x["initial_state"][0]}
    o, M, _ = forward("titans", x | {"g": 0}, run)
    same((o, M), forward("delta_rule", plain, run))


@runs
def test_no_momentum_is_a_momentum_of_zero(run, rng):
    """Bit by bit; but then eta has a gradient."""
    x, d = problem("titans", rng)
    zero, absent = x | {"eta": np.zeros_like(x["eta"])}, {n: x[n] for n in x if n != "eta"}
    for one, other in zip(
        forward("titans", zero, run), forward("titans", absent, run), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    got, want = backward("titans", zero, d, run), backward("titans", absent, d, run)
    assert got.deta.any() and want.deta is None
    same(got._replace(deta=None), want)


@runs
def test_titans_is_what_the_paper_writes(run, rng):
    """S = eta S - theta grad, M = (1 - alpha) M + S, of the loss |M'k - v|^2 / 2, M before."""
    x, _ = problem("titans", rng)
    x = with_own_heads(x)
    M, S, o = x["initial_state"][0], x["initial_state"][1], []
    for t in range(SHAPE["T"]):
        q, k, v = (x[name][:, t][:, :, None] for name in "qkv")
        alpha, eta, theta = (
            a[:, t][..., None, None] for a in (1 - np.exp(x["g"]), x["eta"], x["beta"])
        )
        gradient = k.swapaxes(2, 3) @ (k @ M - v)
        S = eta * S - theta * gradient
        M = (1 - alpha) * M + S
        o.append(SHAPE["K"] ** -0.5 * (q @ M)[:, :, 0])
    same(forward("titans", x, run), (np.stack(o, 1), M, S))


@runs
def test_a_momentum_alone_is_a_geometric_sum(run, rng):
    """Without a write and a decay, M moves by (eta + eta^2 + ... ) Y."""
    x, _ = problem("titans", rng)
    M, Y = x["initial_state"]
    still = {"beta": 0, "eta": 0.5, "g": 0}
    _, last, momentum = forward("titans", x | still, run)
    n = SHAPE["T"]
    same((last, momentum), (M + (1 - 0.5**n) * Y, 0.5**n * Y))


@runs
def test_titans_is_affine_in_its_states(run, rng):
    """What a part of a sequence does to (M, Y) is a matrix of 2 K columns, and a sum."""
    x, _ = problem("titans", rng)
    K, V = SHAPE["K"], SHAPE["V"]
    unit = np.broadcast_to(np.eye(2 * K)[:, :, None], (2 * K, 2 * K, V))
    columns = []
    no_values = x | {"v": np.zeros_like(x["v"])}
    for e in unit:
        state = tuple(np.broadcast_to(half, (2, 4, K, V)).copy() for half in (e[:K], e[K:]))
        _, M, Y = forward("titans", no_values | {"initial_state": state}, run)
        columns.append(np.concatenate([M, Y], 2)[..., 0])
    matrix = np.stack(columns, -1)  # [B,HV,2K,2K]
    zeros = tuple(np.zeros_like(S) for S in x["initial_state"])
    _, M0, Y0 = forward("titans", x | {"initial_state": zeros}, run)
    _, M, Y = forward("titans", x, run)
    moved = matrix @ np.concatenate(x["initial_state"], 2) + np.concatenate([M0, Y0], 2)
    same(moved, np.concatenate([M, Y], 2))


@runs
@pytest.mark.parametrize("extreme", ["no decay kept", "no momentum kept", "nothing written"])
def test_titans_at_the_ends_of_its_gates(extreme, run, rng):
    x, _ = problem("titans", rng)
    x = with_own_heads(x)
    if extreme == "no decay kept":  # M is Y alone
        o, M, Y = forward("titans", x | {"g": -np.inf}, run)
        same(M, Y)
    elif extreme == "no momentum kept":
        o, M, _ = forward("titans", x | {"eta": 0}, run)
        other = x["initial_state"][0], 7 * x["initial_state"][1]
        o2, M2, _ = forward("titans", x | {"eta": 0, "initial_state": other}, run)
        same((o, M), (o2, M2))
    else:
        o, M, Y = forward("titans", x | {"beta": 0}, run)
        same(Y, x["eta"].prod(1)[..., None, None] * x["initial_state"][1])
    assert np.isfinite(o).all() and np.isfinite(M).all()
