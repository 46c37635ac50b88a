"""Registers that the CUDA kernels spill, from what nvcc -Xptxas=-v said: a log for each .cu file.

`.ci/spills.txt` lists every kernel that spills, with its bytes of stores and loads, as one release
of nvcc compiles them. A kernel that spills more, or that is not in the list, is a failure. After a
run of the CI, `python .ci/spills.py --write build/ptxas/*` makes the list anew, for a reader of the
difference to accept. Another release of nvcc gives other numbers. Then chunk kernels of
two-byte arrays with K <= 128 may spill nothing, because the speed of these arrays rests on them.
All other kernels are printed only.

A stack frame is no spill by itself: some kernels have one for what they do token by token.
"""

import argparse
import operator
import re
import subprocess
import sys
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FUNCTION = re.compile(r"Function properties for (\w+)")
SPILLS = re.compile(r"\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
CHUNK = re.compile(r"(chunks_forward|prepare_[a-z]+)<(64|128), (?!.*\bfloat\b)")
PLACES = {
    (arch, kernel)
    for arch in ("sm_80", "sm_90a")
    for kernel in ("chunks_forward", "prepare_key", "prepare_scalar")
}


def spills(logs):
    """(architecture, file, mangled name) and (stores, loads) of kernels and functions they call."""
    for log in map(Path, logs):
        arch = function = None
        for line in log.read_text().splitlines():
            if match := ENTRY.search(line):
                arch = match[2]
            elif match := FUNCTION.search(line):
                function = match[1]
            elif match := SPILLS.search(line):
                yield (arch, log.stem, function), (int(match[1]), int(match[2]))


def plain(names):
    """C++ names as a reader wants them: no return types, no arguments, no hashes of files."""
    said = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in said:
        name = re.sub(r"^void |_INTERNAL_\w+::|\(anonymous namespace\)::", "", name)
        name = re.sub(r"\(la_(decay|rule|dtype)\)", r"\1=", name).replace("(form)", "form=")
        yield name[: name.index("(")] if "(" in name else name


def read_list():
    release, *lines = LIST.read_text().splitlines()
    fields = (line.split(maxsplit=4) for line in lines)
    return release, {(arch, file, name): (int(a), int(b)) for arch, file, a, b, name in fields}


def line_of(key, stores, loads):
    arch, file, name = key
    return f"{arch:7} {file:17}{stores:6}{loads:6}  {name}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", default="nvcc", help="whose logs these are")
    parser.add_argument("--write", action="store_true", help="write the list, and compare nothing")
    parser.add_argument("logs", nargs="+")
    options = parser.parse_args()
    version = subprocess.run([options.nvcc, "--version"], capture_output=True, text=True).stdout
    release = "nvcc " + re.search(r"release ([\d.]+)", version)[1]

    found = list(spills(options.logs))
    names = plain([name for (_, _, name), _ in found])
    kernels = {
        (arch, file, name): bytes_
        for ((arch, file, _), bytes_), name in zip(found, names, strict=True)
    }
    spilling = {key: bytes_ for key, bytes_ in sorted(kernels.items()) if any(bytes_)}
    there = {(arch, name.split("<")[0]) for arch, _, name in kernels}
    if missing := PLACES - there:
        return f"not in the logs: {sorted(missing)}"
    if options.write:
        lines = [release, *(line_of(key, *bytes_) for key, bytes_ in spilling.items())]
        LIST.write_text("\n".join(lines) + "\n")
        return 0

    listed, allowed = read_list()
    if release != listed:
        print(f"{LIST.name} is of {listed}, this is {release}: the chunk kernels alone are held")
        allowed = {key: bytes_ for key, bytes_ in spilling.items() if not CHUNK.match(key[2])}
    worse = {
        key
        for key, bytes_ in spilling.items()
        if any(map(operator.gt, bytes_, allowed.get(key, (0, 0))))
    }
    print(f"{len(spilling)} of {len(kernels)} kernels spill; bytes of stores and loads:")
    for key, bytes_ in spilling.items():
        print(line_of(key, *bytes_), "<-- more than before" if key in worse else "")
    for key in sorted(allowed.keys() - spilling.keys()):
        print(f"spills no longer, take it off the list: {' '.join(key)}")
    return f"{len(worse)} kernels spill more than {LIST.name} has" if worse else 0


if __name__ == "__main__":
    sys.exit(main())
