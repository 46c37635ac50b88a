"""mypy --strict on the code cells of the notebooks: `make lint` runs it; arguments go to mypy.

The cells of a notebook, one after another, are a module. Packages that the environment of the
linters lacks are Any there (PyTorch, matplotlib). A message names the cell and the line in it.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))
LACKING = [f"--disable-error-code={code}" for code in ("import-not-found", "import-untyped")]


def code_lines(notebook: Path) -> list[tuple[str, str]]:
    """Every line of code, and the place that a message about it names."""
    lines = []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]).splitlines()
            where = f"{notebook.name}: {cell['id']}, line"
            lines += [(line, f"{where} {n}") for n, line in enumerate(code, 1)]
    return lines


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        places = {}
        for notebook in NOTEBOOKS:
            lines = code_lines(notebook)
            module = Path(folder, notebook.stem.replace("-", "_") + ".py")
            module.write_text("".join(f"{line}\n" for line, _ in lines))
            places[module.name] = [place for _, place in lines]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "mypy", *arguments, *LACKING, *places],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    for message in done.stdout.splitlines():
        if found := re.match(r"(\w+\.py):(\d+):", message):
            message = places[found[1]][int(found[2]) - 1] + message[found.end() - 1 :]
        print(message)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
