"""docs/glossary.md says which words the code has; others it does not use."""

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
CXX = {".h", ".cuh", ".cpp", ".cu"}


@cache
def identifiers() -> frozenset[str]:
    """All names in the library's Python and C++, and those of its folders."""
    names = set[str]()
    for folder in (ROOT / "fusion_moe", ROOT / "translators"):
        for path in folder.rglob("*"):
            if path.suffix == ".py":
                lines = io.StringIO(path.read_text(encoding="utf-8")).readline
                names |= {t.string for t in tokenize.generate_tokens(lines) if t.type == 1}
            elif path.suffix in CXX:
                code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
                names |= set(re.findall(r"[A-Za-z_]\w*", code))
            elif path.is_dir():
                names.add(path.name)
    return frozenset(names)


def rows() -> list[tuple[str, str]]:
    """The word and the last column of each row."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return [(row[0], row[-1]) for row in cells if row[0] != "word"]


def test_each_word_is_in_the_code():
    assert len(rows()) > 40
    for word, where in rows():
        names = re.findall(r"`(\w+)`", where)
        assert names, word
        assert set(names) <= identifiers(), (word, set(names) - identifiers())


def test_each_word_stands_once():
    words = [word for row, _ in rows() for word in row.split(", ")]
    assert len(words) == len(set(words))


def test_words_that_are_not_used():
    words = "door doors fuel burn twin twins tier tiers mailbox desk letters in_turns turn_back"
    words += " fold folded foldable folding"
    assert identifiers().isdisjoint(words.split())
