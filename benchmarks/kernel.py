"""One op at one shape on the current GPU: its time, cycles of a chunk, its kernels' registers."""

import re
import shutil
import subprocess
from collections import Counter

import torch

from linattn import VARIANTS, _linattn

from . import report
from .base import CHUNK, Case
from .cuda import measure
from .inputs import torch_inputs
from .peers_cuda import OURS
from .report import lines, ms, text, us
from .timing import Gpu, described

RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def case_of(op, words):
    """A case by the words that name it: B1 T8192 H16/64 K256 float16 step."""
    if op not in VARIANTS:
        raise ValueError(f"{op}: no op; {', '.join(VARIANTS)}")
    sizes, more = {"B": 1, "T": 8192, "H": 96, "HV": None, "D": 128}, {"dtype": "bfloat16"}
    for word in words:
        if found := re.fullmatch(r"H(\d+)/(\d+)", word):
            sizes["H"], sizes["HV"] = map(int, found.groups())
        elif found := re.fullmatch(r"([BTHK])(\d+)", word):
            sizes[found[1].replace("K", "D")] = int(found[2])
        elif word in ("bfloat16", "float16", "tf32"):
            more["dtype"] = word
        elif word == "step":
            more["pass_"], sizes["T"] = "step", 1
        else:
            raise ValueError(f"{word}: expected B1, T8192, H96, H16/64, K256, a dtype or step")
    sizes["HV"] = sizes["HV"] or sizes["H"]
    return Case(op, **sizes, **more)


def cycles(case, seconds, hertz, multiprocessors):
    """(cycles of one multiprocessor for a chunk of a value head, were the heads spread evenly;
    cycles from one chunk of a sequence to the next)."""
    chunks = -(-case.T // CHUNK)
    total = seconds * hertz
    return total * multiprocessors / (case.B * case.HV * chunks), total / chunks


def usage(dump):
    """(architecture, mangled name) -> (registers, bytes of stack, of shared memory) by a dump of
    cuobjdump."""
    found = {}
    for part in dump.split("Fatbin elf code:")[1:]:
        arch = re.search(r"arch = (\S+)", part)
        for name, *numbers in RESOURCES.findall(part):
            found[arch[1], name] = tuple(map(int, numbers))
    return found


def compiled():
    """({(architecture, name as the profiler has it): usage}, "" or why there are none)."""
    tools = [tool for tool in ("cuobjdump", "c++filt") if not shutil.which(tool)]
    if tools:
        return {}, f"no registers and spills: {' and '.join(tools)} not on PATH"
    try:
        dump = subprocess.run(
            ["cuobjdump", "--dump-resource-usage", _linattn.__file__],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found = usage(dump)
        names = subprocess.run(
            ["c++filt"],
            input="\n".join(name for _, name in found),
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        return {}, f"no registers and spills: {described(error)}"
    return {
        (arch, name): numbers
        for (arch, _), name, numbers in zip(found, names, found.values(), strict=True)
    }, ""


def launched(call):
    """Name -> (launches, microseconds of all) of the kernels of one call."""
    with torch.profiler.profile() as profile:
        call()
        torch.cuda.synchronize()
    count, took = Counter(), Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count[event.name] += 1
            took[event.name] += event.time_range.elapsed_us()
    return {name: (count[name], took[name]) for name in count}


def kernels(case):
    """The lines of a table of the kernels of one call, with a remark."""
    call = OURS.make(case, torch_inputs(case, "cuda", 0))
    call()
    found, why = compiled()
    major, minor = torch.cuda.get_device_capability()
    # the code for this device's own features comes before that for all of its generation
    archs = [f"sm_{major}{minor}a", f"sm_{major}{minor}", f"sm_{major}0"]
    try:
        ran = launched(call)
    except Exception as error:  # the driver may refuse its counters to this user
        return [f"no kernels, registers and spills: {described(error)}"]
    rows = []
    for name, (count, took) in ran.items():
        numbers = next((found[arch, name] for arch in archs if (arch, name) in found), ["-"] * 3)
        rows.append([name, count, f"{took:.1f}", *numbers])
    return [
        *lines(["kernel", "launches", "us", "registers", "stack", "shared"], rows),
        why
        or "stack: bytes a thread, spilled registers among them; -: compiled by the driver "
        "from PTX, or not ours",
        "",
    ]


def run(given):
    if not torch.cuda.is_available():
        return "kernel: PyTorch finds no GPU, and a kernel is timed on one"
    try:
        case = case_of(given.op, given.shape)
    except ValueError as error:
        return f"kernel: {error}"
    with torch.inference_mode():
        (result,) = measure(case, [OURS], Gpu(), given.rounds or 30, seed=0)
        if result.error:
            return f"{case}: {result.error}"
        table = kernels(case)
    unit = us if case.pass_ == "step" else ms
    print(f"# {case}, {report.gpu()[1]}\n")
    print(
        "\n".join(
            lines(
                [unit.__name__, "median", "least"],
                [
                    [kind, unit(result.median(kind)), unit(result.least(kind))]
                    for kind in result.seconds
                    if kind != "first"
                ],
            )
        )
    )
    clock, multi = report.smi("clocks.max.sm"), torch.cuda.get_device_properties(0)
    if not clock.isdigit():
        print(f"no cycles: the clock rate is {clock}\n")
    elif case.pass_ != "step":
        each, chain = cycles(
            case, result.median("graph"), int(clock) * 1e6, multi.multi_processor_count
        )
        print(
            f"cycles at {clock} MHz, the highest clock rate: {text(each, ',.0f')} of one "
            f"multiprocessor for a chunk of {CHUNK} tokens and a value head; "
            f"{text(chain, ',.0f')} from one chunk of a sequence to the next\n"
        )
    print("\n".join(table))
    if result.note:
        print(result.note)
    return 0
