"""Diagonal scans on the CPU: each checked, then all take turns. A table, and no files.

The peers are what people run where there is no GPU: ggml's ssm_scan, which is in llama.cpp, and the
loop of transformers' MambaMixer. ggml takes a softplus of its time steps too.
"""

import os

import numpy as np

import linattn

from .base import Result
from .inputs import aligned
from .report import lines
from .timing import Timed, in_turns, quiet

T, D, N = 512, 2048, 16
ROUNDS = 9


def problem(rng, T, D):
    r = rng.standard_normal
    return {
        "u": r((1, T, D), np.float32),
        "delta": rng.uniform(0.01, 0.2, (1, T, D)).astype(np.float32),
        "A": -rng.uniform(1, 16, (D, N)).astype(np.float32),
        "B": r((1, T, 1, N), np.float32),
        "C": r((1, T, 1, N), np.float32),
    }


# ---- who computes: functions of the arrays that give a call ----


def ours(x):
    out = aligned(x["u"].shape)
    return lambda: linattn.selective_scan(**x, out=out)[0]


def ours_both(x):
    def both():
        y, _ = linattn.selective_scan(**x)
        grads = linattn.selective_scan_backward(x["u"], **x)
        return y, grads

    return lambda: both()[0]


def ggml(threads=1):
    from .ggml import Ggml

    library = Ggml(threads)

    def make(x):
        B, T, D = x["u"].shape
        raw = np.log(np.expm1(x["delta"].astype(np.float64))).astype(np.float32)
        ids = np.zeros((1, 1, 1, B), np.int32)
        given = [
            x["u"].reshape(B, T, D, 1),
            raw[None],
            x["A"].reshape(1, 1, D, N),
            x["B"],
            x["C"],
            ids,
        ]
        arrays = [aligned(a.shape, a.dtype.type) for a in given]
        for a, b in zip(arrays, given, strict=True):
            a[...] = b
        state, out = aligned((B, D, 1, N)), aligned((B * T * D + B * D * N,))
        state[...] = 0
        call = library.computing(library.scan, (*arrays, state), out)

        def run():
            call()
            return out[: B * T * D].reshape(B, T, D)

        run.held = arrays, state  # ggml has their addresses only
        return run

    return f"ggml {library.about}", make


def loop_of_transformers():
    import torch

    torch.set_num_threads(1)

    def make(x):
        """As MambaMixer.slow_forward: what a token needs is made for all of them, then a loop."""
        u, delta, A, B, C = (torch.from_numpy(x[name]) for name in ("u", "delta", "A", "B", "C"))
        u, delta = u.mT, delta.mT

        @torch.inference_mode()
        def run():
            a = torch.exp(A[None, :, None] * delta[..., None])
            b = delta[..., None] * B.transpose(1, 2) * u[..., None]
            h, reads = torch.zeros(1, *A.shape), []
            for t in range(u.shape[-1]):
                h = a[:, :, t] * h + b[:, :, t]
                reads.append(torch.matmul(h, C[:, t, 0, :, None])[..., 0])
            return torch.stack(reads, 1).numpy()

        return run

    return f"PyTorch {torch.__version__}, the loop of transformers", make


def peers():
    """(name, maker) of those that are here, and why the others are not."""
    found, missing = [], []
    for peer in (ggml, loop_of_transformers):
        try:
            found.append(peer())
        except ImportError as error:
            missing.append(f"not run: {peer.__name__.replace('_', ' ')}: {error}")
    return found, missing


def check(name, make, rng):
    x = problem(rng, 40, 32)
    want, _ = linattn.reference.selective_scan(**x)
    worst = abs(make(x)() - want).max() / abs(want).max()
    if not worst < 1e-5:
        raise SystemExit(f"{name}: off by {worst:.1e} of the largest")


def run(given):
    if given.device == "cuda":
        from . import scans_cuda

        return scans_cuda.run(given)
    rng = np.random.default_rng(0)
    linattn.set_num_threads(1)
    beside, missing = peers()
    calls = [("linattn", ours, 1), ("linattn, forward and backward", ours_both, 1)]
    calls += [(name, make, 1) for name, make in beside]
    if len(os.sched_getaffinity(0)) > 1:
        calls += [(f"{name}, 2 threads", make, 2) for name, make, _ in calls[:2]]
    for name, make, _ in calls:
        check(name, make, rng)
    x = problem(rng, T, D)
    timed = [Timed(Result(None, name, threads=n), make(x)) for name, make, n in calls]
    for each in timed:
        each.prepare()
    with quiet():
        for _, each in in_turns(timed, given.rounds or ROUNDS, last=lambda t: t.result.threads):
            linattn.set_num_threads(each.result.threads)
            each.sample()
    base = timed[0].result.median()
    rows = [
        [
            each.result.peer,
            f"{1e3 * each.result.median():.2f}",
            f"{1e3 * each.result.least():.2f}",
            f"{T / each.result.median() / 1e3:.1f}",
            f"{each.result.median() / base:.2f}",
        ]
        for each in timed
    ]
    used, _ = linattn._linattn.isa()
    print(f"selective_scan, float32, T = {T}, D = {D}, N = {N}; {used}, one thread\n")
    print("\n".join(lines(["", "ms", "least", "thousand tokens/s", "time / ours"], rows)))
    print("\n".join(missing))
    return 0
