"""What workers write and who started them reads: lines of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass
class Journal:
    """A file of lines, each written at once: after a crash the last one says where it was."""

    path: Path

    def note(self, **what: Any) -> None:
        """One line."""
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")


def lines(file: TextIO) -> Iterator[dict[str, Any]]:
    """The lines that were written since the last one was read."""
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return
        yield json.loads(line)


def kind(wrong: str) -> str:
    """What is wrong without its numbers and names: two cases of one kind show one fault."""
    return re.sub(r"\b[a-z_]*\d+\b|\d+|\[[^\]]*\]", "#", wrong.splitlines()[0] if wrong else "")[
        :110
    ]
