"""python -m linattn demo | info"""

import argparse
import sys


def positive(text):
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


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
    commands.add_parser("info", help="version, compiler, instruction sets, threads, CUDA")
    options = parser.parse_args(argv)

    if options.command == "info":
        import linattn
        linattn.show_config()
        return 0
    return run_demo(options)


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
