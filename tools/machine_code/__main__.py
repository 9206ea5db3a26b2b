"""Compares the machine code of all kernels before and after a change: CUDA's as cubins, the CPU's
as libraries. Needs no GPU.

    python tools/machine_code HEAD~1 .                      # a git revision or a folder; "." is the
                                                            tree as it is
    python tools/machine_code main . --cuda --only large    # kernels whose label matches a regular
                                                            expression
    python tools/machine_code main . --write /tmp/code      # then: diff -r /tmp/code/before
                                                            /tmp/code/after

Each tree compiles its kernels itself, in a process and with a cache of its own (kernels.py says
which). Their code is compared without addresses and names (disassembly.py). A kernel that has
another label, but whose code was there before, is renamed, which is no difference. Exits with 1 if
kernels differ, are missing or are new.

--keep FOLDER keeps what a revision compiled, for the next comparison with it. Needs what `make
test` installs, and objdump.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from disassembly import Code, of_cubin, of_library

HERE = Path(__file__).parent
NAMES = ("before", "after")
SOURCES = ("fusion_moe", "translators")
# libraries that were built before the change
NEVER = shutil.ignore_patterns("shipped", "__pycache__", "*.so")


@dataclass(frozen=True)
class Row:
    """What became of a kernel; instructions: before and after, None where there is no such
    kernel.
    """

    label: str
    verdict: str
    instructions: tuple[int | None, int | None]

    @property
    def same(self) -> bool:
        return self.verdict == "same"


def main() -> int:
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="machine_code-") as scratch:
        folders = [Path(scratch, name) for name in NAMES]
        trees = list(map(_export, (asked.before, asked.after), folders))
        caches = [
            _cache(tree, asked.keep, folder)
            for tree, folder in zip((asked.before, asked.after), folders, strict=True)
        ]
        with ThreadPoolExecutor(2) as pool:
            before, after = pool.map(lambda tree, cache: _codes(tree, cache, asked), trees, caches)
    if asked.write:
        for name, codes in zip(NAMES, (before, after), strict=True):
            _write(codes, asked.write / name)
    rows = sorted(_compare(before, after), key=lambda row: row.label)
    for row in rows:
        if asked.all or not row.same:
            print(
                f"{row.verdict:8} "
                f"{' -> '.join('none' if n is None else str(n) for n in row.instructions):>16} "
                f"instructions   {row.label}"
            )
    different = sum(not row.same for row in rows)
    print(
        f"{len(rows)} kernels, {sum(row.instructions[1] or 0 for row in rows)} instructions: "
        f"{different or 'none'} different"
    )
    return 1 if different or not rows else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="machine_code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", help="a git revision, or a folder")
    parser.add_argument("after", help="a git revision, or a folder")
    parser.add_argument("--cuda", action="store_true", help="the CUDA kernels alone")
    parser.add_argument("--cpu", action="store_true", help="the CPU libraries alone")
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="kernels whose label has this regular expression",
    )
    parser.add_argument("--all", action="store_true", help="list the kernels that are the same too")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FOLDER",
        help="write what was compared, a file for each kernel",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where to keep what revisions compile"
    )
    return parser.parse_args()


# The trees ----------------------------------------------------------------------------------------


def _export(tree: str, to: Path) -> Path:
    """A copy of a tree's sources."""
    to.mkdir()
    if Path(tree).is_dir():
        for name in SOURCES:
            shutil.copytree(Path(tree, name), to / name, ignore=NEVER)
    else:
        archive = subprocess.run(
            ["git", "archive", tree, *SOURCES], cwd=_root(), capture_output=True, check=True
        )
        subprocess.run(["tar", "-x"], cwd=to, input=archive.stdout, check=True)
    return to


def _cache(tree: str, keep: Path | None, folder: Path) -> Path:
    """A folder for what a tree compiles: in the folder of its copy, or one that stays for a
    revision, if such are kept.
    """
    if keep is None or Path(tree).is_dir():
        return folder / "cache"
    commit = subprocess.run(
        ["git", "rev-parse", f"{tree}^{{commit}}"],
        cwd=_root(),
        capture_output=True,
        check=True,
        text=True,
    )
    return keep.absolute() / commit.stdout.strip()


def _root() -> Path:
    return HERE.parent.parent


def _codes(tree: Path, cache: Path, asked: argparse.Namespace) -> Mapping[str, Code]:
    """The code of a tree's kernels, by label."""
    which = [name for name in ("cuda", "cpu") if getattr(asked, name)] or ["cuda", "cpu"]
    found: dict[str, Path] = {}
    for name in which:
        found |= _built(tree, cache, name, asked.only)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = pool.map(
            lambda path: (of_cubin if path.suffix == ".cubin" else of_library)(path), found.values()
        )
        return dict(zip(found, codes, strict=True))


def _built(tree: Path, cache: Path, which: str, only: str) -> Mapping[str, Path]:
    """Files with a tree's kernels, by label."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    unset = {
        name: value for name, value in os.environ.items() if not name.startswith("FUSION_MOE_")
    }
    environment = {
        **unset,
        "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "translators"))),
        "FUSION_MOE_CACHE_DIR": str(cache),
    }
    command = [sys.executable, HERE / "kernels.py", which, only]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the {which} kernels of {tree.name} were not built: see above")
    return {label: Path(path) for label, path in json.loads(done.stdout).items()}


# The comparison -----------------------------------------------------------------------------------


def _compare(before: Mapping[str, Code], after: Mapping[str, Code]) -> Iterator[Row]:
    left = {label: code for label, code in before.items() if after.get(label) != code}
    new: dict[str, Code] = {}
    for label, code in after.items():
        if before.get(label) == code:
            yield Row(label, "same", (code.instructions, code.instructions))
        elif renamed := next((old for old, was in left.items() if was == code), None):
            yield _row(label, code, renamed, left.pop(renamed))
        else:
            new[label] = code
    for label, code in new.items():
        if other := _counterpart(label, left, new):
            yield _row(label, code, other, left.pop(other))
        else:
            yield Row(label, "new", (None, code.instructions))
    for label, code in left.items():
        yield Row(label, "missing", (code.instructions, None))


def _row(label: str, code: Code, old: str, was: Code) -> Row:
    return Row(
        label if old == label else f"{label} (was {old.rpartition(', ')[2]})",
        was.difference(code),
        (was.instructions, code.instructions),
    )


def _counterpart(label: str, left: Collection[str], new: Collection[str]) -> str | None:
    """The label that a kernel had: the same, or, if another one has that in the meantime, the next
    of those that went from its call.
    """
    call = label.rpartition(",")[0]
    gone = [old for old in left if old not in new and old.rpartition(",")[0] == call]
    return label if label in left else next(iter(gone), None)


def _write(codes: Mapping[str, Code], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for label, code in codes.items():
        name = re.sub(r"[^\w.#-]+", "-", label)
        (folder / f"{name}.txt").write_text(code.text(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
