"""Processes of one torch.distributed world (gloo), which tests send functions to.

One world of four serves groups of two, three and four ranks, since starting a process costs
seconds. The functions are of modules that a process can import by name.
"""

import multiprocessing
import os
import traceback
from datetime import timedelta

MOST = 4
TIMEOUT = 60  # seconds that a collective, or an answer, may take


class Failure(Exception):
    """What a rank raised: its type's name, its message, its traceback."""

    def __init__(self, rank, kind, message, trace):
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message = rank, kind, message

    def __reduce__(self):
        return Failure, (self.rank, self.kind, self.message, "")


def _work(rank, world, store, seconds, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LINATTN_NUM_THREADS"] = "1"
    import linattn

    linattn.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world)}
    groups[world] = dist.group.WORLD
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        function, size, args = task
        try:
            answer = function(groups[size], *args)
        except Exception as error:
            kind, trace = type(error).__name__, traceback.format_exc()
            answer = Failure(rank, kind, str(error), trace)
        pipe.send(answer)
    dist.destroy_process_group()


class Ranks:
    """The processes. `run` sends a function to the first `size` of them."""

    def __init__(self, folder, world=MOST, seconds=TIMEOUT):
        self.world = world
        context = multiprocessing.get_context("spawn")
        store = str(folder / "store")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, world, store, seconds, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank in range(world):
            assert self.answer(rank) == "ready"

    def answer(self, rank):
        assert self.pipes[rank].poll(2 * TIMEOUT), f"rank {rank} does not answer"
        return self.pipes[rank].recv()

    def start(self, size, function, *args):
        for pipe in self.pipes[:size]:
            pipe.send((function, size, args))

    def answers(self, size, function, *args):
        """What function(group, *args) returned on each rank, or the Failure that it raised."""
        self.start(size, function, *args)
        return [self.answer(rank) for rank in range(size)]

    def run(self, size, function, *args):
        """The same, where a Failure is raised here."""
        found = self.answers(size, function, *args)
        for one in found:
            if isinstance(one, Failure):
                raise one
        return found

    def end(self):
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(TIMEOUT)
            if process.is_alive():
                process.kill()
