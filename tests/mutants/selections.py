"""How many tests are selected by arguments of pytest, in one collection for all of them.

    python tests/mutants/selections.py 'tests/test_pool.py -k two_rows' ...

The last line that it prints is the list of the numbers, in JSON. An argument has files and perhaps
-k. The number is null where all of its files skip themselves, because a library is not there.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def parsed(tests):
    """The files of a selection, and its -k."""
    parser = argparse.ArgumentParser(prog=tests, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=lambda name: ROOT / name)
    parser.add_argument("-k", default="")
    words = parser.parse_args(shlex.split(tests))
    return words.files, words.k


class Selections:
    """A plugin of pytest that lets pytest's own -k choose among the tests of each selection."""

    def __init__(self, selections):
        self.selections = selections
        self.numbers = []
        self.skipped = set()

    def pytest_collectreport(self, report):
        if report.skipped:
            self.skipped.add(ROOT / report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        of_keywords = config.pluginmanager.get_plugin("mark")
        for files, config.option.keyword in self.selections:
            chosen = [item for item in items if item.path in files]
            of_keywords.pytest_collection_modifyitems(chosen, config)
            self.numbers.append(None if self.skipped.issuperset(files) else len(chosen))
        config.option.keyword = ""


def main():
    plugin = Selections([parsed(tests) for tests in sys.argv[1:]])
    files = sorted({str(file) for files, _ in plugin.selections for file in files})
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-W", "ignore"]
    status = pytest.main([*options, *files], [plugin])
    if status:
        return status
    print(json.dumps(plugin.numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
