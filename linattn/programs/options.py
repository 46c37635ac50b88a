"""The values that options may have: parsers for argparse, and the options of a training run."""

import argparse

LARGEST = 2**63 - 1  # the largest integer that PyTorch can hold


def positive(text):
    """The integer in `text`, at least 1."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST}")
    return value


def number(low, high):
    """A parser of numbers above `low` and below `high`."""

    def parse(text):
        value = float(text)
        if not low < value < high:
            raise argparse.ArgumentTypeError(f"must lie between {low:g} and {high:g}")
        return value

    parse.__name__ = "number"
    return parse


def not_negative(kind):
    """A parser of finite numbers of type `kind`, at least 0."""

    def parse(text):
        value = kind(text)
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError("must be at least 0")
        if kind is int and value > LARGEST:
            raise argparse.ArgumentTypeError(f"must be at most {LARGEST}")
        return value

    parse.__name__ = kind.__name__
    return parse


LAYERS = (
    "gated_delta_net",
    "delta_net",
    "kda",
    "rwkv7",
    "titans",
    "mamba",
    "mamba2",
    "gla",
    "retention",
    "linear_attention",
    "softmax",
)

# The options that define a training run; a checkpoint keeps them. Each has its default, its parser,
# the letter of its value, and the text of --help.
TRAINING = {
    "layer": ("gated_delta_net", str, None, "the mixer of each block"),
    "blocks": (3, positive, "N", "how many"),
    "d_model": (128, positive, "D", "channels between the blocks"),
    "head_dim": (64, positive, "K", "keys and values of a head; there are D / K heads"),
    "context": (256, positive, "T", "bytes of a training sequence, and of a held-out one"),
    "batch": (4, positive, "B", "sequences of a step"),
    "steps": (2400, positive, "N", "how many"),
    "lr": (3e-3, number(0, float("inf")), "X", "the largest learning rate"),
    "seed": (0, not_negative(int), "N", "of the parameters, the batches and the sample"),
    "held_out": (0.05, number(0, 1), "X", "the share of the text, at its end, never learnt from"),
    "every": (
        200,
        positive,
        "N",
        "steps from one checkpoint, and look at held-out text, to the next",
    ),
}
