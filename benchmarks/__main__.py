"""python -m benchmarks PROGRAM: the arguments of every program, and settings that come first."""

import argparse
import importlib
import os
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "build" / "results"
PROGRAMS = {
    "cpu": "the ops on the CPU, beside NumPy, PyTorch, ONNX Runtime and ggml",
    "cuda": "the ops on a GPU, beside flash-linear-attention and others that are installed",
    "gradients": "forward and backward through PyTorch's autograd, a training step's share",
    "models": "a model of transformers with its own functions and with linattn's",
    "families": "families of transformers with their own functions and with linattn's: prompts, "
    "and tokens one by one; no files",
    "scans": "diagonal scans, beside ggml's ssm_scan and transformers' loop on the CPU, and beside "
    "mamba_ssm's and causal_conv1d's kernels on a GPU; no files",
    "distributed": "rows that the ranks of a group share, beside one rank with whole rows; started "
    "by torchrun; no files",
    "ranks": "nothing: what rows over 2 to 1,024 ranks should take, by counting; no peers",
    "kernel": "one op at one shape on the current GPU: its time, the cycles of a chunk and, where "
    "cuobjdump is on PATH, the registers and spills of its kernels; no peers, no files",
}


def count(value):
    if int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return int(value)


def arguments(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure linattn beside its peers. Each is checked, then all take turns.",
    )
    programs = parser.add_subparsers(dest="program", required=True, metavar="PROGRAM")
    of = {
        name: programs.add_parser(name, help=text, description=f"Measure {text}.")
        for name, text in PROGRAMS.items()
    }

    def add(names, *options, **more):
        for name in names.split():
            of[name].add_argument(*options, **more)

    add(
        "cpu cuda",
        "--quick",
        action="store_true",
        help="few rounds and few cases; writes no files without --results",
    )
    add(
        "cpu cuda gradients models families scans distributed kernel",
        "--rounds",
        type=count,
        help="samples of each figure",
    )
    add(
        "cpu cuda gradients models",
        "--results",
        metavar="DIR",
        type=Path,
        help="where PROGRAM-MACHINE.md and .json go (default: build/results)",
    )
    add(
        "cpu cuda gradients models",
        "--commit",
        metavar="TEXT",
        help="the commit, where there is no checkout to ask",
    )
    add("cpu cuda gradients", "--no-peers", action="store_true", help="linattn and ceilings only")
    add(
        "cpu gradients models families",
        "--threads",
        type=count,
        default=1,
        help="on the CPU, of all (1)",
    )
    add(
        "cpu",
        "--plot",
        metavar="PATH",
        type=Path,
        help="a plot of tokens/s against T, and one of the cost against T beside it "
        "(default: beside the results)",
    )
    add("ranks", "--plot", metavar="PATH", type=Path, help="a plot of the efficiency of a block")
    add(
        "cuda",
        "--dry-run",
        action="store_true",
        help="the same code with tiny problems on the CPU: no GPU, no figures, no files",
    )
    add(
        "cuda",
        "--only",
        metavar="PATTERN",
        action="append",
        help="cases whose name has this regular expression, such as '^kda forward' or 'step B1 '; "
        "may be repeated",
    )
    add(
        "cuda",
        "--peers",
        metavar="PATTERN",
        action="append",
        help="peers whose name has this regular expression; may be repeated",
    )
    add(
        "cuda",
        "--no-first",
        action="store_true",
        help="no first calls of linattn in fresh processes",
    )
    add(
        "cuda",
        "--workers",
        metavar="N",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that compile the peers' kernels beforehand (default: one for each core; "
        "0: each is compiled when its turn comes)",
    )
    add("cuda", "--minutes", metavar="M", type=float, help="begin no further case after this time")
    add(
        "cuda",
        "--merge",
        metavar="JSON",
        type=Path,
        nargs="+",
        help="measure nothing, and join the results of these runs; the last run of a case counts",
    )
    add("gradients models families", "--device", choices=("cpu", "cuda"), default="cpu")
    add("gradients", "--only", metavar="OP,OP", help="ops, by name")
    add(
        "families",
        "--only",
        metavar="NAME,NAME",
        help="families, by the model types of transformers",
    )
    add(
        "gradients",
        "--workers",
        action="store_true",
        help="run each op in a process of its own first, so that a peer compiles side by side",
    )
    add(
        "gradients",
        "--lift-refusal",
        action="store_true",
        help="lift fla's refusal to compute gated gradients with this Triton; they are checked",
    )
    add(
        "models",
        "--dtype",
        choices=("float32", "bfloat16"),
        help="default: float32 on the CPU, bfloat16 on a GPU",
    )
    add("scans", "--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "distributed",
        "--tokens",
        metavar="N",
        type=count,
        help="without torchrun: of one GPU, and of the rank (2^20, and a quarter of them)",
    )
    add("kernel", "op", metavar="OP", help="such as kda")
    add(
        "kernel",
        "shape",
        metavar="SHAPE",
        nargs="*",
        help="B1 T8192 H96 (the default), H16/64 for 16 heads of q and k and 64 of v, K256; "
        "float16 or tf32 in the place of bfloat16; step for a step",
    )
    given = parser.parse_args(argv)
    if given.program not in ("kernel", "scans", "families", "distributed", "ranks"):
        settle(given)
    return given


def settle(given):
    """The defaults that depend on other arguments."""
    program, quick = given.program, getattr(given, "quick", False)
    dry = getattr(given, "dry_run", False)
    rounds = {"cpu": 3 if quick else 15, "cuda": 8 if quick else 30, "gradients": 7, "models": 5}
    given.rounds = given.rounds or rounds[program]
    given.threads = getattr(given, "threads", 1)
    if given.results is None and not quick and not dry:
        given.results = RESULTS


def environment(given):
    """Before NumPy loads its BLAS."""
    if given.program in ("models", "families"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if given.program not in ("cpu", "scans"):
        return
    given.threads = getattr(given, "threads", 1)
    for name in ("OPENBLAS", "OMP", "MKL"):
        os.environ[f"{name}_NUM_THREADS"] = str(given.threads)
    # OpenBLAS goes by the AMD family and takes AVX2 kernels, half as fast as its AVX-512 ones, for
    # a processor that it does not know or where the environment says so.
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    flags = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    if "AuthenticAMD" in text and flags <= {*text.split()}:
        os.environ["OPENBLAS_CORETYPE"] = "SKYLAKEX"


def main():
    given = arguments()
    environment(given)
    try:
        name = "cuda_report" if getattr(given, "merge", None) else given.program
        program = importlib.import_module(f".{name}", __package__)
    except ImportError as error:
        if (error.name or "").startswith(__package__):
            raise
        sys.exit(
            f"{given.program}: {error}"
            + (
                "\nbuild it in place (python setup.py build_ext --inplace), or use `make bench`"
                if "_linattn" in str(error)
                else ""
            )
        )
    sys.exit(program.run(given))


if __name__ == "__main__":
    main()
