"""Diagonal scans and the short convolution on a GPU: each checked, then all take turns. No files.

The yardstick of the step and of the convolution is a copy of the bytes that they read and write.
The peers are the kernels of mamba_ssm (`selective_scan_cuda`) and causal_conv1d
(`causal_conv1d_cuda`), where these extensions are built. They take [B,D,T], and are given it as
they like it best: dense for the scan, channels inside for the convolution.
"""

import statistics

import linattn

from .report import lines

D, N, W = 5120, 16, 4  # the channels of Mamba 2.8B
SHAPES = ((1, 32768), (8, 4096), (32, 1024))
STEP_BATCH = 256
ROUNDS = 9
MANY = 8
CLOSE = 1e-3  # of bfloat16 outputs, by their norms


class Case:
    """A row of calls that do the same: {name: function}, and what they give."""

    def __init__(self, title, calls, same=()):
        self.title, self.calls = title, calls
        for one, other in same:
            check(title, calls[one](), calls[other]())


def check(title, found, wanted):
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    if not error < CLOSE:
        raise SystemExit(f"{title}: the two results differ by {error:.1e}")


def optional(name):
    try:
        return __import__(name)
    except ImportError:
        return None


def scan_arrays(torch, B, T):
    def tokens(*shape):
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    return {
        "u": tokens(B, T, D),
        "delta": tokens(B, T, D) / 4 - 2,  # softplus of it and the bias is about 0.2
        "A": -torch.arange(1, N + 1, device="cuda").float().repeat(D, 1),
        "B": tokens(B, T, 1, N),
        "C": tokens(B, T, 1, N),
        "D": torch.ones(D, device="cuda"),
        "z": tokens(B, T, D),
        "delta_bias": torch.rand(D, device="cuda"),
    }


def scans(torch):
    peer = optional("selective_scan_cuda")
    for B, T in SHAPES:
        x = scan_arrays(torch, B, T)
        dy, out = torch.randn_like(x["u"]), torch.empty_like(x["u"])

        def forward(x=x, out=out):
            return linattn.selective_scan(**x, delta_softplus=True, out=out)[0]

        def backward(x=x, dy=dy):
            return linattn.selective_scan_backward(dy, **x, delta_softplus=True).du

        ways = {"linattn": forward}, {"linattn": backward}
        if peer:
            inside = {name: x[name].mT.contiguous() for name in ("u", "delta", "z")}
            rows = {name: x[name].permute(0, 2, 3, 1).contiguous() for name in ("B", "C")}
            theirs = (inside["u"], inside["delta"], x["A"], rows["B"], rows["C"], x["D"])
            theirs = (*theirs, inside["z"], x["delta_bias"])
            y, kept, _ = peer.fwd(*theirs, True)
            d = dy.mT.contiguous()

            def their_forward(theirs=theirs):
                return peer.fwd(*theirs, True)[2].mT

            def their_backward(theirs=theirs, y=y, kept=kept, d=d):
                return peer.bwd(*theirs, d, kept, y, None, True, False)[0].mT

            ways[0]["mamba_ssm"], ways[1]["mamba_ssm"] = their_forward, their_backward
        for which, calls in zip(("forward", "backward"), ways, strict=True):
            same = [("linattn", "mamba_ssm")] if peer else []
            yield Case(f"selective_scan, B {B}, T {T}, {which}", calls, same)


def steps(torch):
    x = {
        name: a[:, 0] if a.ndim > 2 else a for name, a in scan_arrays(torch, STEP_BATCH, 1).items()
    }
    state = torch.randn(STEP_BATCH, D, N, device="cuda")
    other, out = torch.empty_like(state), torch.empty_like(x["u"])

    def step():
        return linattn.selective_scan_step(state, **x, delta_softplus=True, out=out)

    calls = {"linattn": step, "a copy": lambda: other.copy_(state)}
    yield Case(f"selective_scan_step, B {STEP_BATCH}", calls)


def convolutions(torch):
    peer = optional("causal_conv1d_cuda")
    for B, T in SHAPES[:2]:
        x = torch.randn(B, T, D, device="cuda").to(torch.bfloat16)
        weight = torch.randn(D, W, device="cuda").to(torch.bfloat16)
        bias = torch.randn(D, device="cuda").to(torch.bfloat16)
        out, theirs = torch.empty_like(x), torch.empty_like(x)
        for activation in (None, "silu"):

            def forward(x=x, weight=weight, bias=bias, out=out, activation=activation):
                return linattn.causal_conv1d(x, weight, bias, activation=activation, out=out)[0]

            def grouped(x=x, weight=weight, bias=bias, activation=activation):
                padded = torch.nn.functional.pad(x.mT, (W - 1, 0))
                y = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=D).mT
                return torch.nn.functional.silu(y) if activation else y

            calls = {"linattn": forward, "a copy": lambda x=x, theirs=theirs: theirs.copy_(x)}
            calls["PyTorch, grouped"] = grouped
            if peer:

                def their_forward(x=x, weight=weight, bias=bias, y=theirs, activation=activation):
                    silu = activation is not None
                    peer.causal_conv1d_fwd(x.mT, weight, bias, None, None, y.mT, None, silu)
                    return y

                calls["causal_conv1d"] = their_forward
            same = [("linattn", "causal_conv1d")] if peer else []
            yield Case(f"causal_conv1d, B {B}, T {T}, {activation or 'plain'}", calls, same)


def milliseconds(torch, call):
    """Of one of MANY calls in a row: the GPU then waits for no Python."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(MANY):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / MANY


def run(given):
    import torch

    torch.manual_seed(0)
    rows = []
    for cases in (scans, steps, convolutions):
        for case in cases(torch):
            taken = {name: [] for name in case.calls}
            for _ in range(3 + (given.rounds or ROUNDS)):
                for name, call in case.calls.items():
                    taken[name].append(milliseconds(torch, call))
            medians = {name: statistics.median(times[3:]) for name, times in taken.items()}
            for name, time in medians.items():
                ratio = time / medians["linattn"]
                rows.append([case.title, name, f"{time:.3f}", f"{ratio:.2f}"])
    print(f"{torch.cuda.get_device_name()}; bfloat16, D = {D}, N = {N}, W = {W}; medians\n")
    print("\n".join(lines(["call", "", "ms", "time / ours"], rows)))
    for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        if not optional(name):
            print(f"not run: {name} is not here")
    return 0
