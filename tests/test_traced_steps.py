"""PyTorch traces steps: one graph, the bits of a plain step, and the state changed in place."""

import warnings

import numpy as np
import pytest
from support.problems import at_token
from support.tensors import tensors_in, torch
from torch.utils.flop_counter import FlopCounterMode

import linattn
from linattn import _traced_steps, testing
from linattn.variants import VARIANTS


@pytest.fixture(autouse=True)
def fresh_dynamo():
    with warnings.catch_warnings():  # PyTorch's own warnings while it loads are ignored
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call):
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def drawn(op, rng, T=3, **options):
    """The tokens of a problem, and the state before them."""
    sizes = {"T": T, "B": 2, "H": 2, "HV": 4, "dtype": np.float32}
    x = testing.make_inputs(op, rng, **sizes, initial_state=True, **options)
    state = as_tensors(x.pop("initial_state"))
    tokens = [at_token(x, t) for t in range(T)]
    return [{name: as_tensors(y) for name, y in token.items()} for token in tokens], state


def as_tensors(x):
    if isinstance(x, tuple):
        return tuple(map(as_tensors, x))
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def copied(state):
    return tuple(x.clone() for x in state) if isinstance(state, tuple) else state.clone()


def assert_same(found, wanted):
    for a, b in zip(tensors_in(found), tensors_in(wanted), strict=True):
        assert torch.equal(a, b)


def both(call, tokens, state):
    """Outputs and the last state: without, and with a compiler, which may not warn."""
    results = []
    for step in (call, compiled(call)):
        own = copied(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outputs = [step(own, token) for token in tokens]
        results.append((outputs, own))
    return results


@pytest.mark.parametrize("op", VARIANTS)
def test_steps_of_ops(op, rng):
    function = getattr(linattn, f"{op}_step")
    tokens, state = drawn(op, rng)
    plain, traced = both(lambda S, x: function(**x, state=S), tokens, state)
    assert_same(traced, plain)
    assert not torch.equal(tensors_in(state)[0], tensors_in(plain[1])[0])


@pytest.mark.parametrize("op", VARIANTS)
def test_operators_hold(op, rng):
    """torch.library's own checks: schema, what is mutated, fakes, tracing."""
    (token,), state = drawn(op, rng, T=1)
    seen = []
    operator = _traced_steps._OPS[op]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_traced_steps._OPS, op, lambda *x: seen.append(x) or x[2])
        features = (
            {"features": (1.0, 0.0, 1.0, 0.0, 1.0, 1e-6, 1.0)} if op == "linear_attention" else {}
        )
        _traced_steps.step(op, state=state, **token, **features)
    torch.library.opcheck(operator, seen[0])


def test_options(rng):
    tokens, state = drawn("gated_delta_rule", rng)
    numbers = {"alpha": 0.9, "beta": 0.5}
    first = {name: y for name, y in tokens[0].items() if name in "qkv"}
    pool = torch.cat([state, state, state])
    rows = torch.tensor([5, -1])

    def of_numbers(S, x):
        return linattn.gated_delta_rule_step(**x, **numbers, state=S, scale=0.3, qk_l2norm=True)

    def of_a_pool(S, x):
        return linattn.gated_delta_rule_step(**x, state=S, state_indices=rows)

    def v_first(S, x):
        out = torch.empty_like(x["v"])
        linattn.gated_delta_rule_step(**x, state=S, state_v_first=True, out=out)
        return out

    def one_head(S, x):
        one = {name: y[0, 0] for name, y in x.items()}
        return linattn.gated_delta_rule_step(**one, state=S)

    for call, given, start in (
        (of_numbers, [first], state),
        (of_a_pool, tokens, pool),
        (v_first, tokens, state.mT.contiguous()),
        (one_head, tokens, state[0, 0].clone()),
    ):
        torch._dynamo.reset()
        plain, traced = both(call, given, start)
        assert_same(traced, plain)


@pytest.mark.parametrize("system", ["comba", "gdn2", "ssd"])
def test_steps_of_systems(system, rng):
    f = lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype("f4"))  # noqa: E731
    q, k, v, p = f(3, 2, 4, 8), f(3, 2, 4, 8), f(3, 2, 4, 6), f(3, 2, 4, 8)
    g, beta, D = -f(3, 2, 4).abs(), torch.rand(3, 2, 4), f(4)
    calls = {
        "comba": lambda S, t: linattn.comba_step(
            q[t], k[t], v[t], x=p[t], g=g[t], beta=beta[t], state=S
        ),
        "gdn2": lambda S, t: linattn.gdn2_step(
            q[t], k[t], v[t], b=p[t].sigmoid(), w=v[t].sigmoid(), g=-p[t].abs(), state=S
        ),
        "ssd": lambda S, t: linattn.ssd_step(
            S, v[t], beta[t], g[0, 0], k[t], q[t], D=D, z=v[t], dt_softplus=True
        ),
    }
    state = f(2, 4, 6, 8) if system == "ssd" else f(2, 4, 8, 6)
    plain, traced = both(calls[system], range(3), state)
    for a, b in zip(tensors_in(traced), tensors_in(plain), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["real", "complex", "s4d", "rg_lru", "hgrn", "convolution"])
def test_steps_of_scans(kind, rng):
    f = lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype("f4"))  # noqa: E731
    turned = (
        (lambda x: torch.complex(x, x.flip(-1))) if kind in ("complex", "s4d") else (lambda x: x)
    )
    u, delta, B, C = f(3, 2, 6), torch.rand(3, 2, 6), turned(f(3, 2, 1, 4)), turned(f(3, 2, 1, 4))
    A, dt = turned(-torch.rand(6, 4)), torch.rand(6)
    calls = {
        "real": lambda S, t: linattn.selective_scan_step(
            S, u[t], delta[t], A, B[t], C[t], D=dt, z=u[t], delta_softplus=True
        ),
        "complex": lambda S, t: linattn.selective_scan_step(S, u[t], delta[t], A, B[t], C[t]),
        "s4d": lambda S, t: linattn.s4d_step(
            S, u[t], dt, A, B[0, 0].expand(6, 4), C[0, 0].expand(6, 4)
        ),
        "rg_lru": lambda S, t: linattn.rg_lru_step(S, u[t], delta[t], delta[t], dt),
        "hgrn": lambda S, t: linattn.hgrn_step(S, u[t], -delta[t]),
        "convolution": lambda S, t: linattn.causal_conv1d_step(
            u[t], f_weight, dt, state=S, activation="silu"
        ),
    }
    f_weight = f(6, 4)
    state = f(2, 6) if kind in ("rg_lru", "hgrn") else f(2, 6, 3 if kind == "convolution" else 4)
    plain, traced = both(calls[kind], range(3), turned(state))
    for a, b in zip(tensors_in(traced), tensors_in(plain), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(turned(state), plain[1])


@pytest.mark.parametrize("op", VARIANTS)
def test_operations_are_counted(op, rng):
    """By PyTorch's counter, as linattn.flops counts them."""
    sizes = {"T": 37, "K": 8, "V": 6, "B": 2, "H": 2, "HV": 4}
    made = testing.make_inputs(op, rng, **sizes, dtype=np.float32, initial_state=True)
    x = {name: as_tensors(y) for name, y in made.items()}
    for name in "qkv":
        x[name].requires_grad_()
    state = x.pop("initial_state")
    token = {name: as_tensors(y) for name, y in at_token(made, 3).items()}
    token.pop("initial_state")

    def counted(call):
        with FlopCounterMode(display=False) as counter:
            call()
        found = counter.get_flop_counts()["Global"]
        return sum(n for f, n in found.items() if str(f).startswith("linattn."))

    forward, step = getattr(linattn, op), getattr(linattn, f"{op}_step")
    both = linattn.flops(op, **sizes, passes="both")
    assert counted(lambda: forward(**x)[0].sum().backward()) == both
    by_chunks = linattn.flops(op, **sizes, chunk_size=8)
    assert counted(lambda: forward(**x, chunk_size=8)) == by_chunks
    one = linattn.flops(op, **sizes | {"T": 1}, mode="recurrent")
    assert counted(lambda: step(**token, state=state)) == one


def test_a_step_that_would_be_recorded_is_refused(rng):
    tokens, state = drawn("gla", rng, T=1)
    tokens[0]["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"^q: requires gradients, which are not recorded"):
        _traced_steps.step("gla", state=state, **tokens[0])


def test_a_decode_loop_is_exported(rng):
    """A program of torch.export has the step, and changes the state that it is given."""
    tokens, state = drawn("gla", rng)

    class Step(torch.nn.Module):
        def forward(self, state, q, k, v, g):
            return linattn.gla_step(q, k, v, g, state=state)

    first = tuple(tokens[0].values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Step(), (state.clone(), *first)).module()
    exported, plain = state.clone(), state.clone()
    for token in tokens:
        assert torch.equal(
            program(exported, *token.values()), linattn.gla_step(**token, state=plain)
        )
    assert torch.equal(exported, plain)
