"""Links of pages to files outside of docs/: to those that are pages of the site too as such, to all
others as downloads.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def read(app: Any, page: str, source: list[str]) -> None:
    folder = Path(app.env.doc2path(page)).parent

    def link(found: re.Match[str]) -> str:
        path = (folder / found["path"]).resolve()
        if path.is_relative_to(app.srcdir) or not path.is_relative_to(REPO):
            return found[0]
        if page_of := PAGES.get(path.relative_to(REPO).as_posix()):
            return f"]({os.path.relpath(app.srcdir / page_of, folder)}{found['anchor'] or ''})"
        return f"](path:{found['path']})"

    source[0] = LINK.sub(link, source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
