"""The forward pass of every op, mode and dtype over the grid, by the acceptance rule."""

from conftest import poisoned
from grid import cases, for_op, form_of, inputs_of, reference_op, repeated, v_first, wider

import linattn

GRID = list(cases(seed=1, limit=6_000))


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        grid = GRID if metafunc.config.getoption("grid") == "all" else GRID[::7]
        metafunc.parametrize("case", grid, ids=str)


def test_forward(case, rng):
    def once(pool):
        x = inputs_of(case, rng)
        given = for_op(case, x)
        out = poisoned(x["v"].shape, case.dtype)
        o, state = getattr(linattn, case.op)(**given, output_final_state=True, out=out)
        assert o is out
        if case.v_first:
            state = v_first(state)

        def reference(x, **how):
            return dict(zip(("o", "final_state"), reference_op(case)(**x, **how), strict=True))

        pool.add({"o": o, "final_state": state}, reference(x, dtype=wider(case.dtype)),
                 lambda x: reference(x, dtype=case.dtype, **form_of(case)), x)

    repeated(case, rng, once).judge(str(case))
