"""The C core as one extension module: every instruction set in it, one abi3 build for 3.11 and up;
and the CUDA part, where nvcc is found.

LINATTN_WERROR=1 turns compiler warnings, nvcc's too, into errors (CI). CC chooses the compiler.
LINATTN_DEBUG=1 keeps debugging information and symbols; CFLAGS says how to optimize.
LINATTN_EMULATE_BF16=1 adds instances that test the text of avx512bf16 and amx on AVX2: never ship
them.
LINATTN_CUDA=1 insists on the CUDA part, =0 leaves it out. nvcc is looked for in CUDA_HOME, on the
PATH, in /usr/local/cuda. LINATTN_CUDA_ARCHS="80+PTX 90a" says for which devices, "all" stands for
those of ARCHS. Without it the build is for this machine's GPUs alone; for all, where it has none.
"""

import fnmatch
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Free-threaded builds have no limited API yet; they get a wheel of their own.
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")

DEBUG = os.environ.get("LINATTN_DEBUG", "") not in ("", "0")

FLAGS = [
    "-std=gnu11",
    # Python's own CFLAGS have -g: it adds five times the code, and names the build's folders.
    # Some compilers have _FORTIFY_SOURCE set. The kernels call nothing that it would check.
    *(["-g"] if DEBUG else ["-g0", "-O3", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]),
    "-fwrapv",  # as Python builds extensions, also where CFLAGS stands for its own flags
    "-ffp-contract=fast",  # a * b + c is one rounding where the machine has it: docs/decisions/0006
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-pthread",
]


def compiler_knows(*flags):
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, "-Werror", *flags, "-c", "-x", "c", "-o", os.devnull, os.devnull]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


# gcc 13 and later leave some sums unfused, those in one register: docs/decisions/0006
if compiler_knows("--param=avoid-fma-max-bits=0"):
    FLAGS.append("--param=avoid-fma-max-bits=0")
if os.environ.get("LINATTN_WERROR") == "1":
    FLAGS.append("-Werror")
if os.environ.get("LINATTN_EMULATE_BF16") == "1":
    FLAGS += ["-DLA_EMULATE_BF16", "-Wno-psabi"]  # no function is called with such a lane


# A function that has written past its own array ends the process. The kernels go without: there
# the guard takes 30 ns of a small step, 1.2 %. Their stores are what make asan and make fuzz test.
GUARD = "-fstack-protector-strong"
KERNELS = ("amx*.c", "avx*.c", "baseline_*.c", "neon_*.c")

# Passes of gcc -O3 that take a tenth of its time and gain the kernels nothing: their loops are
# written out in the order that suits them. Without these passes an op takes 0.97 to 1.01 of its
# time, a scan 0.91: docs/decisions/0038
KERNEL_FLAGS = ["-fno-gcse", "-fno-schedule-insns2", "-fno-tree-pre"]
if DEBUG or not compiler_knows(*KERNEL_FLAGS):
    KERNEL_FLAGS = []


def flags_of(source):
    """The flags of one C file, beside those of all."""
    name = os.path.basename(source)
    if any(fnmatch.fnmatch(name, files) for files in KERNELS):
        return KERNEL_FLAGS
    return [] if DEBUG else [GUARD]


# Options that linkers of ELF know. EXPORTS names the one symbol that is seen outside: CUDA's
# runtime and C++'s templates would add theirs, whatever our visibility is. relro, now: addresses
# of functions are found when the library is loaded, and are not writable after. -s: no symbols for
# debuggers.
EXPORTS = "csrc/exports.map"
LINK_FLAGS = ["-pthread"]
if sys.platform.startswith("linux"):
    LINK_FLAGS += [f"-Wl,--version-script={EXPORTS}", "-Wl,-z,relro,-z,now"]
    LINK_FLAGS += [] if DEBUG else ["-s"]


def without_pythons_rpath(command):
    """Some Pythons link extensions with the path of their own libraries. The core uses none of
    those, and the path is one of the building machine. What the environment asks for stays."""
    names = ("CC", "LDSHARED", "LDFLAGS", "CFLAGS", "CPPFLAGS")
    asked = shlex.split(" ".join(os.environ.get(name, "") for name in names))
    return [word for word in command if not word.startswith("-Wl,-rpath") or word in asked]


# Machine code for Ampere and all that runs its code (8.x), for Hopper, and PTX for later devices.
# A file without a word of Hopper's is read once: Hopper's code comes from Ampere's PTX. The step of
# many states uses Hopper's copy engine on later devices too.
ARCHS = {
    "step_many_*": "80 90+PTX",
    "chunk_*": "80+PTX 90a",
    "*": "80+90+PTX",
}
ASKED_ARCHS = os.environ.get("LINATTN_CUDA_ARCHS", "").split()
HOPPER = "90"
OLDEST = 80


def gpus():
    """The compute capabilities of this machine's GPUs, such as "86", from nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = set(re.findall(r"^(\d+)\.(\d)$", said.stdout, re.MULTILINE))
    return sorted((a + b for a, b in found if int(a + b) >= OLDEST), key=int)


def parts(arch):
    """The architecture that a file is read for, and those that code is made for.

    "80+90+PTX" is read for 80, and makes code for 80 and 90, and PTX. "80:86" is read for 80, and
    makes code for 86.
    """
    read, _, written = arch.rpartition(":")
    return read or written.split("+")[0], written.split("+")


def archs_for(gpu, archs):
    """A file's code for one GPU, read as `archs` has it for this GPU: no result changes a bit."""
    if gpu == HOPPER and "90a" in archs:
        return "90a"
    read = [read for read, _ in map(parts, archs) if read.isdigit() and int(read) <= int(gpu)]
    return f"{max(read, key=int)}:{gpu}" if read else None


def archs_of(source):
    """The architectures of a .cu, a word for each time that nvcc reads it."""
    if ASKED_ARCHS not in ([], ["all"]):
        return ASKED_ARCHS
    name = os.path.basename(source)
    archs = next(archs.split() for files, archs in ARCHS.items() if fnmatch.fnmatch(name, files))
    if not GPUS:
        return archs
    # PTX of Hopper's own instructions: quick to make, and no other GPU runs it
    return list(filter(None, (archs_for(gpu, archs) for gpu in GPUS))) or ["90a:PTX"]


def gencode(arch):
    read, written = parts(arch)
    codes = [f"compute_{read}" if one == "PTX" else f"sm_{one}" for one in written]
    return f"-gencode=arch=compute_{read},code=[{','.join(codes)}]"


NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    # Files are compiled side by side already, one per core; a machine with more cores than files
    # gives each more threads, for its architectures. A thread takes up to a gigabyte.
    f"--threads={max(1, min(3, os.cpu_count() // 4))}",
    "-Xcompiler=-fPIC,-fvisibility=hidden," + ("-g" if DEBUG else f"-g0,{GUARD}"),
]
if os.environ.get("LINATTN_WERROR") == "1":
    NVCC_FLAGS.append("-Werror=all-warnings")


def find_nvcc():
    """Where nvcc is; None if there is none, or the CUDA part is not wanted."""
    wanted = os.environ.get("LINATTN_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"LINATTN_CUDA: expected 0, 1 or nothing, got {wanted!r}")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    places = [os.path.join(home, "bin")] if home else []
    places += [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    found = next((nvcc for place in places if (nvcc := shutil.which("nvcc", path=place))), None)
    if wanted == "1" and not found:
        raise SystemExit(f"LINATTN_CUDA=1 asks for the CUDA part; there is no nvcc in {places}")
    return found


def compression(nvcc):
    """nvcc compresses PTX by itself, and machine code if asked to: a third of the size is left, and
    two thirds of that with compress-mode=size. Only drivers since CUDA 12.4 (550.54) read this
    mode. A build of nvcc 13 needs a later one anyway."""
    says = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.", says)
    newer = release and int(release[1]) >= 13
    return "--compress-mode=size" if newer else "-Xfatbin=-compress-all"


def cuda_libraries(nvcc):
    """Directories with libcudart_static.a: where nvcc itself would look."""
    says = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True).stderr
    line = re.search(r"^#\$ LIBRARIES=(.*)$", says, re.MULTILINE)
    named = [word[2:] for word in shlex.split(line[1]) if word.startswith("-L")] if line else []
    # NVIDIA's wheels have it in lib, and an nvcc that says lib64
    places = [place for name in named for place in (name, re.sub("lib64(?=$|/)", "lib", name))]
    return [place for place in dict.fromkeys(map(os.path.normpath, places)) if os.path.isdir(place)]


def knows(nvcc, gpu):
    """Has this nvcc machine code for a GPU? One that is newer than nvcc runs the PTX of ARCHS."""
    says = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    return f"sm_{gpu}" in says.split()


def tell(text):
    """Write to the log, and to the terminal: pip shows a build's log with -v only."""
    print(text, file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        return
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return
    with open(terminal, "w") as screen:
        if os.tcgetpgrp(terminal) == os.getpgrp():  # a terminal may stop a job in the background
            screen.write(f"\n{text}\n")


def machine_codes(source):
    """The architectures of a .cu that ptxas makes machine code for."""
    return [code for arch in archs_of(source) for code in parts(arch)[1] if code != "PTX"]


def kinds_of(sources):
    """The architectures of all machine code, as users read them: "sm_80, sm_90"."""
    return ", ".join(sorted({f"sm_{code}" for one in sources for code in machine_codes(one)}))


def seconds_of(source):
    """The processor time of a file, roughly."""
    if source.endswith(".cu"):
        return 16 * max(1, len(machine_codes(source)))  # the 80 codes of ARCHS take 21 minutes
    kernels = {"*_f[36][24].c": 14, "*/amx*.c": 6, "*/avx512_bf16.c": 6}
    return next((n for files, n in kernels.items() if fnmatch.fnmatch(source, files)), 1)


def announce(sources):
    """Say for which GPUs nvcc compiles, how long that takes, and how to have less of it."""
    cores = min(os.cpu_count() or 1, len(sources))
    minutes = max(1, round(sum(map(seconds_of, sources)) / 60 / cores))
    whose, less = ("", "90a builds for one kind of GPU")
    if GPUS:
        whose, less = ("this machine's GPU alone: ", "all builds for every kind")
    text = (
        f"linattn: nvcc compiles {len(sources)} files for {whose}{kinds_of(sources)}. "
        f"This takes about {minutes} min on {cores} cores.\n"
        f"linattn: LINATTN_CUDA=0 leaves the CUDA part out, LINATTN_CUDA_ARCHS={less}."
    )
    if os.environ.get("LINATTN_CUDA"):
        print(text, file=sys.stderr, flush=True)
    else:
        tell(text)


class ParallelBuild(build_ext):
    """Compile the sources side by side: each instruction set takes seconds. nvcc takes the .cu."""

    def settings(self, name, *values):
        """A file that is newer than what was built with other settings than these."""
        path = os.path.join(self.build_temp, f"settings-{name}")
        if not os.path.exists(path) or Path(path).read_text() != repr(values):
            os.makedirs(self.build_temp, exist_ok=True)
            Path(path).write_text(repr(values))
        return path

    def build_extension(self, ext):
        compile_one, threads = self.compiler.compile, os.cpu_count()

        def compile_any(source, options):
            cuda = source.endswith(".cu")
            (target,) = self.compiler.object_filenames([source], output_dir=options["output_dir"])
            if not is_stale(source, target):
                return [target]
            if not cuda:
                flags = [*options["extra_postargs"], *flags_of(source)]
                return compile_one([source], **options | {"extra_postargs": flags})
            os.makedirs(os.path.dirname(target), exist_ok=True)
            codes = map(gencode, archs_of(source))
            self.spawn([NVCC, *NVCC_FLAGS, *codes, "-c", source, "-o", target])
            return [target]

        def is_stale(source, target):
            cuda = source.endswith(".cu")
            needs = [source, *(CUDA_HEADERS if cuda else C_HEADERS), *settings[cuda]]
            newest = max(map(os.path.getmtime, needs))
            return self.force or not os.path.exists(target) or os.path.getmtime(target) <= newest

        def compile_all(sources, **options):
            targets = self.compiler.object_filenames(sources, output_dir=options["output_dir"])
            stale = [
                source
                for source, target in zip(sources, targets, strict=True)
                if source.endswith(".cu") and is_stale(source, target)
            ]
            if stale:
                announce(stale)
            order = sorted(sources, key=seconds_of, reverse=True)
            with ThreadPoolExecutor(threads) as pool:
                objects = pool.map(lambda source: compile_any(source, options), order)
                return [one for group in objects for one in group]

        environment = [os.environ.get(name) for name in ("CC", "CFLAGS")]
        settings = [
            [self.settings("cc", CUDA_ARCHS, FLAGS, GUARD, KERNELS, KERNEL_FLAGS, *environment)],
            [self.settings("nvcc", NVCC, NVCC_FLAGS, [*map(archs_of, CUDA_SOURCES)])],
        ]
        self.compiler.linker_so = without_pythons_rpath(self.compiler.linker_so)
        linked = self.settings("ld", self.compiler.linker_so, LINK_FLAGS)
        ext.depends.extend([*settings[0], *settings[1], linked, EXPORTS])
        if ".cu" not in self.compiler.src_extensions:
            self.compiler.src_extensions.append(".cu")
        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_one


NVCC = find_nvcc()
if NVCC:
    NVCC_FLAGS.append(compression(NVCC))
CUDA_SOURCES = sorted(glob.glob("csrc/cuda/*.cu")) if NVCC else []
GPUS = [] if ASKED_ARCHS or not NVCC else gpus()
if not all(knows(NVCC, gpu) for gpu in GPUS):
    GPUS = []
CUDA_ARCHS = kinds_of(CUDA_SOURCES)  # show_config prints it


def headers(*places):
    names = (f"{place}/*.{kind}" for place in places for kind in ("h", "def", "cuh"))
    return [path for name in names for path in glob.glob(name)]


# The headers that a .cu and a .c can include. nvcc does not run after a change in csrc/cpu.
CUDA_HEADERS = headers("csrc", "csrc/cuda")
C_HEADERS = [path for path in headers("csrc", "csrc/cpu", "csrc/cuda") if not path.endswith(".cuh")]

core = Extension(
    "linattn._linattn",
    sources=[*sorted(glob.glob("csrc/*.c")), *sorted(glob.glob("csrc/cpu/*.c")), *CUDA_SOURCES],
    depends=headers("csrc", "csrc/cpu", "csrc/cuda"),
    include_dirs=[numpy.get_include()],
    define_macros=[
        *([("Py_LIMITED_API", "0x030b0000")] if ABI3 else []),
        *([("LA_WITH_CUDA", "1"), ("LA_CUDA_ARCHS", f'"{CUDA_ARCHS}"')] if NVCC else []),
    ],
    extra_compile_args=FLAGS,
    # The CUDA runtime goes in whole: when first used it finds the driver, or says there is none.
    library_dirs=cuda_libraries(NVCC) if NVCC else [],
    libraries=[*(["cudart_static", "rt", "dl", "stdc++"] if NVCC else []), "m"],
    extra_link_args=LINK_FLAGS,
    py_limited_api=ABI3,
)

setup(
    ext_modules=[core],
    cmdclass={"build_ext": ParallelBuild},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 else {},
)
