#!/usr/bin/env python3
"""Do all links within a built site lead somewhere? python docs/check_links.py build/docs"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.ids.add(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


def broken(site: Path) -> list[str]:
    site = site.resolve()
    static = site / "_static"  # the theme's own: templates, not pages
    paths = [path for path in sorted(site.rglob("*.html")) if not path.is_relative_to(static)]
    pages = {path: Page(path) for path in paths}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not place.is_file() or not place.is_relative_to(site):
                found.append(f"{path.relative_to(site)}: no file {link}")
            elif anchor and place in pages and anchor not in pages[place].ids:
                found.append(f"{path.relative_to(site)}: no anchor {link}")
    if not pages:
        found.append(f"{site}: no pages")
    return found


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]))
    print("\n".join(found) or "all links within the site lead somewhere")
    sys.exit(bool(found))
