"""Pages that an extension writes: a heading, and a file that keeps its date if it is the same."""

from pathlib import Path


def heading(title: str, under: str = "=") -> str:
    return f"{title}\n{under * len(title)}\n"


def write_if_changed(path: Path, text: str) -> None:
    """Sphinx reads a page again if its file is newer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
