#!/usr/bin/env python3
"""Forward and backward through PyTorch's autograd, ours and others', in one run: a training step's
share of the op. `python benchmarks/gradients.py --help`.

On a GPU the other is flash-linear-attention; on a CPU the chunked PyTorch that transformers falls
back to, from benchmarks/peers.py. Everyone is checked first, at a small size, against linattn's
float64 gradients on the CPU; what fails, or refuses, is named and not timed. Then everyone in turn,
round after round; medians.
"""

import argparse
import datetime
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from report import commit, lines, machine

import linattn
from linattn import _linattn

K = V = 128
BOUND = 1.6e-2  # rms, of bfloat16 gradients: the acceptance rule's; float32's is 4e-6
DELTA = ("delta_rule", "gated_delta_rule", "kda")
GATES = {"simple_gla": 1, "gated_delta_rule": 1, "gla": K, "kda": K}
OPS = ("linear_attention", "linear_attention, normalised", "retention", "simple_gla", "gla",
       "delta_rule", "gated_delta_rule", "kda")
NORMALISED = "linear_attention, normalised"
OURS = {"linear_attention": {"feature_map": "identity", "normalize": False},
        NORMALISED: {"feature_map": "identity", "normalize": "clamp"}}  # q and k are positive
FLA = {"linear_attention": ("chunk_linear_attn", {"normalize": False}),
       NORMALISED: ("chunk_linear_attn", {"normalize": True}),
       "retention": ("chunk_retention", {})}
GPU_SHAPES = ((1, 8192, 96, 96), (1, 32768, 16, 32), (4, 2048, 16, 16))
CPU_SHAPES = ((1, 512, 16, 16), (1, 2048, 16, 16))


def problem(op, shape, device, dtype):
    """Inputs that require gradients, and the gradient of o; gates are those of cases.py."""
    B, T, H, HV = shape
    random = torch.Generator(device).manual_seed(1)

    def normal(*size):
        return torch.randn(B, T, *size, generator=random, device=device)

    def uniform(low, high, *size):
        return torch.rand(B, T, *size, generator=random, device=device) * (high - low) + low

    x = {"q": normal(H, K), "k": normal(H, K), "v": normal(HV, V)}
    if op == NORMALISED:
        x |= {name: x[name].abs() for name in "qk"}
    if op in DELTA:
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x = {name: a.to(dtype) for name, a in x.items()}
    if op in GATES:
        x["g"] = -(10 ** uniform(-2.7, -0.5, HV, *((K,) if GATES[op] == K else ())))
    if op in DELTA:
        x["beta"] = uniform(0.1, 0.9, HV)
    return {name: a.requires_grad_() for name, a in x.items()}, normal(HV, V).to(dtype)


def ours(op):
    return lambda x: getattr(linattn, op.split(",")[0])(**x, **OURS.get(op, {}))[0]


class OnNumPy:
    """Ours without PyTorch: the op and its backward face. What autograd costs is the difference."""

    def __init__(self, op):
        name = op.split(",")[0]
        self.forward, self.backward = getattr(linattn, name), getattr(linattn, f"{name}_backward")
        self.more = OURS.get(op, {})

    def arrays(self, x):
        return {name: a.detach().numpy() for name, a in x.items()} | self.more

    def __call__(self, x):
        return torch.from_numpy(self.forward(**self.arrays(x))[0])

    def gradients(self, x, do):
        arrays = self.arrays(x)
        self.forward(**arrays)
        found = self.backward(do.numpy(), **arrays)
        return [torch.from_numpy(getattr(found, f"d{name}")) for name in x]


def fla(op):
    import fla.ops

    name, more = FLA.get(op, (f"chunk_{op}", {}))
    return lambda x: getattr(fla.ops, name)(**x, **more, scale=K**-0.5)[0]


def lift_refusal():
    """Let fla compute what it refuses: gated gradients on Hopper with Triton 3.4 to 3.7.0, which
    got them wrong (its issue 640). What comes out is checked as everybody's is."""
    from fla.ops.common import chunk_o

    if not hasattr(chunk_o, "TRITON_ABOVE_3_7_1"):
        raise SystemExit("this fla has no such refusal")
    chunk_o.TRITON_ABOVE_3_7_1 = True


def fallback(op, solve):
    from peers import chunked, log_decay

    if GATES.get(op) == K:
        raise NotImplementedError("it has no chunked form for gates per key")
    if op == NORMALISED:
        raise NotImplementedError("it has no normaliser")

    def call(x):
        rest = {name: a for name, a in x.items() if name not in "qkv"}
        return chunked(torch, x["q"], x["k"], x["v"], log_decay(torch, op, rest), x.get("beta"),
                       solve=solve)
    return call


def gradients(call, x, do):
    if isinstance(call, OnNumPy):
        return call.gradients(x, do)
    o = call(x)
    return torch.autograd.grad(o, list(x.values()), do.to(o.dtype))


def error(op, call, device, dtype):
    """The worst rms error of a gradient, at a small size, against float64 on the CPU."""
    x, do = problem(op, (2, 192, 2, 2), device, dtype)
    there = {name: a.detach().cpu().double().requires_grad_() for name, a in x.items()}
    want = gradients(ours(op), there, do.cpu().double())
    worst = 0.0
    for a, b in zip(gradients(call, x, do), want, strict=True):
        off = float((a.cpu().double() - b).square().mean().sqrt() / b.square().mean().sqrt())
        worst = off if off > worst or off != off else worst
    return worst


def sample(device, call):
    """Seconds."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def peak(device, call):
    """Bytes of PyTorch's own memory that a call takes besides what is there."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(op, given):
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    others = {"fla": fla} if given.device == "cuda" else {
        "linattn on NumPy's arrays": OnNumPy,
        "PyTorch, row by row as transformers": partial(fallback, solve="rows"),
        "PyTorch, its own solver": partial(fallback, solve="library")}
    able, rows = {}, []
    for who, make in {"linattn": ours, **({} if given.no_peers else others)}.items():
        begun = time.perf_counter()
        try:
            call = make(op)
            off = error(op, call, given.device, dtype)
            bound = BOUND if dtype == torch.bfloat16 else 4e-6 if who == "linattn" else 1e-4
            if not off < bound:
                raise ArithmeticError(f"rms error {off:.1e}, expected < {bound:.1e}")
            able[who] = (call, off)
        # a peer may raise whatever it likes: the others are still to be measured
        except Exception as problem_of_it:
            text = f"{type(problem_of_it).__name__}: {problem_of_it}".split("\n")[0][:200]
            rows.append({"op": op, "who": who, "error": text})
        took = time.perf_counter() - begun
        print(f"{op} {who}: checked in {took:.0f} s", file=sys.stderr, flush=True)
    for shape in GPU_SHAPES if given.device == "cuda" else CPU_SHAPES:
        if shape[2] == shape[3] or op in ("gated_delta_rule", "kda"):
            rows += time_all(op, shape, able, given, *problem(op, shape, given.device, dtype))
            if given.device == "cuda":
                torch.cuda.empty_cache()
    return rows


def time_all(op, shape, able, given, x, do):
    """The rows of one shape: everyone in `able` {who: (call, rms error)}, in turn."""
    detached = {name: a.detach() for name, a in x.items()}

    def both(who):
        return gradients(able[who][0], x, do)

    def forward(who):
        with torch.no_grad():
            return able[who][0](detached)

    times = {who: ([], []) for who in able}
    for i in range(given.rounds + 2):
        for who in list(able) if i % 2 else list(able)[::-1]:
            taken = [sample(given.device, partial(call, who)) for call in (both, forward)]
            if i > 1:  # the first two rounds are warming up, and a peer's tuning
                for kept, seconds in zip(times[who], taken, strict=True):
                    kept.append(seconds)
    return [{"op": op, "who": who, "shape": shape, "error": None, "rms": able[who][1],
             "both_s": statistics.median(times[who][0]),
             "forward_s": statistics.median(times[who][1]),
             "bytes": peak(given.device, partial(both, who))} for who in able]


def table(rows):
    """A line for each case and each of the others."""
    out, timed = [], [r for r in rows if not r["error"]]
    for r in (r for r in timed if r["who"] == "linattn"):
        B, T, H, HV = r["shape"]
        heads = f"H{H}" + (f"/{HV}" if HV != H else "")
        others = [o for o in rows if o["op"] == r["op"] and o["who"] != "linattn"
                  and (o["error"] or o["shape"] == r["shape"])]
        for o in others or [{"who": "-", "error": "-", "both_s": None, "bytes": None}]:
            refused = "-" if o["who"] == "-" else "refused"
            out.append([f"{r['op']} B{B} T{T} {heads}", ms(r["both_s"]), ms(r["forward_s"]),
                        f"{r['rms']:.1e}", gib(r["bytes"]), o["who"],
                        *([refused, "-", "-"] if o["error"] else
                          [ms(o["both_s"]), f"{o['both_s'] / r['both_s']:.2f}", gib(o["bytes"])])])
    return lines(["case", "ours, ms", "of it forward", "rms", "GiB", "other", "its ms",
                  "its / ours", "its GiB"], out)


def ms(seconds):
    return f"{seconds * 1e3:.3f}"


def gib(size):
    return f"{size / 2**30:.2f}" if size else "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="OP,OP", default=",".join(OPS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--workers", action="store_true",
                        help="first a process for each op, so that a peer compiles side by side")
    parser.add_argument("--lift-refusal", action="store_true",
                        help="time fla's gated gradients though it refuses them with this Triton, "
                        "if they pass the check")
    parser.add_argument("--results", type=Path, metavar="DIR")
    parser.add_argument("--commit", help="what to write down, where there is no git")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    linattn.set_num_threads(given.threads)
    ops = re.split(r",(?! )", given.only)
    if given.lift_refusal:
        lift_refusal()
    if given.workers:
        command = [sys.executable, __file__, "--device", given.device, "--rounds", "1",
                   *(["--lift-refusal"] if given.lift_refusal else []), "--only"]
        them = [subprocess.Popen([*command, op], stdout=subprocess.DEVNULL) for op in ops]
        for one in them:
            one.wait()
    rows = [row for op in ops for row in measure(op, given)]
    device = torch.cuda.get_device_name() if given.device == "cuda" else machine()
    about = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
             "device": device, "commit": given.commit or commit(),
             "command": " ".join(["python", "benchmarks/gradients.py", *sys.argv[1:]]),
             "Python": platform.python_version(), "PyTorch": torch.__version__}
    if given.device == "cuda" and not given.no_peers:
        from device.peers import available
        about |= {peer.name: peer.version for peer in available("cuda")[0] if peer.name == "fla"}
    else:
        about |= {"instruction set": _linattn.isa()[0], "threads": given.threads}
    dtype = "bfloat16" if given.device == "cuda" else "float32"
    text = [f"# Forward and backward on {device}", "",
            *(f"- {name}: {value}" for name, value in about.items()), "", f"""\
K = V = {K}; {dtype} q, k, v, float32 gates; through torch.autograd, medians of interleaved
rounds. rms: the worst gradient's, against float64, at T = 192. GiB: PyTorch's own memory at its
peak; ours without the kernels' scratch, which is not PyTorch's.
""", *table(rows), "",
            *(f"- {r['op']}, {r['who']}: {r['error']}" for r in rows if r["error"])]
    print("\n".join(text))
    if given.results:
        given.results.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        stem = given.results / f"gradients-{given.device}-{slug}"
        stem.with_suffix(".md").write_text("\n".join(text) + "\n")
        found = {"about": about, "rows": rows}
        stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if any(r["who"] == "linattn" and r["error"] for r in rows) else 0)


if __name__ == "__main__":
    main()
