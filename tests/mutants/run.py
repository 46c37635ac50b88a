"""Plant each mistake of patches.toml and see whether the tests catch it.

    python tests/mutants/run.py [--place DIRECTORY] [--jobs COUNT] [part of a name ...]

It works in a copy of the checkout: a temporary one, or the one in DIRECTORY, which stays for the
next run. The copy is built without CUDA and must pass first. Then the patches are planted one at a
time, and the tests that a patch names must fail. A run of all patches writes docs/mutants.md. With
several jobs each has a copy of the copy, and plants patches in its own.

To be quick it compiles with -O1, and a patch in a header goes into the float32 instance of one
instruction set only: the tests run on that one.
"""

import argparse
import datetime
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = ROOT / "docs" / "mutants.md"
SETS = ("avx2", "neon", "baseline")  # the first that runs here is tested
MOST_SECONDS = 300  # of one patch's tests; they take a few

# The files that a build or an editor leaves behind, in any folder.
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)


def patches():
    """The patches, as dictionaries, in the file's order."""
    return tomllib.loads((HERE / "patches.toml").read_text())["patch"]


def applies(patch, text):
    return text.count(patch["old"]) == 1


class Copy:
    """A copy of the checkout, built and tested."""

    def __init__(self, place):
        self.place = place
        self.mark = place / "planted"  # left behind: objects that nothing is known of
        if self.mark.exists():
            shutil.rmtree(place / "build")
            self.mark.unlink()
        for library in place.glob("**/*.so"):
            library.unlink()
        shutil.copytree(ROOT, place, ignore=NOT_COPIED, dirs_exist_ok=True)
        compiler = place / "cc-quick"
        compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -O1\n')
        compiler.chmod(0o755)
        self.environment = os.environ | {
            "LINATTN_CUDA": "0",
            "CC": str(compiler),
            "PYTHONPATH": str(place),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in ("LINATTN_WERROR", "LINATTN_ISA", "PYTHONSAFEPATH"):
            self.environment.pop(name, None)

    def at(self, place):
        """A copy of this one, built like it."""
        shutil.copytree(self.place, place, copy_function=shutil.copy2)
        other = Copy.__new__(Copy)
        other.place, other.mark = place, place / self.mark.name
        other.environment = {
            name: value.replace(str(self.place), str(place))
            for name, value in self.environment.items()
        }
        return other

    def run(self, command, seconds=None):
        """(its exit status, its output); None is the status of a command that hangs."""
        try:
            done = subprocess.run(
                command,
                cwd=self.place,
                env=self.environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as error:
            return None, str(error)
        return done.returncode, done.stdout

    def build(self):
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        status, output = self.run(command)
        if status:
            raise SystemExit(f"the build failed\n{output[-4000:]}")

    def choose_instruction_set(self):
        script = (
            "from linattn import _linattn\n"
            "print(*(name for name, here in _linattn.isa()[1].items() if here))"
        )
        status, output = self.run([sys.executable, "-c", script])
        if status:
            raise SystemExit(f"the copy cannot be imported\n{output[-4000:]}")
        isa = next(name for name in SETS if name in output.split())
        self.environment["LINATTN_ISA"] = isa
        return isa

    def objects(self):
        return [*self.place.glob("build/temp*/csrc/**/*.o")]

    def object_of(self, file):
        """The only object that is made again for a patch in the file."""
        name = Path(file).with_suffix(".o")
        if file.endswith(".h"):
            name = Path(f"csrc/cpu/{self.environment['LINATTN_ISA']}_f32.o")
        return next(self.place.glob(f"build/temp*/{name}"))

    def test(self, tests):
        """None if they pass, else the test that fails first, without its parameters."""
        words = shlex.split(tests)
        if words[0] != "make":
            words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
        status, output = self.run(words, MOST_SECONDS)
        if status is None:
            return "hangs"
        if status == 0:
            return None
        failed = re.search(r"^(?:FAILED|ERROR) \S*?(test_[^\s[]+)", output, re.MULTILINE)
        if failed:
            return failed[1]
        if words[0] == "make":
            return " ".join(words[3:])
        if status < 0 or "Fatal Python error" in output:
            return f"crash: {shlex.split(tests)[0]}"
        raise SystemExit(f"{tests}: pytest ended with {status}\n{output[-4000:]}")

    def plant(self, patch):
        """What fails first with the patch. Sources and objects are then as they were."""
        source = self.place / patch["file"]
        if source.suffix == ".py":
            return self.plant_python(patch, source)
        right, target = source.read_text(), self.object_of(patch["file"])
        kept = target.with_suffix(".kept")
        times = {one: one.stat().st_mtime for one in self.objects()}
        self.mark.touch()
        shutil.copy2(target, kept)
        source.write_text(right.replace(patch["old"], patch["new"]))
        for one in times:
            os.utime(one, (time.time() + 1,) * 2)  # newer than the patch
        target.unlink()
        self.build()
        failed = self.test(patch["tests"])
        source.write_text(right)
        kept.replace(target)
        for one, at in times.items():
            os.utime(one, (at, at))
        self.mark.unlink()
        return failed

    def plant_python(self, patch, source):
        """As `plant`, of a file that nothing is built from."""
        right = source.read_text()
        try:
            source.write_text(right.replace(patch["old"], patch["new"]))
            return self.test(patch["tests"])
        finally:
            source.write_text(right)


def chosen(names):
    return [one for one in patches() if not names or any(name in one["name"] for name in names)]


def table(rows, isa):
    commit = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], text=True, capture_output=True
    ).stdout.strip()
    caught = sum(1 for row in rows if row[2] == "caught")
    lines = [
        "# Planted mistakes",
        "",
        "`make mutants` plants small mistakes in the C core, one at a time. It runs the tests that",
        "must catch each of them, and writes this page. The mistakes are in",
        "[tests/mutants/patches.toml](../tests/mutants/patches.toml).",
        "",
        f"{datetime.date.today()}, commit {commit or 'unknown'}, on {isa}: "
        f"{caught} of {len(rows)} caught.",
        "",
        "| mistake | file | | seconds | first failing test |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | `{file}` | {what} | {seconds:.0f} | {escaped(first)} |"
        for name, file, what, seconds, first in rows
    ]
    return "\n".join(lines) + "\n"


def escaped(test):
    return f"`{test}`".replace("|", "\\|") if test else ""


def planted(copy, patch):
    """The patch's row of the table, printed when it is there."""
    start, first = time.monotonic(), ""
    if not applies(patch, (copy.place / patch["file"]).read_text()):
        what = "does not apply"
    else:
        first = copy.plant(patch) or ""
        what = "caught" if first else "survived"
    row = (patch["name"], patch["file"], what, time.monotonic() - start, first)
    print(f"{what:9} {row[3]:4.0f} s  {row[0]}  {first}", flush=True)
    return row


def spread(copies, work, items):
    """[work(a copy, item)] in the order of the items; a copy has one item at a time."""
    idle = queue.SimpleQueue()
    for copy in copies:
        idle.put(copy)

    def done(item):
        copy = idle.get()
        try:
            return work(copy, item)
        finally:
            idle.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(done, items))


def check_baseline(copies, some):
    every = sorted({patch["tests"] for patch in some})
    for tests, failed in zip(every, spread(copies, Copy.test, every), strict=True):
        if failed:
            raise SystemExit(f"without a patch, {tests} fails: {failed}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names of patches; without any: all")
    parser.add_argument("--place", type=Path, help="a directory for the copy, which stays there")
    parser.add_argument("--jobs", type=int, default=1, help="how many patches at once")
    options = parser.parse_args()
    some = chosen(options.names)
    if not some:
        parser.error("there is no such patch")
    with tempfile.TemporaryDirectory() as temporary:
        copy = Copy((options.place or Path(temporary) / "job0").resolve())
        copy.build()
        isa = copy.choose_instruction_set()
        print(f"{len(some)} patches on {isa}, in {copy.place}; first without any", flush=True)
        more = [Path(temporary) / f"job{i}" for i in range(1, options.jobs)]
        copies = [copy, *(copy.at(place) for place in more)]
        check_baseline(copies, some)
        rows = spread(copies, planted, some)
    if not options.names:
        TABLE.write_text(table(rows, isa))
    return 0 if all(row[2] == "caught" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
