"""Texts of programs changed at random, and inputs of any bits. No program that verifies may read or
write outside of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from random import Random
from typing import Any

from fusion_moe.errors import ParseError
from fusion_moe.ir.binding import storage_shape
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.text import parse, text
from fusion_moe.ir.types import DTYPES

from . import values
from .compare import outcome

_SIZES = (0, 1, 2, 3, 5, 16)
_WIDEST = 2**63 - 1  # of a tensor, even of one without elements
_MOST = 2**17  # elements of a value
_SMALL = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64, 128, -1, -2)
_LARGE = (2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
_COMPUTED = ("s0", "2*s0", "s0 + 1", "s0 + -1", "ceildiv(s0, 2)", "16*s0")
_FLOATS = ("0.0", "-0.0", "1e30", "-inf", "inf", "nan", "1", "True", "1e400", "0.1")
# what is changed, and into what: into another one of the same text where that is empty
_CHANGES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (r"(?<![\w.])-?\d+(?![\w.])", (*_SMALL, *_LARGE, *_COMPUTED)),
    (r"\b[it]\d+\b", ()),
    (r"fd\.ops\.\w+", ()),
    ("|".join(map(re.escape, DTYPES)), tuple(DTYPES)),
    (r"-?\d+\.\d+(e-?\d+)?|-?inf|nan", _FLOATS),
    (r"\n    .*", ("", "")),
)


def mutated(rng: Random, source: str) -> str:
    """A text with one thing changed, in one place or wherever it stands."""
    pattern, others = rng.choice(_CHANGES)
    places = list(re.finditer(pattern, source))
    if not places:
        return source
    place = rng.choice(places)
    new = str(rng.choice(others or [p[0] for p in places]))
    if rng.random() < 0.3:
        return re.sub(rf"(?<![\w.]){re.escape(place[0])}(?![\w.])", new, source)
    return f"{source[: place.start()]}{new}{source[place.end() :]}"


def verified(rng: Random, fusion: Fusion) -> Iterator[Fusion]:
    """Programs that verify, each made of the one before by a few changes of its text."""
    source = text(fusion)
    for _ in range(24):
        changed = mutated(rng, source)
        if "s0" in changed and "s0 = fd.define_size" not in changed:
            size = "    s0 = fd.define_size('s0')\n"
            changed = changed.replace("def fusion(fd):\n", f"def fusion(fd):\n{size}", 1)
        found = outcome(lambda changed=changed: parse(changed))
        if isinstance(found, Exception):
            assert isinstance(found, ParseError), changed
        elif changed != source:
            source = changed
            yield found


def inputs_of(rng: Random, fusion: Fusion) -> tuple[list[Any], dict[str, int]] | None:
    """Any bits for each input, and sizes for the symbols; None where that would be large, or is no
    plain tensor.
    """
    env = {s: rng.choice(_SIZES) for s in fusion.symbols}
    types = [v.type for v in (*fusion.inputs, *(v for op in fusion.ops for v in op.outputs))]
    shapes = outcome(lambda: [storage_shape(t, env) for t in types])
    if isinstance(shapes, Exception) or any(v.type.quantized for v in fusion.inputs):
        return None
    if any(prod(shape) > _MOST or min(shape, default=0) < 0 for shape in shapes):
        return None
    if any(max(shape, default=0) > _WIDEST for shape in shapes):
        return None
    given = zip(fusion.inputs, shapes, strict=False)
    return [values.hostile(rng, tuple(s), DTYPES[v.type.dtype]) for v, s in given], env
