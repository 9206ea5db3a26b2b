"""Texts of programs changed at random, and run on any bits. No program that verifies may read or
write outside of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from random import Random
from typing import Any

import torch

from fusion_moe.backends import TARGETS
from fusion_moe.compile import compile_fusion
from fusion_moe.errors import Error, ParseError
from fusion_moe.ir.binding import storage_shape
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.text import parse, text
from fusion_moe.ir.types import DTYPES
from fusion_moe.options import Options
from fusion_moe.runtime.program import Program

from . import values
from .builder import Found
from .compare import outcome

_SIZES = (0, 1, 2, 3, 5, 16)
_NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    15,
    16,
    17,
    32,
    33,
    64,
    128,
    -1,
    -2,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    -(2**63),
)
_FLOATS = ("0.0", "-0.0", "1e30", "-inf", "inf", "nan", "1", "True", "1e400", "0.1")
_MOST = 2**17  # elements of a value
_INTEGER, _VALUE, _DTYPE = (
    re.compile(r"(?<![\w.])-?\d+(?![\w.])"),
    re.compile(r"\b[it]\d+\b"),
    re.compile("|".join(map(re.escape, DTYPES))),
)


def mutated(rng: Random, source: str) -> str:
    """A text with one thing changed, in one place or wherever it stands."""
    lines = source.splitlines()
    at = rng.randrange(1, len(lines))
    ways = (
        "number",
        "number",
        "everywhere",
        "everywhere",
        "value",
        "value",
        "dtype",
        "float",
        "line",
        "twice",
        "size",
        "operation",
    )
    way = rng.choice(ways)
    if way == "everywhere":
        old = rng.choice(_INTEGER.findall(source) or ["0"])
        return re.sub(
            rf"(?<![\w.]){re.escape(old)}(?![\w.])", str(rng.choice((*_NUMBERS[:14], "s0"))), source
        )
    if way == "line":
        return "\n".join(line for i, line in enumerate(lines) if i != at)
    if way == "twice":
        return "\n".join([*lines[: at + 1], *lines[at:]])
    lines[at] = _one_changed(rng, way, lines[at], source)
    return "\n".join(lines)


def _one_changed(rng: Random, way: str, line: str, source: str) -> str:
    code, mark, comment = line.partition("  # ")
    left, is_, right = code.partition(" = ")
    if way == "operation":
        names = re.findall(r"fd\.ops\.(\w+)", source)
        return re.sub(r"fd\.ops\.\w+", f"fd.ops.{rng.choice(names)}", line) if names else line
    pattern, new = {
        "number": (_INTEGER, lambda: str(rng.choice(_NUMBERS))),
        "value": (_VALUE, lambda: rng.choice(_VALUE.findall(source) or ["i0"])),
        "dtype": (_DTYPE, lambda: rng.choice(list(DTYPES))),
        "float": (re.compile(r"-?\d+\.\d+(e-?\d+)?|-?inf|nan"), lambda: rng.choice(_FLOATS)),
        "size": (
            _INTEGER,
            lambda: rng.choice(("s0", "2*s0", "s0 + 1", "s0 + -1", "ceildiv(s0, 2)", "16*s0")),
        ),
    }[way]
    places = list(pattern.finditer(right))
    if not places:
        return line
    place = rng.choice(places)
    return f"{left}{is_}{right[: place.start()]}{new()}{right[place.end() :]}{mark}{comment}"


def verified(rng: Random, fusion: Fusion) -> Iterator[Fusion]:
    """Programs that verify, each made of the one before by a few changes of its text."""
    source = text(fusion)
    for _ in range(24):
        changed = mutated(rng, source)
        if "define_size('s0')" not in changed and "s0" in changed:
            changed = changed.replace(
                "def fusion(fd):\n", "def fusion(fd):\n    s0 = fd.define_size('s0')\n", 1
            )
        found = outcome(lambda changed=changed: parse(changed))
        if isinstance(found, Exception):
            if not isinstance(found, ParseError):
                raise Found(f"parse raises {type(found).__name__}: {found}\n{changed}")
            continue
        if changed != source:
            source = changed
            yield found


def inputs_of(rng: Random, fusion: Fusion) -> tuple[list[Any], dict[str, int]] | None:
    """Any bits for each input, and sizes for the symbols; None where that would be large, or is no
    plain tensor.
    """
    env = {s: rng.choice(_SIZES) for s in fusion.symbols}
    made = [v.type for op in fusion.ops for v in op.outputs]
    shapes = outcome(
        lambda: [storage_shape(t, env) for t in (*(v.type for v in fusion.inputs), *made)]
    )
    if isinstance(shapes, Exception) or any(v.type.quantized for v in fusion.inputs):
        return None
    if any(prod(shape) > _MOST or any(d < 0 for d in shape) for shape in shapes):
        return None
    return [
        values.hostile(rng, tuple(shape), DTYPES[v.type.dtype])
        for v, shape in zip(fusion.inputs, shapes, strict=False)
    ], env


def program_of(fusion: Fusion, tier: str) -> Program | None:
    """Its program for the CPU; None where that is refused in a sentence of ours."""
    found = outcome(lambda: compile_fusion(fusion, TARGETS["cpu"], Options().replace(cpu_isa=tier)))
    if isinstance(found, Exception) and not isinstance(found, Error):
        raise Found(f"compile_fusion raises {type(found).__name__}: {found}\n{fusion}")
    return None if isinstance(found, Exception) else found


def wrong(program: Program, inputs: list[Any], sizes: dict[str, int]) -> str:
    """What is wrong with a run, beside what a sanitizer sees: an error of ours must be raised by
    both or by none.
    """
    want = outcome(lambda: program.fusion.evaluate(*inputs, sizes=sizes))
    got = outcome(lambda: program(inputs, sizes))
    if isinstance(want, Error) and not isinstance(got, Exception):
        return f"returns where the reference raises {type(want).__name__}: {want}"
    if isinstance(got, Exception) and not isinstance(want, Exception):
        return f"raises {type(got).__name__} where the reference returns: {got}"
    return ""


def numbers(seed: int) -> Random:
    """The random numbers of a seed."""
    torch.manual_seed(seed)
    return Random(seed)
