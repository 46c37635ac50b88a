"""The command line of `python -m linattn`. A program is imported when it is asked for."""

import argparse
import os
import sys

from linattn.programs.options import LAYERS, TRAINING, not_negative, positive


def main(argv=None):
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="linattn", description="Linear attention memories.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_demo(commands)
    add_train(commands)
    commands.add_parser("info", help="version, compiler, instruction sets, threads, CUDA")
    options = parser.parse_args(argv)
    return {"demo": run_demo, "train": run_train, "info": run_info}[options.command](options)


def add_demo(commands):
    demo = commands.add_parser(
        "demo", help="stream real text through the memories and report bits per byte and tokens/s"
    )
    demo.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="text to read (default: the Python standard library's source)",
    )
    demo.add_argument(
        "--bytes",
        type=positive,
        default=2_000_000,
        metavar="N",
        help="how much to read (default: %(default)s)",
    )
    demo.add_argument("--memories", metavar="A,B,...", help="which memories (default: all)")
    demo.add_argument("--plot", metavar="OUT.png", help="draw bits per byte along the stream")
    demo.add_argument("--seed", type=int, default=0, help="of the random features (default: 0)")


def add_train(commands):
    train = commands.add_parser(
        "train", help="train a byte-level language model on real text (needs PyTorch)"
    )
    train.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="text to learn (default: the Python standard library's source)",
    )
    for name, (default, parse, letter, text) in TRAINING.items():
        train.add_argument(
            "--" + name.replace("_", "-"),
            type=parse,
            metavar=letter,
            choices=LAYERS if name == "layer" else None,
            help=f"{text} (default: {default})",
        )
    train.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="float32 on the CPU, bfloat16 autocast on a GPU (default: cpu)",
    )
    train.add_argument(
        "--out",
        metavar="DIR",
        help="where the checkpoint and the loss curve go "
        "(default: linattn-train, or where the checkpoint is)",
    )
    train.add_argument("--resume", metavar="CHECKPOINT", help="go on with a run")
    train.add_argument(
        "--plot",
        metavar="OUT.png",
        help="the loss curve (default: DIR/loss.png if matplotlib is installed)",
    )
    train.add_argument(
        "--context-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="N processes of torchrun's share the tokens of each sequence (default: 1)",
    )
    train.add_argument("--prompt", default="def ", help="of the sample (default: %(default)r)")
    train.add_argument(
        "--sample",
        type=not_negative(int),
        default=400,
        metavar="N",
        help="bytes of it, 0 for none (default: %(default)s)",
    )
    train.add_argument(
        "--temperature",
        type=not_negative(float),
        default=0.8,
        metavar="X",
        help="of it, 0 for the likeliest byte (default: %(default)s)",
    )


def run_info(options):
    import linattn

    linattn.show_config()
    return 0


def run_demo(options):
    from linattn.programs import demo

    def run():
        names = options.memories.split(",") if options.memories else list(demo.MEMORIES)
        if unknown := [name for name in names if name not in demo.MEMORIES]:
            raise demo.DemoError(
                f"--memories: {unknown[0]!r} is not one of {', '.join(demo.MEMORIES)}"
            )
        if options.seed < 0:
            raise demo.DemoError("--seed: must be at least 0")
        demo.run(
            options.files, options.bytes, list(dict.fromkeys(names)), options.plot, options.seed
        )

    return status("demo", run, demo.DemoError)


def run_train(options):
    try:
        from linattn.programs import train
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return failed("train", "needs PyTorch: pip install 'linattn[train]'", 2)

    def run():
        given = {
            name: getattr(options, name) for name in TRAINING if getattr(options, name) is not None
        }
        if options.files:
            given["files"] = [os.path.abspath(path) for path in options.files]
        if options.resume is not None and given:
            name = "FILE" if options.files else "--" + next(iter(given)).replace("_", "-")
            raise train.TrainError(f"{name}: with --resume it is the checkpoint's")
        defaults = {name: default for name, (default, *_) in TRAINING.items()}
        train.run(
            {"files": []} | defaults | given,
            out=options.out,
            resume=options.resume,
            plot=options.plot,
            device=options.device,
            prompt=options.prompt,
            length=options.sample,
            temperature=options.temperature,
            context_parallel=options.context_parallel,
        )

    return status("train", run, train.TrainError)


def status(name, run, user_error):
    """Call `run`; the exit status of the command, with one line on stderr if it failed."""
    try:
        run()
    except user_error as error:
        return failed(name, error, 2)
    except (RuntimeError, MemoryError, OSError) as error:
        return failed(name, str(error) or "out of memory", 1)
    except KeyboardInterrupt as interrupt:
        return failed(name, str(interrupt) or "interrupted", 130)
    return 0


def failed(name, message, exit_status):
    print(f"linattn {name}: {message}", file=sys.stderr)
    return exit_status
