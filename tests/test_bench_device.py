"""The GPU programs of benchmarks/, as far as they can be tried without a GPU."""

from dataclasses import replace

import numpy as np
import pytest

import linattn
from linattn import reference

pytestmark = pytest.mark.usefixtures("bench")


def result(op, peer, graph, H=96, **more):
    from benchmarks.base import Case, Result

    case = Case(op, B=1, T=8192, H=H, HV=H, dtype="bfloat16")
    seconds = {kind: [graph] for kind in ("graph", "eager", "first")} if graph else {}
    return Result(case, peer, seconds=seconds, rms=1e-3, rms_chunk=1e-2, **more)


def record(results, copy=4.0):
    from benchmarks.report import Record

    ceilings = {
        "copy": {"what": "copy", "unit": "TB/s", "median": copy, "best": copy},
        "matmul": {"what": "product", "unit": "TFLOP/s", "median": 700.0, "best": 700.0},
    }
    about = {"device": "NVIDIA H200, 132 multiprocessors"}
    return Record([{"about": about, "ceilings": ceilings}], results)


KDA = "kda forward B1 T8192 H96"


def test_targets_tell_ahead_from_behind_and_not_run():
    from benchmarks import cuda_report as cuda

    def verdicts(ours, fla):
        found = record(
            [
                result("kda", "linattn", ours),
                result("kda", "fla", fla),
                result("kda", "FlashKDA", ours / 2),
            ]
        )
        return {what: (measured, met) for what, _, measured, met in cuda.targets(found)}

    ahead, behind = verdicts(1e-3, 2e-3), verdicts(2e-3, 1e-3)
    least = "fla / ours, kda forward, the least of 1 (B1 T8192 H96)"
    assert ahead[least] == ("2.00", "yes") and behind[least] == ("0.50", "NO")
    assert ahead[f"{KDA}, ms"] == ("1.000", "yes") and behind[f"{KDA}, ms"] == ("2.000", "NO")
    assert ahead["simple_gla forward B1 T8192 H96, ms"] == (cuda.NOT_RUN, "-")


def test_a_failed_check_of_ours_is_a_missed_target():
    from benchmarks import cuda_report as cuda

    found = record(
        [result("kda", "linattn", None, error="wrong: rms error"), result("kda", "fla", 1e-3)]
    )
    met = {what: met for what, _, _, met in cuda.targets(found)}
    assert met["fla / ours, kda forward, the least of 0"] == "NO"
    assert "wrong: rms error" in cuda.markdown(found)


def test_merged_runs_keep_their_own_ceilings_and_the_last_of_a_case(tmp_path):
    from benchmarks import cuda_report as cuda
    from benchmarks.__main__ import arguments
    from benchmarks.report import Record

    runs = [
        record(
            [
                result("kda", "linattn", 1e-3),
                result("kda", "fla", 2e-3),
                result("gla", "linattn", 3e-3),
            ],
            copy=1.0,
        ),
        record([result("kda", "linattn", 5e-4)], copy=2.0),
    ]
    for i, run in enumerate(runs):
        given = arguments(["cuda", "--results", str(tmp_path / str(i))])
        cuda.write(given, run)
    paths = [str(tmp_path / f"{i}/cuda-nvidia-h200.json") for i in range(2)]
    given = arguments(["cuda", "--results", str(tmp_path), "--merge", *paths])
    assert not cuda.run(given)
    found = Record.read(tmp_path / "cuda-nvidia-h200.json")
    assert found == cuda.merged(paths)
    assert [(r.case.op, r.peer, r.median("graph")) for r in found.results] == [
        ("gla", "linattn", 3e-3),
        ("kda", "linattn", 5e-4),
    ]
    gla, kda = found.results
    assert cuda.floors(found, gla)[0] == gla.case.bytes / 1e12
    assert cuda.floors(found, kda)[0] == kda.case.bytes / 2e12
    assert "Run 2 of 2" in (tmp_path / "cuda-nvidia-h200.md").read_text()


@pytest.mark.parametrize("op", linattn.OPS)
def test_its_float64_is_the_reference(op):
    torch = pytest.importorskip("torch")
    from benchmarks import check
    from benchmarks.cuda import table
    from benchmarks.inputs import options, torch_inputs

    for case in (case for case in table(tiny=True) if case.op == op):
        case = replace(case, T=1 if case.pass_ == "step" else 150)
        x = torch_inputs(case, "cpu", 0)
        plain = {name: a.double().numpy() for name, a in x.items() if name != "state"}
        state = x["state"].double().numpy() if case.pass_ == "step" else None
        o, after = getattr(reference, op)(**plain, **options(case), initial_state=state)
        if case.pass_ == "step":
            o = o[:, 0]
        right = torch.from_numpy(np.asarray(o)), torch.from_numpy(np.asarray(after))
        nan, wrong = right[0].clone(), right[0].clone()
        nan[..., -1] = np.nan
        wrong[-1, -1] *= 1.5
        got = check.errors(case, x, [right, (nan,), (wrong,), (right[0][..., 1:],)])
        assert max(got[0]) < 1e-12, case
        assert check.verdict(*got[0]) == ""
        assert all(check.verdict(*off) for off in got[1:]), case


@pytest.mark.parametrize("op", linattn.OPS)
def test_a_step_of_tensors_is_that_of_its_float64(op):
    pytest.importorskip("torch")
    from benchmarks import check
    from benchmarks.base import Case
    from benchmarks.inputs import ours, torch_inputs

    case = Case(op, "step", B=2, T=1, H=2, HV=4, D=32)
    x = torch_inputs(case, "cpu", 0)
    before = x | {"state": x["state"].clone()}
    (got,) = check.errors(case, before, [ours(case, x)()])
    assert check.verdict(*got, case.dtype) == "", got


def test_without_a_gpu_the_programs_say_so():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from benchmarks import cuda, gradients, kernel
    from benchmarks.__main__ import arguments

    for program, *argv in (
        (cuda, "cuda"),
        (gradients, "gradients", "--device", "cuda"),
        (kernel, "kernel", "kda", "T64"),
    ):
        assert "no GPU" in program.run(arguments(argv))


def test_a_shape_is_read_as_it_is_printed():
    pytest.importorskip("torch")
    from benchmarks.kernel import case_of

    for words in "B4 T8192 H16/64", "B1 T64 H2 K256 float16", "B1 T64 H2 tf32":
        assert case_of("kda", words.split()).shape == words
    assert str(case_of("gla", ["B8", "step", "H32"])) == "gla step B8 H32"
    for words in ["X4"], ["H"], ["float8"]:
        with pytest.raises(ValueError, match=words[0]):
            case_of("kda", words)
    with pytest.raises(ValueError, match="no_op"):
        case_of("no_op", [])


def test_cycles_and_registers_of_a_kernel():
    pytest.importorskip("torch")
    from benchmarks.kernel import case_of, cycles, usage

    case = case_of("kda", ["B1", "T128", "H4"])  # 2 chunks of 4 heads
    assert cycles(case, 1e-6, 2e9, 100) == pytest.approx((25000, 1000))
    dump = """
Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Common:
  GLOBAL:0
 Function _Z4walkILi128EEv4call:
  REG:168 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:640 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_80

Resource usage:
 Function _Z4walkILi128EEv4call:
  REG:255 STACK:0 SHARED:0 LOCAL:0
"""
    assert usage(dump) == {
        ("sm_90a", "_Z4walkILi128EEv4call"): (168, 16, 1024),
        ("sm_80", "_Z4walkILi128EEv4call"): (255, 0, 0),
    }
