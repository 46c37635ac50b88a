"""How a call is timed: on a GPU by graph and by events, on a machine without one by the clock."""

import statistics
import time

import torch

COLD = 512 << 20  # bytes, many times any cache: read in 0.13 ms
LEAST = 1.5e-3  # seconds a sample lasts at least
MOST = 64  # calls captured at most, but for more copies


class Gpu:
    """Samples of device time by events, the cache emptied before; and the clock's for the caller.

    Events lie around the replay of a graph of several calls. A pass over a buffer goes before: it
    leaves the cache full of what no call reads, and gives the CPU the time to enqueue the graph.
    """

    kind = "cuda"

    def __init__(self):
        self.flush = torch.ones(COLD // 4, device="cuda")
        # so many bytes of inputs that a second pass finds nothing of the first in the cache
        self.cold = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.sync = torch.cuda.synchronize

    def capture(self, calls):
        """What to run for a sample. What the calls return is kept while they are captured, so that
        each writes arrays of its own, as ours do."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
        run = Replay(graph, kept)
        run()
        self.sync()
        return run

    def sample(self, run):
        self.flush.sum()
        self.start.record()
        run()
        self.end.record()
        self.sync()
        return self.start.elapsed_time(self.end) * 1e-3


class Replay:
    """A captured graph, with the outputs whose memory it writes."""

    def __init__(self, graph, kept):
        self.graph, self.kept = graph, kept

    def __call__(self):
        self.graph.replay()


class Host:
    """The stand-in where there is no GPU: the same calls, timed by the clock."""

    kind = "cpu"
    cold = 1 << 20  # a few copies, as on a GPU

    def __init__(self):
        torch.set_num_threads(1)

    def sync(self):
        pass

    def capture(self, calls):
        return lambda: [call() for call in calls]

    def sample(self, run):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class Contestant:
    """One way to compute a case: its calls, one for each copy of the inputs, and its samples."""

    def __init__(self, who, calls, size):
        self.who, self.calls, self.size = who, calls, size  # bytes that a call returns
        self.error = self.note = ""
        self.first = self.whole = self.worst = None
        self.graph, self.eager, self.launch = [], [], []

    def prepare(self, machine):
        """Warm up, then capture; without a graph, events around as many calls."""
        self.length = len(self.calls)
        for _ in range(2):
            start = time.perf_counter()
            self.in_turn(self.length)
            machine.sync()
            seconds = (time.perf_counter() - start) / self.length
        copies = len(self.calls)
        wanted = max(copies, min(MOST, int(LEAST / seconds) + 1, int(8e9 / self.size) + 1))
        self.length = -(-wanted // copies) * copies
        self.repeats = max(1, min(200, int(10e-3 / seconds)))
        calls = [self.calls[i % copies] for i in range(self.length)]
        try:
            self.run = machine.capture(calls)
        # anything: a peer may synchronise, read a tensor or allocate on its own
        except Exception as error:
            self.note = f"not captured ({type(error).__name__}: {error}".split("\n")[0][:160] + ")"
            machine.sync()
            self.run = lambda: self.in_turn(self.length)

    def in_turn(self, n):
        calls = self.calls
        for i in range(n):
            calls[i % len(calls)]()

    def sample_graph(self, machine):
        self.graph.append(machine.sample(self.run) / self.length)

    def sample_eager(self, machine):
        """The wall time of calls back to back."""
        machine.sync()
        start = time.perf_counter()
        self.in_turn(self.repeats)
        machine.sync()
        self.eager.append((time.perf_counter() - start) / self.repeats)

    def sample_launch(self, machine):
        """The time until a call returns; few enough that none waits for the GPU's queue."""
        n = min(50, self.repeats)
        machine.sync()
        start = time.perf_counter()
        self.in_turn(n)
        self.launch.append((time.perf_counter() - start) / n)
        machine.sync()


def median(samples):
    return statistics.median(samples) if samples else None


class Ceilings:
    """What the device can do at most, sampled between the cases: they share clocks and heat."""

    def __init__(self, machine):
        gpu = machine.kind == "cuda"
        self.machine, self.copies, self.products = machine, [], []
        self.moved, n = (2 << 30, 8192) if gpu else (8 << 20, 256)
        self.a = torch.ones(self.moved, dtype=torch.uint8, device=machine.kind)
        self.b = torch.empty_like(self.a)
        dtype = torch.bfloat16 if gpu else torch.float32
        self.x, self.y = (torch.randn(n, n, device=machine.kind).to(dtype) for _ in range(2))
        self.z = torch.empty_like(self.x)
        self.work = 2 * n**3
        self.names = {"copy": f"device-to-device copy of {self.moved >> 20} MiB, read and written",
                      "matmul": f"{str(dtype).split('.')[1]} product {n}^3, random data"}
        for _ in range(3):
            self.sample()
        self.copies.clear()
        self.products.clear()

    def sample(self):
        for _ in range(5):
            self.copies.append(self.machine.sample(lambda: self.b.copy_(self.a)))
            self.products.append(self.machine.sample(
                lambda: torch.matmul(self.x, self.y, out=self.z)))

    def figures(self):
        """Bytes/s and operations/s, medians."""
        return {"copy": 2 * self.moved / median(self.copies),
                "matmul": self.work / median(self.products)}
