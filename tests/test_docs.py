"""A page of the documentation is true: its Python blocks, run as the one file that they are, print the text blocks below them.

Blocks below `<!-- needs: thunder -->` or `<!-- needs: nvfuser -->` run where these are installed, those below `<!-- needs: checkpoint -->`
nowhere. `pytest --update-golden` writes what is
printed into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = [("translators.md", "geglu.py"), ("training.md", "training.py"), ("checkpoints.md", "checkpoints.py")]
DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"(?:<!-- needs: (?P<needs>\w+) -->\n)?```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?", re.DOTALL)
END = "\f\n"  # printed after each block, from the empty line between two


def printed(blocks: list[re.Match[str]], can_run: set[str | None], file: Path) -> list[str]:
    """What each block prints. Of blocks that cannot run there are only the lines, so that all others stand where the reader has them."""
    parts = [b["code"] if b["needs"] in can_run else "\n" * b["code"].count("\n") for b in blocks]
    file.write_text(f"print({END!r}, end='')\n".join(parts), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, file], cwd=file.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(END)


def as_printed(block: re.Match[str], out: str) -> str:
    """A block of the page, with what it prints below it."""
    if block["shown"] is None:
        assert out == "", f"the page does not show what this prints:\n{block['code']}"
        return block[0]
    return block.string[block.start() : block.start("shown")] + out + block.string[block.end("shown") : block.end()]


@pytest.mark.parametrize("have", [(), pytest.param(("thunder", "nvfuser"), marks=[pytest.mark.thunder, pytest.mark.nvfuser])], ids=str)
@pytest.mark.parametrize(("page", "file"), PAGES)
def test_blocks_print_what_the_page_shows(page, file, have, tmp_path, request):
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks, can_run = list(BLOCK.finditer(text)), {None, *have}
    assert (text.count("```python"), text.count("```text")) == (len(blocks), sum(b["shown"] is not None for b in blocks))
    now = text
    for block, out in reversed(list(zip(blocks, printed(blocks, can_run, tmp_path / file), strict=True))):
        if block["needs"] in can_run:
            now = now[: block.start()] + as_printed(block, out) + now[block.end() :]
    if request.config.getoption("--update-golden"):
        (DOCS / page).write_text(now, encoding="utf-8")
    else:
        assert now.splitlines() == text.splitlines(), "if what is printed is right: pytest --update-golden"
