"""A training run whose sequences are shared by processes, which torchrun starts.

Each process has the whole model and a part of the tokens of each sequence. States travel between
the layers of the processes (linattn.distributed), and gradients are added. The first process alone
writes files and speaks.
"""

import os
from contextlib import contextmanager, nullcontext, redirect_stdout

import torch
import torch.distributed as dist

from linattn.distributed import parallelize


class SharingError(Exception):
    """A message for the user: processes cannot share this run."""


class Alone:
    """One process: the same calls, without effect."""

    rank, size = 0, 1

    def begin(self, model):
        """From now on the processes share the tokens of the model's layers."""

    def end(self, model):
        """From now on this process has whole sequences."""

    def part(self, tokens):
        """The tokens [B,T/N+1] of this process, of tokens [B,T+1]: each is predicted from the ones
        before it."""
        return tokens

    def total(self, x):
        """The sum of a number over the processes."""
        return x

    def mean(self, x):
        """The mean of a tensor over the processes."""
        return x

    def any(self, flag):
        """Is it true in one of the processes?"""
        return flag

    def gradients(self, parameters):
        """Let every process have the mean of the gradients."""


class Shared(Alone):
    """N processes of torchrun's, each with T / N tokens."""

    def __init__(self, size, options, device):
        started = int(os.environ.get("WORLD_SIZE", 1))
        if started != size:
            raise SharingError(
                f"--context-parallel {size}: expected as many processes, got {started}; start "
                f"them by torchrun --nproc-per-node {size} -m linattn train ..."
            )
        if options["layer"] == "softmax":
            raise SharingError("--context-parallel: softmax attention reads all tokens at once")
        if options["context"] % size:
            raise SharingError(
                f"--context: expected a multiple of --context-parallel {size}, got "
                f"{options['context']}"
            )
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.rank, self.size, self.device = dist.get_rank(), size, device

    def begin(self, model):
        parallelize(model, dist.group.WORLD)

    def end(self, model):
        parallelize(model, None)

    def part(self, tokens):
        n = (tokens.shape[1] - 1) // self.size
        return tokens[:, self.rank * n : (self.rank + 1) * n + 1]

    def total(self, x):
        y = torch.tensor(float(x), dtype=torch.float64, device=self.device)
        dist.all_reduce(y)
        return y.item()

    def mean(self, x):
        y = x.clone()
        dist.all_reduce(y)
        return y / self.size

    def any(self, flag):
        return self.total(flag) > 0

    def gradients(self, parameters):
        found = [p.grad for p in parameters if p.grad is not None]
        flat = self.mean(torch.cat([d.flatten() for d in found]))
        for d, piece in zip(found, flat.split([d.numel() for d in found]), strict=True):
            d.copy_(piece.view_as(d))


@contextmanager
def shared_by(size, options, device):
    """What the processes of a run share, while it lasts. All but the first one are silent."""
    if size == 1:
        yield Alone()
        return
    sharing = Shared(size, options, device)
    try:
        with open(os.devnull, "w") as nowhere:
            with redirect_stdout(nowhere) if sharing.rank else nullcontext():
                yield sharing
    finally:
        dist.destroy_process_group()
