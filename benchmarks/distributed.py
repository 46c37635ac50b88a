"""Rows of tokens that the ranks of a group share, beside one rank with whole rows. No files.

    torchrun --nproc-per-node 2 -m benchmarks distributed

NCCL where each rank has a GPU, else gloo on the CPU. Before an op is timed, the outputs and the
gradients of the ranks are compared with those of one rank. Times are the slowest rank's.
"""

import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

import linattn
import linattn.distributed as lad
from linattn.segments import final_state
from linattn.testing import make_inputs

from .report import lines

# Those with a gate of each token, or of its keys.
OPS = [
    op
    for op, kind in linattn.VARIANTS.items()
    if kind.decay in ("token", "key") and kind.rule in ("additive", "delta")
]
ROUNDS = 7
SIZES = {"cuda": {"T": 65536, "H": 32, "K": 128, "V": 128}, "cpu": {"T": 2048, "H": 4}}
DRAWN = 2048  # tokens
CLOSE = {"cuda": 2e-2, "cpu": 1e-5}  # of bfloat16 and float32, by norms


def problem(op, device, T, H, K=64, V=64):
    """Tensors of a row, and a gradient of o. The tokens of a long row come again and again: NumPy
    takes longer to draw them than all calls together."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    drawn = min(T, DRAWN)
    given = make_inputs(op, np.random.default_rng(0), T=drawn, H=H, K=K, V=V, dtype=np.float32)
    tensors = {
        name: torch.from_numpy(x).to(device, torch.float32 if name == "g" else dtype)
        for name, x in given.items()
    }
    times = -(-T // drawn)
    tensors = {name: x.repeat(1, times, *[1] * (x.dim() - 2))[:, :T] for name, x in tensors.items()}
    do = torch.ones(1, T, H, V, device=device, dtype=dtype)
    return tensors, do


def leaves(tensors, part=slice(None)):
    return {name: x[:, part].clone().requires_grad_() for name, x in tensors.items()}


def apart(found, wanted):
    return (found - wanted).float().norm().item() / wanted.float().norm().item()


def seconds(call, device, rounds):
    """The median of turns that all ranks begin together."""

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    taken = []
    for turn in range(-3, rounds):  # the first three are not counted
        dist.barrier()
        wait()
        start = time.perf_counter()
        call()
        wait()
        if turn >= 0:
            taken.append(time.perf_counter() - start)
    return of_slowest(statistics.median(taken), device)


def of_slowest(seconds, device):
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def seconds_alone(call, device, rounds):
    """The median of turns of a call by itself. On a GPU the host's time is not in it: the GPU has
    other work while the host makes the call."""
    if device != "cuda":
        return seconds(call, device, rounds)
    work = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    taken = []
    for turn in range(-3, rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(work, work)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if turn >= 0:
            taken.append(1e-3 * begin.elapsed_time(end))
    return of_slowest(statistics.median(taken), device)


def measure(op, device, rounds):
    """Seconds of a forward pass and of one with gradients, by one rank and by all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = SIZES[device]
    length = sizes["T"] // size
    part = slice(rank * length, (rank + 1) * length)
    tensors, do = problem(op, device, **sizes)
    whole, own = leaves(tensors), leaves(tensors, part)
    context = lad.context(dist.group.WORLD, lengths=length)
    alone, shared = getattr(linattn, op), getattr(lad, op)

    @torch.no_grad()
    def forward(function, x, **group):
        function(**x, **group)

    def both(function, x, d, **group):
        o, _ = function(**x, **group)
        return o.detach(), *torch.autograd.grad(o, tuple(x.values()), d)

    calls = (
        lambda: forward(alone, whole),
        lambda: forward(shared, own, group=context),
        lambda: both(alone, whole, do),
        lambda: both(shared, own, do[:, part], group=context),
    )
    results = zip(("o", *own), calls[2](), calls[3](), strict=True)
    for name, wanted, found in results:
        error = apart(found, wanted[:, part])
        assert error < CLOSE[device], f"{op}: {name} of rank {rank} is off by {error:.1e}"
    return [seconds(call, device, rounds) for call in calls]


def measure_parts(op, device, rounds):
    """Seconds of what a rank does with its tokens, here with all of the row: its final state, its
    map, the op, the gradient of its initial state, all gradients."""
    tensors, do = problem(op, device, **SIZES[device])
    shape = tensors["q"].shape
    before = torch.zeros(shape[0], shape[2], shape[3], do.shape[3], device=device)
    back = getattr(linattn, f"{op}_backward")
    calls = (
        lambda: final_state(op, None, **tensors),
        lambda: linattn.segment_map(op, **tensors),
        lambda: getattr(linattn, op)(**tensors, initial_state=before),
        lambda: linattn.segment_map_backward(op, do, **tensors),
        lambda: back(do, **tensors, initial_state=before),
    )
    return [seconds_alone(call, device, rounds) for call in calls]


def run(given):
    if "RANK" not in os.environ:
        return "distributed: start it by torchrun --nproc-per-node N -m benchmarks distributed"
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rows, parts = [], []
    for op in OPS:
        found = measure_parts(op, device, given.rounds or ROUNDS)
        parts.append([op, *(f"{1e3 * x:.2f}" for x in found)])
        one, all_, one_both, all_both = measure(op, device, given.rounds or ROUNDS)
        rows.append(
            [
                op,
                *(f"{1e3 * x:.2f}" for x in (one, all_)),
                f"{one / all_:.2f}",
                *(f"{1e3 * x:.2f}" for x in (one_both, all_both)),
                f"{one_both / all_both:.2f}",
            ]
        )
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        print(
            f"{dist.get_world_size()} ranks, {where}, {SIZES[device]}, PyTorch {torch.__version__}"
        )
        print("milliseconds, medians of the slowest rank\n")
        names = ["op", "forward, one", "all", "ratio", "with backward, one", "all", "ratio"]
        print("\n".join(lines(names, rows)))
        print("\none rank with all tokens\n")
        names = ["op", "final state", "map", "forward", "d initial state", "backward"]
        print("\n".join(lines(names, parts)))
    dist.destroy_process_group()
    return 0
