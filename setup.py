"""The C core as one extension module: every instruction set in it, one abi3 build for 3.11 and up.

LINATTN_WERROR=1 turns compiler warnings into errors (CI). CC chooses the compiler.
"""

import glob
import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Free-threaded builds have no limited API yet; they get a wheel of their own.
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")

FLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=fast",  # a * b + c is one rounding where the machine has it: docs/decisions/0006
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-pthread",
]
if os.environ.get("LINATTN_WERROR") == "1":
    FLAGS.append("-Werror")


class ParallelBuild(build_ext):
    """Compile the sources side by side: each instruction set takes seconds."""

    def build_extension(self, ext):
        compile_one = self.compiler.compile

        def compile_all(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_one([source], **options), sources)
                return [one for group in objects for one in group]

        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_one


core = Extension(
    "linattn._linattn",
    sources=sorted(glob.glob("csrc/*.c") + glob.glob("csrc/cpu/*.c")),
    depends=[*glob.glob("csrc/*.h"), *glob.glob("csrc/*.def"), *glob.glob("csrc/cpu/*.h")],
    include_dirs=[numpy.get_include()],
    define_macros=[("Py_LIMITED_API", "0x030b0000")] if ABI3 else [],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    py_limited_api=ABI3,
)

setup(
    ext_modules=[core],
    cmdclass={"build_ext": ParallelBuild},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 else {},
)
