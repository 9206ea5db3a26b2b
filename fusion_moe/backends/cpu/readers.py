"""The C++ that reads the weights of each encoding in each layout, and the fixed library of an ISA
level that is compiled around it.

kernels/weight.h says what a reader is. That of an encoding is derived from its descriptor
(kernels/derived.h), and from the orders of the layout (kernels/order.h). A header
kernels/weights/<encoding>.h overrides it, for speed, and so does what `register_reader` is given
for a user's own encoding. Imports no torch, since tools/build_kernels.py builds the libraries of
`BUILT_IN` into the package.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UnsupportedError
from ...runtime import build
from ..cxx.orders import order_struct

if TYPE_CHECKING:
    from ...encodings import Encoding, Scale
    from ...layouts import Tiled

KERNELS = Path(__file__).parent / "kernels"
# filled when the package is built: tools/build_kernels.py
SHIPPED = Path(__file__).parent / "shipped"
_PLAIN = {"bf16": "bf16", "f16": "f16", "f32": "float"}  # encoding -> its numbers in C++
_OVERRIDES = tuple(sorted(path.stem for path in (KERNELS / "weights").glob("*.h")))
BUILT_IN = (*_OVERRIDES, *_PLAIN)
_IN_ANY_ORDER = ("mxfp4", "nvfp4")  # those that read block scales in any order: kernels/e2m1.h
# weights that an added product may have: kernels/added.h
FLOATS = tuple((encoding, "linear") for encoding in _PLAIN)
PARTS = 6  # the most parts that a weight may have: kernels/product.h
_LANES = 16  # elements of a row that share their scales, at least: kernels/product.h
_registered: dict[str, str] = {}  # encoding -> C++
_SCALES = {
    "float32": "float",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint8": "u8",
    "float8_e4m3fn": "e4m3",
    "float8_e8m0fnu": "e8m0",
}  # dtype of a scale -> its type in kernels/derived.h


def register_reader(encoding: str, source: str | Path) -> None:
    """Registers a reader in place of the derived one, for speed: C++ or a file with it, which
    defines `Weight`. Replaces an earlier one unless that is built in.

    UnsupportedError for a built-in encoding.
    """
    if encoding in BUILT_IN:
        raise UnsupportedError(
            f"the CPU already has a reader of {encoding}", expected="an encoding of your own"
        )
    _registered[encoding] = (
        source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    )


def unregister_reader(encoding: str) -> None:
    """Undoes `register_reader`. Programs that are compiled already keep their reader."""
    _registered.pop(encoding, None)


def reader_of(encoding: str, layout: str = "linear") -> str:
    """C++ that defines `Weight`. UnsupportedError if the encoding has none in this layout."""
    if layout != "linear":
        return _in_orders(encoding, layout)
    if encoding in _PLAIN:
        return f'#include "plain.h"\n\nusing Weight = PlainWeight<{_PLAIN[encoding]}>;\n'
    if encoding in _OVERRIDES:
        return f'#include "weights/{encoding}.h"\n'
    if encoding in _registered:
        return _registered[encoding]
    from ...encodings import find  # imports torch

    return derived(find(encoding))


def _in_orders(encoding: str, layout: str) -> str:
    from ...encodings import find  # imports torch
    from ...layouts import LAYOUTS, Tiled

    of = LAYOUTS[layout]
    if not isinstance(of, Tiled):
        raise UnsupportedError(
            f"weights in the layout {layout} have no reader for CPUs", expected="a Tiled layout"
        )
    if encoding not in _IN_ANY_ORDER or of.elements:
        return derived(find(encoding), of)
    order = "\n".join(_orders(of))
    return f'{order}\n#define SCALE_ORDER ScaleOrder\n#include "weights/{encoding}.h"\n'


def _orders(of: Tiled) -> list[str]:
    """The orders of a layout: ScaleOrder, and ElementOrder if elements have one."""
    named = {"ScaleOrder": of.scales, "ElementOrder": of.elements}
    structs = (order_struct(name, order, "u64") for name, order in named.items() if order)
    lines = [line for struct in structs for line in struct]
    return ['#include "order.h"', "", "namespace {", "", *lines, "", "}  // namespace", ""]


def readable() -> tuple[tuple[str, str], ...]:
    """The encodings that have a reader, each with each of the layouts that kernels read."""
    from ...encodings import ENCODINGS
    from ...layouts import LAYOUTS, Tiled

    derivable = [name for name, encoding in ENCODINGS.items() if not why_not(encoding)]
    linear = dict.fromkeys((*BUILT_IN, *_registered, *derivable))
    tiled = [name for name, layout in LAYOUTS.items() if isinstance(layout, Tiled)]
    return (
        *((name, "linear") for name in linear),
        *((name, layout) for name in derivable for layout in tiled),
    )


def why_not(encoding: Encoding) -> str:
    """Why no reader can be derived from a descriptor; "" if one can."""
    element, blocks = encoding.element, [s.block for s in encoding.block_scales]
    odd = [s for s in encoding.scales if _dtype(s) not in _SCALES]
    if element.bits > 8:
        return f"its elements have {element.bits} bits, and scales; readers take codes of up to 8"
    if encoding.axis != -1:
        return "its blocks lie along N; readers take blocks along K"
    if any(b > 0 and b % _LANES for b in blocks):
        return f"its scales are for {blocks} elements; readers take multiples of {_LANES}"
    if odd:
        return f"its {odd[0].part} is {_dtype(odd[0])}; readers take {', '.join(_SCALES)}"
    if len(encoding.parts) > PARTS or len(encoding.scales) - len(blocks) > 1:
        return f"readers take {PARTS} parts at most, one of them for a whole matrix"
    return ""


def derived(encoding: Encoding, layout: Tiled | None = None) -> str:
    """The reader that follows from a descriptor, and from that of a layout other than the linear
    one: C++ that defines `Weight`. UnsupportedError with the reason if there is none.
    """
    if why := why_not(encoding):
        raise UnsupportedError(
            f"weights in {encoding.name} have no reader for CPUs: {why}",
            todo="register one with fusion_moe.backends.cpu.readers.register_reader",
        )
    element = encoding.element
    if element.affine is None:
        numbers = f"float TABLE[] = {{{', '.join(map(_literal, _of_register(element.values)))}}}"
        mantissa, factor = element.few_bits or (0, 0.0)
        if element.bits == 8 and mantissa > 2:  # of an exponent that float16 has without infinity
            halves = f"float FACTOR = {_literal(factor * 2.0**-112)}"
            numbers += f";\n    static constexpr int SHIFT = {10 - mantissa};"
            numbers += f"\n    static constexpr {halves}"
    else:
        numbers = "int FLIP = {}, FIRST = {}".format(*element.affine)
    orders = "\n".join(_orders(layout)) + "\n" if layout else ""
    levels = ", ".join(_level(scale, "ScaleOrder" if layout else "") for scale in encoding.scales)
    arguments = "Format, ElementOrder" if layout and layout.elements else "Format"
    return f"""{orders}#include "derived.h"

namespace {{

struct Format {{
    static constexpr double BYTES = {encoding.weight_bits / 8};
    static constexpr int BITS = {element.bits};
    static constexpr {numbers};
    using Scales = Levels<{levels}>;
}};

}}  // namespace

using Weight = DerivedWeight<{arguments}>;
"""


def _level(scale: Scale, order: str) -> str:
    role = "ZERO_POINT" if scale.zero_point else "DIVISOR" if scale.divides else "MULTIPLIER"
    block = {0: "OF_MATRIX", -1: "OF_ROW"}.get(scale.block, str(scale.block))
    ordered = f", {order}" if order and scale.block else ""
    return f"Level<{_SCALES[_dtype(scale)]}, {block}, Role::{role}{ordered}>"


def _dtype(scale: Scale) -> str:
    return str(scale.dtype).removeprefix("torch.")


def _of_register(values: tuple[float, ...]) -> tuple[float, ...]:
    """A table of sixteen numbers at least, which one look-up takes."""
    return values + (0.0,) * (_LANES - len(values))


def _literal(x: float) -> str:
    if math.isnan(x):
        return '__builtin_nanf("")'
    return f"{x.hex()}f" if math.isfinite(x) else f"{'-' if x < 0 else ''}__builtin_inff()"


def library_source(
    isa_level: str, encoding: str, kind: str = "fprop", layout: str = "linear"
) -> build.LibrarySource:
    """How to build the library for an ISA level, an encoding, a kind of product and a layout, and
    where the one that came with the package is.

    kind: as in schedule/product.py, or "int8", an fprop with int8 operands. encoding: "" for wgrad,
    which reads no weight. Raises like `reader_of`.
    """
    reader = reader_of(encoding, layout) if encoding else ""
    name = "_".join(x for x in (kind, encoding, layout.replace("linear", "")) if x)
    text = f"{reader}\n{(KERNELS / f'{kind}.cpp').read_text(encoding='utf-8')}"
    return build.LibrarySource(text, name, isa_level, (KERNELS,), shipped=SHIPPED)


def came(isa_level: str, encoding: str) -> bool:
    """Whether the library of products for an ISA level and an encoding came with the package, for
    this CPU. UnsupportedError for an encoding without a reader.
    """
    return library_source(isa_level, encoding).prebuilt() is not None


def blocks_source(isa_level: str) -> build.LibrarySource:
    """The same for the library of kernels/blocks.cpp, which quantizes weights."""
    text = (KERNELS / "blocks.cpp").read_text(encoding="utf-8")
    return build.LibrarySource(text, "blocks", isa_level, (KERNELS,), shipped=SHIPPED)


def packaged(isa_level: str) -> list[build.LibrarySource]:
    """The libraries of an ISA level that come with the package."""
    return [*(library_source(isa_level, e) for e in BUILT_IN), blocks_source(isa_level)]
