"""The benchmark's part for the GPU, as far as it can be tried without one."""

import json
from dataclasses import replace

import numpy as np
import pytest

import linattn
from linattn import reference


def row(case, who, graph_s, op="kda", face="forward", **more):
    return {"case": case, "who": who, "op": op, "face": face, "B": 1, "T": 8192, "H": 96, "HV": 96,
            "why": "", "bytes": 1e9, "flops": 1e11, "error": "", "note": "", "rms": 1e-3,
            "rms_chunk": 1e-2, "first_s": 1.0, "copies": 1, "calls": 4, "samples": 30,
            "graph_s": graph_s, "graph_min_s": graph_s, "eager_s": graph_s, "launch_s": None,
            "run": 0, "case_s": 1.0} | more


def figures(rows, copy=4e12):
    return {"runs": [{"device": "NVIDIA H200, 132 multiprocessors", "ceilings":
                      {"copy": copy, "matmul": 7e14}, "ceiling names":
                      {"copy": "copy", "matmul": "product"}}],
            "rows": rows, "first": [], "not_run": []}


KDA = "kda forward B1 T8192 H96"


def test_targets_tell_ahead_from_behind_and_not_run(bench):
    from device import report

    def verdicts(ours, fla):
        found = figures([row(KDA, "linattn", ours), row(KDA, "fla", fla),
                         row(KDA, "FlashKDA", ours / 2)])
        return {what: (measured, met) for what, _, measured, met in report.targets(found)}
    ahead, behind = verdicts(1e-3, 2e-3), verdicts(2e-3, 1e-3)
    least = "fla / ours, kda forward, the least of 1 (B1 T8192 H96)"
    assert ahead[least] == ("2.00", "yes") and behind[least] == ("0.50", "NO")
    assert ahead[f"{KDA}, ms"] == ("1.000", "yes") and behind[f"{KDA}, ms"] == ("2.000", "NO")
    assert ahead["simple_gla forward B1 T8192 H96, ms"] == (report.NOT_RUN, "-")


def test_a_failed_check_of_ours_is_a_missed_target(bench):
    from device import report

    found = figures([row(KDA, "linattn", None, error="wrong: rms error"), row(KDA, "fla", 1e-3)])
    met = {what: met for what, _, _, met in report.targets(found)}
    assert met["fla / ours, kda forward, the least of 0"] == "NO"
    assert "wrong: rms error" in report.markdown(found)


def test_merged_runs_keep_their_own_ceilings_and_the_last_of_a_case(bench, tmp_path):
    from device import report

    runs = [figures([row(KDA, "linattn", 1e-3), row(KDA, "fla", 2e-3),
                     row("gla forward B1 T8192 H96", "linattn", 3e-3, op="gla")], copy=1e12),
            figures([row(KDA, "linattn", 5e-4)], copy=2e12)]
    paths = []
    for i, run in enumerate(runs):
        paths.append(tmp_path / f"{i}.json")
        paths[-1].write_text(json.dumps(run))
    found = report.merged(paths)
    assert [(r["op"], r["who"], r["graph_s"]) for r in found["rows"]] == [
        ("gla", "linattn", 3e-3), ("kda", "linattn", 5e-4)]
    assert [report.floors(found, r)[0] for r in found["rows"]] == [1e-3, 5e-4]
    md, data = report.write(tmp_path / "out", found)
    assert md.name == "cuda-nvidia-h200.md" and json.loads(data.read_text()) == found
    assert "Run 2 of 2" in md.read_text()


def small(case):
    return replace(case, B=2, T=1 if case.face == "step" else 150, H=2,
                   HV=4 if case.op == "gated_delta_rule" and case.face == "forward" else 2)


@pytest.mark.parametrize("op", linattn.OPS)
def test_its_float64_is_the_reference(bench, op):
    torch = pytest.importorskip("torch")
    from device import check
    from device.cases import inputs, table

    for case in {small(case) for case in table(tiny=True) if case.op == op}:
        x = inputs(case, "cpu", 0)
        plain = {name: a.double().numpy() for name, a in x.items() if name != "state"}
        if case.face == "step":
            plain = {name: a[:, None] if name in ("q", "k", "v", "g", "beta") else a
                     for name, a in plain.items()}
        if op == "linear_attention":
            plain.update(feature_map="identity", normalize=False)
        state = x["state"].double().numpy() if case.face == "step" else None
        o, after = getattr(reference, op)(**plain, initial_state=state)
        if case.face == "step":
            o = o[:, 0]
        right = torch.from_numpy(np.asarray(o)), torch.from_numpy(np.asarray(after))
        nan, wrong = right[0].clone(), right[0].clone()
        nan[..., -1] = np.nan
        wrong[-1, -1] *= 1.5
        got = check.errors(case, x, [right, (nan, None), (wrong, None), (right[0][..., 1:], None)])
        assert max(got[0]) < 1e-12, case
        assert check.verdict(*got[0]) is None
        assert all(check.verdict(*off) for off in got[1:]), case
