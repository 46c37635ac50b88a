"""python -m linattn demo | train | info"""

import argparse
import os
import sys

LARGEST = 2**63 - 1  # of whole numbers: PyTorch keeps 64 bits


def positive(text):
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
    def parse(text):
        value = kind(text)
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError("must be at least 0")
        if kind is int and value > LARGEST:
            raise argparse.ArgumentTypeError(f"must be at most {LARGEST}")
        return value
    parse.__name__ = kind.__name__
    return parse


LAYERS = ("gated_delta_net", "delta_net", "kda", "gla", "retention", "linear_attention", "softmax")

# What a training run is, and its checkpoints keep: default, parser, letter, what it says.
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
    "every": (200, positive, "N", "steps from one checkpoint, and look at held-out text, to the "
                                  "next"),
}


def main(argv=None):
    parser = argparse.ArgumentParser(prog="linattn", description="Linear attention memories.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="stream real text through the memories and report bits per byte and tokens/s")
    demo.add_argument("files", metavar="FILE", nargs="*",
                      help="text to read (default: the Python standard library's source)")
    demo.add_argument("--bytes", type=positive, default=2_000_000, metavar="N",
                      help="how much to read (default: %(default)s)")
    demo.add_argument("--memories", metavar="A,B,...", help="which memories (default: all)")
    demo.add_argument("--plot", metavar="OUT.png", help="draw bits per byte along the stream")
    demo.add_argument("--seed", type=int, default=0, help="of the random features (default: 0)")
    add_train(commands)
    commands.add_parser("info", help="version, compiler, instruction sets, threads, CUDA")
    options = parser.parse_args(argv)

    if options.command == "info":
        import linattn
        linattn.show_config()
        return 0
    return run_train(options) if options.command == "train" else run_demo(options)


def add_train(commands):
    train = commands.add_parser(
        "train", help="train a byte-level language model on real text (needs PyTorch)")
    train.add_argument("files", metavar="FILE", nargs="*",
                       help="text to learn (default: the Python standard library's source)")
    for name, (default, parse, letter, text) in TRAINING.items():
        train.add_argument("--" + name.replace("_", "-"), type=parse, metavar=letter,
                           choices=LAYERS if name == "layer" else None,
                           help=f"{text} (default: {default})")
    train.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                       help="float32 on the CPU, bfloat16 autocast on a GPU (default: cpu)")
    train.add_argument("--out", metavar="DIR", help="where the checkpoint and the loss curve go "
                       "(default: linattn-train, or where the checkpoint is)")
    train.add_argument("--resume", metavar="CHECKPOINT", help="go on with a run")
    train.add_argument("--plot", metavar="OUT.png",
                       help="the loss curve (default: DIR/loss.png if matplotlib is installed)")
    train.add_argument("--prompt", default="def ", help="of the sample (default: %(default)r)")
    train.add_argument("--sample", type=not_negative(int), default=400, metavar="N",
                       help="bytes of it, 0 for none (default: %(default)s)")
    train.add_argument("--temperature", type=not_negative(float), default=0.8, metavar="X",
                       help="of it, 0 for the likeliest byte (default: %(default)s)")


def run_train(options):
    given = {name: getattr(options, name) for name in TRAINING
             if getattr(options, name) is not None}
    if options.files:
        given["files"] = [os.path.abspath(path) for path in options.files]
    try:
        from linattn import train
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("linattn train: needs PyTorch: pip install 'linattn[train]'", file=sys.stderr)
        return 2
    try:
        if options.resume is not None and given:
            name = "FILE" if options.files else "--" + next(iter(given)).replace("_", "-")
            raise train.TrainError(f"{name}: with --resume it is the checkpoint's")
        defaults = {name: default for name, (default, *_) in TRAINING.items()}
        train.run({"files": []} | defaults | given, out=options.out, resume=options.resume,
                  plot=options.plot, device=options.device, prompt=options.prompt,
                  length=options.sample, temperature=options.temperature)
    except train.TrainError as error:
        print(f"linattn train: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError, OSError) as error:
        print(f"linattn train: {str(error) or 'out of memory'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"linattn train: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    return 0


def run_demo(options):
    from linattn import demo

    names = options.memories.split(",") if options.memories else list(demo.MEMORIES)
    try:
        if unknown := [name for name in names if name not in demo.MEMORIES]:
            raise demo.DemoError(
                f"--memories: {unknown[0]!r} is not one of {', '.join(demo.MEMORIES)}")
        if options.seed < 0:
            raise demo.DemoError("--seed: must be at least 0")
        demo.run(options.files, options.bytes, list(dict.fromkeys(names)), options.plot,
                 options.seed)
    except demo.DemoError as error:
        print(f"linattn demo: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError, OSError) as error:
        print(f"linattn demo: {str(error) or 'out of memory'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("linattn demo: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
