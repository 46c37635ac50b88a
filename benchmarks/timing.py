"""How calls are timed: in turns, by the clock, and on a GPU by events around a graph."""

import gc
import sys
import time

from .base import Result

COLD = 512 << 20  # bytes, many times any cache: read in 0.13 ms
GRAPH = 1.5e-3  # seconds a sample of a graph lasts at least
MOST = 64  # calls captured at most, but for more copies
LEAST = 4e-3  # seconds a sample by the clock lasts at least, short calls being repeated
SLOW = 0.06  # seconds from which a call is not warmed up before each sample


def in_turns(timed, rounds, last=None):
    """Yields (round, each), round after round; those with a true `last(each)` come last in each.

    A clock that drifts, or other work on the machine, then slows all of them equally. Every other
    round goes backwards, so that none always follows the same neighbour.
    """
    for n in range(rounds):
        order = timed if n % 2 == 0 else timed[::-1]
        for each in sorted(order, key=last) if last else order:
            yield n, each


class quiet:
    """No garbage is collected inside `with quiet():`."""

    def __enter__(self):
        gc.collect()
        gc.disable()

    def __exit__(self, *_):
        gc.enable()


def seconds_of(call, repeats=1):
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


class Timed:
    """A call on the CPU, timed by the clock in every `every`th round."""

    def __init__(self, result, call, every=1):
        self.result, self.call, self.every = result, call, every
        self.repeats, self.slow = 1, False

    def prepare(self):
        """How often to repeat; the first call of all, which pays for memory, is not counted."""
        seconds = seconds_of(self.call)
        if seconds < 5 * SLOW:
            seconds = seconds_of(self.call)
        self.repeats = max(1, min(1000, int(LEAST / seconds)))
        self.slow = seconds > SLOW

    def sample(self):
        if not self.slow:
            self.call()
        self.result.add("call", seconds_of(self.call, self.repeats))


class Gpu:
    """Samples of device time by events, the cache emptied before; and the clock's for the caller.

    Events lie around the replay of a graph of several calls. A pass over a buffer goes before: it
    leaves the cache full of bytes that no call reads, and gives the CPU time to enqueue the graph.
    """

    kind = "cuda"

    def __init__(self):
        import torch

        self.torch, self.sync = torch, torch.cuda.synchronize
        self.flush = torch.ones(COLD // 4, device="cuda")
        # so many bytes of inputs that a second pass finds nothing of the first in the cache
        self.cold = 2 * torch.cuda.get_device_properties(0).L2_cache_size

    def capture(self, calls):
        """A function that runs the calls once. Their results are kept during the capture, so that
        each call writes arrays of its own, as ours do."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            kept = [call() for call in calls]

        def run(kept=kept):
            graph.replay()

        run()
        self.sync()
        return run

    def sample(self, run):
        self.flush.sum()
        return self.plain(run)

    def plain(self, run):
        """Without a cold cache."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        self.sync()
        return start.elapsed_time(end) * 1e-3


class Host:
    """The stand-in where there is no GPU: the same calls, timed by the clock."""

    kind = "cpu"
    cold = 1 << 20  # a few copies, as on a GPU

    def sync(self):
        pass

    def capture(self, calls):
        return lambda: [call() for call in calls]

    def sample(self, run):
        return seconds_of(run)

    plain = sample


class Captured:
    """One way to compute a case on a device: its calls, one for each copy of the inputs."""

    def __init__(self, result, machine):
        self.result, self.machine, self.calls = result, machine, []

    def prepare(self, size):
        """Warm up, then capture; without a graph, events around as many calls. A call returns
        `size` bytes."""
        self.length = copies = len(self.calls)
        for _ in range(2):
            seconds = seconds_of(lambda: (self.in_turn(copies), self.machine.sync())) / copies
        wanted = max(copies, min(MOST, int(GRAPH / seconds) + 1, int(8e9 / size) + 1))
        self.length = self.result.calls = -(-wanted // copies) * copies
        self.repeats = max(1, min(200, int(10e-3 / seconds)))
        try:
            self.run = self.machine.capture([self.calls[i % copies] for i in range(self.length)])
        # of any kind, since a peer may synchronise, read a tensor or allocate on its own
        except Exception as error:
            self.result.note = f"not captured ({described(error, 160)})"
            self.machine.sync()
            self.run = lambda: self.in_turn(self.length)

    def in_turn(self, n):
        calls = self.calls
        for i in range(n):
            calls[i % len(calls)]()

    def sample(self, kind):
        """graph: device time. eager: wall time of calls back to back. launch: until a call
        returns, of few enough calls that none waits for the GPU's queue."""
        if kind == "graph":
            return self.result.add(kind, self.machine.sample(self.run) / self.length)
        n = self.repeats if kind == "eager" else min(50, self.repeats)
        self.machine.sync()
        start = time.perf_counter()
        self.in_turn(n)
        if kind == "eager":
            self.machine.sync()
        self.result.add(kind, (time.perf_counter() - start) / n)
        self.machine.sync()


def described(error, most=200):
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:most]


class Ceilings:
    """The ceilings of a device, sampled between the cases: they share clocks and heat."""

    def __init__(self, machine):
        import torch

        gpu = machine.kind == "cuda"
        moved, n = (2 << 30, 8192) if gpu else (8 << 20, 256)
        a = torch.ones(moved, dtype=torch.uint8, device=machine.kind)
        b, dtype = torch.empty_like(a), torch.bfloat16 if gpu else torch.float32
        x, y = (torch.randn(n, n, device=machine.kind).to(dtype) for _ in range(2))
        z, self.machine = torch.empty_like(x), machine
        self.measures = (  # key, what, unit, work, call
            (
                "copy",
                f"device-to-device copy of {moved >> 20} MiB, read and written",
                "TB/s",
                2 * moved / 1e12,
                lambda: b.copy_(a),
            ),
            (
                "matmul",
                f"{str(dtype).split('.')[1]} product {n}^3, random data",
                "TFLOP/s",
                2 * n**3 / 1e12,
                lambda: torch.matmul(x, y, out=z),
            ),
        )
        self.results = {key: Result(None, key, "ceiling") for key, *_ in self.measures}
        for _ in range(3):
            self.sample()
        for result in self.results.values():
            result.seconds.clear()

    def sample(self):
        for _ in range(5):
            for key, _, _, _, call in self.measures:
                self.results[key].add("call", self.machine.sample(call))

    def figures(self):
        return ceilings(self.measures, self.results)


def ceilings(measures, results):
    """key -> a description, the unit, the median and the best."""
    return {
        key: {
            "what": what,
            "unit": unit,
            "median": work / results[key].median(),
            "best": work / results[key].least(),
        }
        for key, what, unit, work, _ in measures
        if results[key].seconds
    }


def progress(total, what):
    """A function to call after each of `total` things: a bar on a terminal, where tqdm is."""
    if not sys.stderr.isatty():
        return lambda: None
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda: None
    return tqdm(total=total, desc=what, leave=False).update
