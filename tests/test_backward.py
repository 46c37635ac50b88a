"""The gradients of every op, mode and dtype over the grid, by the acceptance rule."""

from grid import cases, for_op, inputs_of, repeated, v_first, wider

import linattn
from linattn import reference, testing

GRID = list(cases(seed=2, limit=6_000))


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        grid = GRID if metafunc.config.getoption("grid") == "all" else GRID[::4]
        metafunc.parametrize("case", grid, ids=str)


def test_backward(case, rng):
    def once(pool):
        x = inputs_of(case, rng)
        given = for_op(case, x)
        d = testing.make_output_gradients(case.op, rng, x)
        do, d_state = d["do"], d["d_final_state"]
        grads = getattr(linattn, f"{case.op}_backward")(
            do, **given, d_final_state=v_first(d_state) if case.v_first else d_state)
        refs, naives = (
            reference.backward(case.op, do, **x, d_final_state=d_state, dtype=dtype)
            for dtype in (wider(case.dtype), case.dtype))
        if case.v_first:
            grads = grads._replace(d_initial_state=v_first(grads.d_initial_state))
        for name in grads._fields:
            pool.add(name, getattr(grads, name), getattr(refs, name), getattr(naives, name))

    repeated(case, rng, once).judge(str(case), gradient=True)
