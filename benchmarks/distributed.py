"""Rows of tokens that the ranks of a group share, beside one rank with whole rows. No files.

    torchrun --nproc-per-node 2 -m benchmarks distributed

NCCL where each rank has a GPU, else gloo on the CPU. Before an op is timed, the outputs and the
gradients of the ranks are compared with those of one rank. Times are the slowest rank's.

    python -m benchmarks distributed

The first times are of one GPU with a row of 2^20 tokens. The others are of the same GPU as rank 1
of four that share it, before an exchange and behind it. PyTorch's fake group sends nothing, and
zeros arrive.

    python -m benchmarks distributed --tokens 32768

The same, where one GPU has as many tokens as the rank: what the calls before the exchanges add.
"""

import contextlib
import functools
import itertools
import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

import linattn
import linattn.distributed as lad

from .base import SYSTEMS, Case
from .inputs import numpy_inputs
from .report import lines

# Those with a gate of each token, or of its keys.
OPS = [
    op
    for op, kind in linattn.VARIANTS.items()
    if kind.decay in ("token", "key") and kind.rule in ("additive", "delta")
]
# One op of each kind, and the systems that have benchmarks.
KINDS = {(kind.decay, kind.rule): op for op, kind in reversed(linattn.VARIANTS.items())}
NORMALISED = "linear_attention, normalised"
SCANS = ("selective_scan", "hgrn")  # a state of 16 numbers for each channel, and one of one number
KINDS = [NORMALISED, *reversed(KINDS.values()), *SYSTEMS, *SCANS]
PLAIN = {  # options
    "linear_attention": {"normalize": False, "feature_map": "identity"},
    "selective_scan": {"delta_softplus": True},
}
ROUNDS = 7
SIZES = {"cuda": {"T": 1 << 17, "H": 32, "K": 128, "V": 128}, "cpu": {"T": 2048, "H": 4}}
ALONE = {"cuda": SIZES["cuda"] | {"T": 1 << 20}, "cpu": SIZES["cpu"]}
SHARED_BY = 4
DRAWN = 2048  # tokens
NUMBERS = 16  # of a channel's state
WIDE = ("g", "dt", "A", "gamma", "slopes", "bonus")  # float32
CLOSE = {"cuda": 2e-2, "cpu": 1e-5}  # of bfloat16 and float32, by norms


def function_of(name):
    return name.split(",")[0]


def problem(op, device, T, H, K=64, V=64):
    """Tensors of a row, and a gradient of o. The tokens of a long row come again and again: NumPy
    takes longer to draw them than all calls together."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    drawn = min(T, DRAWN)
    if op in SCANS:
        given, last = scan_inputs(op, drawn, H * V), (H * V,)
    else:
        given, last = numpy_inputs(Case(function_of(op), T=drawn, H=H, HV=H, D=K, V=V)), (H, V)
    tensors = {
        name: torch.from_numpy(x).to(device, torch.float32 if name in WIDE else dtype)
        for name, x in given.items()
    }
    times = -(-T // drawn)
    tensors = {
        name: x.repeat(1, times, *[1] * (x.dim() - 2))[:, :T] if x.dim() > 2 else x
        for name, x in tensors.items()
    }
    do = torch.ones(1, T, *last, device=device, dtype=dtype)
    return tensors, do


def scan_inputs(op, T, channels):
    """NumPy's arrays of a scan: those of Mamba, or of HGRN."""
    r = np.random.default_rng(0).standard_normal
    if op == "hgrn":
        x, g = r((2, 1, T, channels), np.float32)
        return {"x": x, "g": -np.logaddexp(0, -3 - g)}
    u, delta, z = r((3, 1, T, channels), np.float32)
    B, C = r((2, 1, T, 1, NUMBERS), np.float32)
    A = -np.broadcast_to(np.arange(1, NUMBERS + 1, dtype=np.float32), (channels, NUMBERS))
    shared = {"A": A.copy(), "D": np.ones(channels, np.float32)}
    bias = np.full(channels, -4.0, np.float32)
    return {"u": u, "delta": delta, "B": B, "C": C, "z": z, "delta_bias": bias, **shared}


def leaves(tensors, part=slice(None)):
    return {
        name: (x[:, part] if x.dim() > 2 else x).clone().requires_grad_()
        for name, x in tensors.items()
    }


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


def parts_alone(op, device, rounds, T):
    """Seconds of one rank with T tokens of the row: forward, backward."""
    tensors, do = problem(op, device, **ALONE[device] | {"T": T})
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}  # there is no room for two
    call = functools.partial(getattr(linattn, function_of(op)), **PLAIN.get(op, {}))
    return medians(lambda marks: turn(leaves, do, marks, call), device, rounds)


def free(device):
    """Give back the memory of the calls before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        linattn.cuda.empty_cache()


def parts_of_row(op, device, rounds, T):
    """The same, and a mark. If the row does not fit the memory, the time of a part of it is taken
    as often as there are parts."""
    try:
        return parts_alone(op, device, rounds, T), ""
    except (torch.OutOfMemoryError, MemoryError):
        pass
    free(device)
    found = parts_alone(op, device, rounds, T // SHARED_BY)
    return [SHARED_BY * x for x in found], f" ({SHARED_BY} parts)"


def parts_shared(op, device, rounds, length):
    """Seconds of a rank with `length` tokens: of its map, of the call behind the exchange, of the
    gradient of its initial state, of all gradients behind the exchange."""
    tensors, do = problem(op, device, **ALONE[device] | {"T": length})
    x = leaves(tensors)
    context = lad.context(lengths=length, check=False)

    def call(marks):
        with exchanges_marked(marks):
            function = getattr(lad, function_of(op))
            turn(x, do, marks, function, group=context, **PLAIN.get(op, {}))

    found = medians(call, device, rounds)  # each exchange is two messages, with a fold between them
    first, fold, forward, first_back, fold_back, backward = found
    return first, fold + forward, first_back, fold_back + backward


def turn(x, do, marks, function, **group):
    o, _ = function(**x, **group)
    marks.append(mark())
    torch.autograd.grad(o, tuple(x.values()), do)
    marks.append(mark())


def medians(call, device, rounds):
    """Seconds between the marks of a call."""
    turns = []
    for i in range(-2, rounds):  # the first two are not counted
        busy(device)
        marks = [mark()]
        call(marks)
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= 0:
            turns.append([between(a, b) for a, b in itertools.pairwise(marks)])
    return [statistics.median(x) for x in zip(*turns, strict=True)]


def mark():
    """A moment: of the GPU's work, so that the host's time is not in it; else of the host."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b):
    return b - a if isinstance(a, float) else 1e-3 * a.elapsed_time(b)


def busy(device):
    """Work for the GPU while the host makes a call."""
    if device == "cuda":
        torch.cuda._sleep(20_000_000)


@contextlib.contextmanager
def exchanges_marked(marks):
    """Each exchange is a mark, and zeros arrive."""
    real = dist.all_to_all_single

    def exchange(out, *_, **__):
        marks.append(mark())
        out.zero_()

    dist.all_to_all_single = exchange
    try:
        yield
    finally:
        dist.all_to_all_single = real


def run_alone(rounds, tokens):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = "cuda" if torch.cuda.is_available() else "cpu"
    row = tokens or ALONE[device]["T"]
    own_tokens = tokens or row // SHARED_BY
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=SHARED_BY)
    rows = []
    for op in KINDS:
        free(device)
        alone, how = parts_of_row(op, device, min(rounds, 3), row)
        own = parts_shared(op, device, rounds, own_tokens)
        rate = sum(alone) * own_tokens / row / sum(own)
        added = own[0] / own[1], own[2] / own[3]
        rows.append(
            [
                op + how,
                *(f"{1e3 * x:.2f}" for x in (*alone, *own)),
                *(f"{x:.0%}" for x in added),
                f"{rate:.2f}",
            ]
        )
    print(f"{name_of(device)}, {ALONE[device] | {'T': row}}, PyTorch {torch.__version__}")
    print(f"milliseconds of one GPU, and of one rank of {SHARED_BY} with {own_tokens}, medians\n")
    names = ["op", "forward", "backward", "a rank: map", "forward", "d initial state", "backward"]
    print("\n".join(lines([*names, "map adds", "d initial state adds", "rate"], rows)))
    dist.destroy_process_group()
    return 0


def name_of(device):
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def run(given):
    if "RANK" not in os.environ:
        return run_alone(given.rounds or ROUNDS, given.tokens)
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rows = []
    for op in OPS:
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
        where = f"{dist.get_world_size()} ranks, {name_of(device)}"
        print(f"{where}, {SIZES[device]}, PyTorch {torch.__version__}")
        print("milliseconds, medians of the slowest rank\n")
        names = ["op", "forward, one", "all", "ratio", "with backward, one", "all", "ratio"]
        print("\n".join(lines(names, rows)))
    dist.destroy_process_group()
    return 0
