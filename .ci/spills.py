"""Registers that the chunk kernels spill, from what nvcc -Xptxas=-v said: one log per argument.

The kernels for K = V = 64 and 128 may spill none: the speed of two-byte arrays rests on them.
Those for more keys, and float32's in two planes, are listed only. A stack frame is no spill by
itself; walk has one for what it does token by token.
"""

import re
import sys
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FUNCTION = re.compile(r"Function properties for (\w+)")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
KERNEL = re.compile(r"_Z\d+(walk|prepare_[a-z]+)ILi(64|128|256)E(\w*?)Ev4call")
SWITCH = re.compile(r"L\d+(?:la_)?([a-z]+)(\d)E?")


def kernels(text):
    """(kernel, K, its switches, architecture, stack, stores, loads) of every chunk kernel."""
    arch = function = None
    for line in text.splitlines():
        if found := ENTRY.search(line):
            arch = found[2]
        elif found := FUNCTION.search(line):
            function = found[1]
        elif (found := SPILLS.search(line)) and (name := KERNEL.match(function)):
            switches = " ".join(f"{what}={value}" for what, value in SWITCH.findall(name[3]))
            switches += " of float16" if "__half" in name[3] else ""
            switches += " of float32" if name[3].endswith("Ef") else ""
            yield name[1], int(name[2]), switches, arch, *map(int, found.groups())


def main(logs):
    seen = {kernel for log in logs for kernel in kernels(Path(log).read_text())}
    there = {(name.partition("_")[0], K, arch) for name, K, _, arch, *_ in seen}
    print(f"{len(seen)} chunk kernels; stack frame, spill stores, spill loads in bytes:")
    for name, K, switches, arch, *bytes_ in sorted(seen):
        print(f"  {arch:7}{name:15} K = {K:3}  {switches:32}", *(f"{n:6}" for n in bytes_))
    missing = [(name, K, arch) for name in ("prepare", "walk") for K in (64, 128)
               for arch in ("sm_80", "sm_90a") if (name, K, arch) not in there]
    if missing:
        return f"not in the logs: {missing}"
    spilling = sum(1 for _, K, switches, *_, stores, loads in seen
                   if K <= 128 and "float32" not in switches and (stores or loads))
    return f"{spilling} chunk kernels spill registers" if spilling else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
