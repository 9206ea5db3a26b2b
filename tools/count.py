"""How large the tree is, whatever its width: statements, without docstrings and comments.

    python tools/count.py [FOLDER ...]  # default: fusion_moe translators tests benchmarks tools

One line for each folder, and for each of fusion_moe's. The core is all of fusion_moe but the
folders BESIDE. A statement of Python is one of its syntax tree; one of C++ is a ";" or a "{". Last
the words of pages that are written by hand, with their code and tables.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

FOLDERS = "fusion_moe", "translators", "tests", "benchmarks", "tools"
# not the core
BESIDE = "integrations", "offload", "checkpoints", "training", "lora", "recorder", "cli"
CXX = {".h", ".cuh", ".cpp", ".cu", ".c"}
_NOT_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)


def of_python(text: str) -> int:
    """Statements of a module, but no docstrings and other statements that are only a constant."""
    statements = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
    return sum(
        not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in statements
    )


def of_cxx(text: str) -> int:
    """Statements and blocks of a file of C++."""
    code = _NOT_CODE.sub("", text)
    return code.count(";") + code.count("{")


def counted(files: Iterator[Path]) -> tuple[int, int, int]:
    """Files, and their statements of Python and of C++."""
    found, python, cxx = 0, 0, 0
    for path in files:
        if path.suffix in CXX or path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            found += 1
            python += of_python(text) if path.suffix == ".py" else 0
            cxx += of_cxx(text) if path.suffix in CXX else 0
    return found, python, cxx


def parts(root: Path) -> Iterator[tuple[str, Iterator[Path]]]:
    """The rows of fusion_moe: the core and each of its folders, then what lies beside it."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and path.name[0] != "_"]
    core = [path for path in folders if path.name not in BESIDE]
    yield "  core", chain(root.glob("*.py"), *(path.rglob("*") for path in core))
    yield from ((f"    {path.name}", path.rglob("*")) for path in core)
    yield "    *.py", root.glob("*.py")
    for name in BESIDE:
        yield f"  {name}", (root / name).rglob("*")
        if name == "integrations":
            inside = [path for path in sorted((root / name).iterdir()) if path.name[0] != "_"]
            yield from ((f"    {path.stem}", _below(path)) for path in inside)


def _below(path: Path) -> Iterator[Path]:
    return path.rglob("*") if path.is_dir() else iter((path,))


def main(folders: list[str]) -> None:
    """Prints the table."""
    roots = [Path(name) for name in folders or FOLDERS]
    rows = [(str(root), root.rglob("*")) for root in roots]
    for root in roots:
        if root.name == "fusion_moe":
            rows += parts(root)
    print(f"{'':32}{'files':>8}{'Python':>10}{'C++':>10}{'both':>10}")
    for name, files in rows:
        n, python, cxx = counted(files)
        print(f"{name:32}{n:>8}{python:>10}{cxx:>10}{python + cxx:>10}")
    pages = [Path("README.md"), Path("CONTRIBUTING.md"), *Path("docs").rglob("*.md")]
    written = [p for p in pages if "reference" not in p.parts and p.name != "changelog.md"]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in written)
    print(f"pages that are written by hand: {len(written)}, {words} words")
    print(f"the core: fusion_moe without {', '.join(BESIDE)}")


if __name__ == "__main__":
    main(sys.argv[1:])
