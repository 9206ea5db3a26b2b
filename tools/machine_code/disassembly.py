"""What a compiled kernel is made of: its instructions and constants, without addresses and
names.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

# nvdisasm -hex: a line for the first half of an instruction, one for the second
_SASS = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/\n\s+/\* "
    r"0x(?P<high>[0-9a-f]{16}) \*/",
    re.MULTILINE,
)
_SASS_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)
_CONTROL = 41  # bits of the second half that come before stalls, barriers and reuse
_SYMBOL = re.compile(r"(?<=[`oi]\()[^()]+(?=\))")  # `(name), 32@lo(name), fun@hi(name)
_READS_DATA = re.compile(r"32@|c\[0x[1-9]")

_FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>.+)>:$")
_DATA = re.compile(r"^ (?P<at>[0-9a-f]+) (?P<words>(?:[0-9a-f]+ ){1,4})", re.MULTILINE)
_RELATIVE = re.compile(r"-?0x[0-9a-f]+(?=\(%rip\))")
_SHOWN = 8  # bytes of what an instruction reads
_PLACE = re.compile(r"<(?P<name>[^<>+]*(?:<.*>)?[^<>+]*?)(?P<offset>\+0x[0-9a-f]+)?>")
_NOP = re.compile(r"^(nop|xchg +%ax,%ax|(data16 )*(cs )?nop[wl] )")


@dataclass(frozen=True)
class Code:
    """functions: their instructions, in order; data: the constants that they may read."""

    functions: tuple[tuple[str, ...], ...]
    data: tuple[str, ...] = ()

    @property
    def instructions(self) -> int:
        return sum(map(len, self.functions))

    def difference(self, other: Code) -> str:
        """What is different: "code", "order" (of functions) or "data"; or "same"."""
        if self.functions != other.functions:
            return "order" if sorted(self.functions) == sorted(other.functions) else "code"
        return "same" if self.data == other.data else "data"

    def text(self) -> str:
        """One instruction a line, an empty line between functions."""
        return "\n\n".join("\n".join(lines) for lines in (*self.functions, self.data)) + "\n"


# CUDA ---------------------------------------------------------------------------------------------


def of_cubin(path: Path) -> Code:
    """The SASS of a cubin, with how instructions are scheduled, and the size of its static shared
    memory.
    """
    text = _run(_nvdisasm(), "-hex", path)
    sections = {part.split(",", 1)[0]: part for part in text.split("\n\t.section\t")[1:]}
    functions = [_sass(body) for name, body in sections.items() if name.startswith(".text.")]
    shared = [
        size
        for name, body in sections.items()
        if name.startswith(".nv.shared.")
        for size in re.findall(r"\.zero\s+\d+", body)
    ]
    read = any(_READS_DATA.search(line) for line in chain.from_iterable(functions))
    constants = [
        word
        for name, body in sections.items()
        if read and _is_data(name)
        for word in re.findall(r"\.(?:byte|word)\s+.*", body)
    ]
    return Code(tuple(functions), (*shared, *constants))


def _sass(section: str) -> tuple[str, ...]:
    """Instructions, each with its scheduling."""
    named = _numbered(
        chain.from_iterable(_SYMBOL.findall(m["text"]) for m in _SASS.finditer(section))
    )
    lines = []
    for m in re.finditer(f"{_SASS.pattern}|{_SASS_LABEL.pattern}", section, re.MULTILINE):
        if m["text"]:
            lines.append(f"{_SYMBOL.sub(named, m['text'])} ; {int(m['high'], 16) >> _CONTROL:#x}")
        elif f"`({m[3]})" in section:
            lines.append(f"{named(m[3])}:")
    return tuple(lines)


def _is_data(section: str) -> bool:
    return section.startswith((".nv.constant", ".nv.global.init")) and not section.startswith(
        ".nv.constant0"
    )


@cache
def _nvdisasm() -> Path:
    try:
        files = metadata.distribution("nvidia-cuda-nvdisasm").files or []
    except metadata.PackageNotFoundError:
        raise SystemExit(
            "nvdisasm is not installed: pip install nvidia-cuda-nvdisasm, or --cpu"
        ) from None
    return Path(str(next(f for f in files if f.name == "nvdisasm").locate()))


# CPU ----------------------------------------------------------------------------------------------


def of_library(path: Path) -> Code:
    """The instructions of a shared library, and its constants. Calls and jumps name functions by
    their first appearance.
    """
    text = _run("objdump", "-d", "--no-show-raw-insn", "--section=.text", path)
    found = list(_DATA.finditer(_run("objdump", "-s", "--section=.rodata", path)))
    start, data = (
        int(found[0]["at"], 16) if found else 0,
        bytes.fromhex("".join(m["words"] for m in found)),
    )

    def constant(address: int) -> str:
        """The first bytes of a constant; nothing for what is no constant."""
        return (
            data[address - start : address - start + _SHOWN].hex()
            if start <= address < start + len(data)
            else ""
        )

    return Code(tuple(_functions(text, constant)), tuple(m["words"].strip() for m in found))


def _functions(text: str, constant: Callable[[int], str]) -> Iterator[tuple[str, ...]]:
    number, name, lines = _numbered(()), "", list[str]()
    for line in [*text.splitlines(), "0 <end>:"]:
        if m := _FUNCTION.match(line):
            while lines and _NOP.match(lines[-1]):  # which align the next one
                lines.pop()
            if lines:
                yield tuple(lines)
            name, lines = m["name"], []
        elif line.startswith(" "):
            lines.append(_x86(line.partition("\t")[2].strip(), name, number, constant))


def _x86(
    line: str,
    inside: str,
    number: Callable[[re.Match[str] | str], str],
    constant: Callable[[int], str],
) -> str:
    """An instruction without addresses. What it jumps to is an offset in its function, or another
    function's number.
    """

    def place(m: re.Match[str]) -> str:
        return f"<{'' if m['name'] == inside else number(m['name'])}{m['offset'] or ''}>"

    code, _, note = line.partition("#")
    if note:  # relative to the instruction pointer: data, which says more than its place
        return _RELATIVE.sub(constant(int(note.split()[0], 16)), code).strip()
    return _PLACE.sub(place, re.sub(r"\b[0-9a-f]+ (?=<)", "", code)).strip()


def _numbered(names: Iterable[str]) -> Callable[[re.Match[str] | str], str]:
    """Numbers in place of names, by first appearance: those of `names` first."""
    known: dict[str, str] = {}

    def number(name: re.Match[str] | str) -> str:
        return known.setdefault(name if isinstance(name, str) else name[0], f"@{len(known)}")

    for name in names:
        number(name)
    return number


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
