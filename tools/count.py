"""How large the tree is, whatever its width: statements, without docstrings and comments.

    python tools/count.py [FOLDER ...]  # default: fusion_moe translators tests benchmarks tools

One line for each folder, and for each of fusion_moe's. A statement of Python is one of its syntax
tree; one of C++ is a ";" or a "{".
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = "fusion_moe", "translators", "tests", "benchmarks", "tools"
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


def main(folders: list[str]) -> None:
    """Prints the table."""
    roots = [Path(name) for name in folders or FOLDERS]
    rows = [(str(root), root.rglob("*")) for root in roots]
    for root in roots:
        if root.name == "fusion_moe":
            rows += [
                (str(part), part.rglob("*"))
                for part in sorted(root.iterdir())
                if part.is_dir() and part.name != "__pycache__"
            ]
            rows += [(f"{root}/*.py", root.glob("*.py"))]
    print(f"{'':32}{'files':>8}{'Python':>10}{'C++':>10}")
    for name, files in rows:
        print(
            f"{name:32}"
            + "".join(f"{n:>{width}}" for n, width in zip(counted(files), (8, 10, 10), strict=True))
        )


if __name__ == "__main__":
    main(sys.argv[1:])
