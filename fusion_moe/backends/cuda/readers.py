"""The readers of weights in kernels/weights/, by encoding and layout: only this file names
encodings and layouts.

Every encoding has a reader, which is made from its descriptor (kernels/weights/derived.cuh) and
from the orders of a layout. Those that have a header of their own are read faster: WRITTEN, and
IN_ORDER where block scales are in an order of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...encodings import ENCODINGS, Element, Encoding, Scale, find, real_tensors
from ...encodings.orders import UNCHANGED
from ...errors import UnsupportedError
from ...layouts import LAYOUTS, Order, Tiled
from ..cxx import inner, order_struct

TILED = "w16x64"
_TILE_ROWS, _TILE_COLUMNS, _LANE_COLUMNS = 16, 64, 16


@dataclass(frozen=True)
class Reader:
    """A C++ class template of a reader, and its header.

    See kernels/weights/reader.cuh. activations: the dtypes for which it makes fragments; tiled:
    whether weights are in tiles of 16 rows and 64 columns, as large-M kernels need; derived:
    whether it is made from the encoding's descriptor, which is its second argument; layout: whose
    orders it reads.
    """

    template: str
    header: str
    activations: tuple[str, ...] = ("bf16", "f16")
    tiled: bool = False
    derived: bool = False
    layout: Tiled | None = None

    def of(self, activations: str) -> str:
        """The C++ class for activations of a dtype."""
        more = ", Encoded" if self.derived else ", ScaleOrder" if self.layout else ""
        return f"{self.template}<{activations}{more}>"

    def names(self, encoding: Encoding) -> list[str]:
        """What a segment's struct calls the parts of its weight."""
        return [f"weight_{part.name}" if self.derived else part.name for part in encoding.parts]

    def constants(self, encoding: Encoding) -> list[str]:
        """What a segment's struct says of the encoding of its weight: the descriptor, or what a
        written reader checks (FourBits of kernels/weights/four_bits_shared.cuh).
        """
        if self.derived:
            return _descriptor(encoding, self.tiled, self.layout)
        block, size = next(((s.block, s.dtype.itemsize) for s in encoding.block_scales), (0, 0))
        return [
            f"static constexpr i32 CODE_BITS = {encoding.element.bits}, SCALE_BLOCK = {block}, "
            f"SCALE_BYTES = {size};",
            *(order_lines("ScaleOrder", self.layout.scales) if self.layout else []),
        ]


WRITTEN = {
    (encoding, layout): Reader(
        f"{name}{'Linear' if layout == 'linear' else 'Tiled'}",
        f"weights/{header}.cuh",
        activations,
        layout == TILED,
    )
    for encoding, name, header, activations in (
        ("nvfp4", "Nvfp4", "nvfp4", ("bf16", "f16")),
        ("mxfp4", "Mxfp4", "mxfp4", ("bf16", "f16")),
        ("int4", "Int4", "int4", ("bf16", "f16")),
        ("bf16", "Plain", "plain", ("bf16",)),
        ("f16", "Plain", "plain", ("f16",)),
    )
    for layout in ("linear", TILED)
}
DERIVED = {
    layout: Reader(name, "weights/derived.cuh", tiled=layout == TILED, derived=True)
    for layout, name in (("linear", "DerivedLinear"), (TILED, "DerivedTiled"))
}
IN_ORDER = ("nvfp4", "mxfp4")  # whose written readers of the linear layout take an order of scales


def readable() -> list[tuple[str, str]]:
    """The encodings and layouts of weights that have readers."""
    layouts = [*DERIVED, *(name for name, of in LAYOUTS.items() if isinstance(of, Tiled))]
    coded = [(e.name, layout) for e in ENCODINGS.values() if e.element.encode for layout in layouts]
    return list(dict.fromkeys([*WRITTEN, *coded]))


def reader(encoding: str, layout: str, activations: str) -> Reader:
    """The reader of weights, for activations of a dtype. UnsupportedError with the reason if there
    is none.
    """
    found = WRITTEN.get((encoding, layout)) or DERIVED.get(layout) or _in_order(encoding, layout)
    if activations not in found.activations:
        raise UnsupportedError(
            f"activations in {activations} with weights in {encoding} have no kernel here",
            expected=" or ".join(found.activations),
        )
    if found.derived:
        for said, expected in _misfits(find(encoding), found.tiled):
            raise UnsupportedError(
                f"weights in {encoding}, {said}, have no kernel here", expected=expected
            )
    return found


def _in_order(encoding: str, layout: str) -> Reader:
    of = LAYOUTS[layout]
    assert isinstance(of, Tiled), layout
    written = encoding in IN_ORDER and not of.elements
    return replace(WRITTEN[encoding, "linear"] if written else DERIVED["linear"], layout=of)


def tile_bytes(encoding: Encoding) -> int:
    """Bytes of the elements and block scales that kernels read for 16 rows and 64 columns."""
    scales = (
        s.dtype.itemsize * max(1, _TILE_COLUMNS // s.block if s.block > 0 else 1)
        for s in encoding.block_scales
    )
    return _TILE_ROWS * (_TILE_COLUMNS * encoding.element.bits // 8 + sum(scales))


def _misfits(of: Encoding, tiled: bool) -> Iterator[tuple[str, str]]:
    """What a derived reader cannot read, and what it can."""
    element, matrix = of.element, [s for s in of.scales if not s.block]
    if of.axis != -1:
        yield "with blocks along N", "blocks along K"
    if element.bits > 8 or (tiled and (element.bits not in (4, 8) or element.order)):
        expected = "4 or 8 bits in their usual order" if tiled else "at most 8 bits"
        yield f"with codes of {element.bits} bits", expected
    for scale in of.block_scales:
        if scale.block > 0 and scale.block % _LANE_COLUMNS:
            yield f"with a scale for {scale.block} elements", f"a multiple of {_LANE_COLUMNS}"
    if len(matrix) > 1 or any(s.dtype != torch.float32 or s.divides for s in matrix):
        yield "with such scales of a matrix", "at most one float32 factor"


# The descriptor in C++ ----------------------------------------------------------------------------

# what the bits of a stored scale mean, in each dtype that an encoding's parts may have
_VALUES = {
    torch.float32: "__uint_as_float(bits)",
    torch.bfloat16: "__uint_as_float(bits << 16)",
    torch.float16: "widen(f16{u16(bits)})",
    torch.float8_e5m2: "widen(f16{u16(bits << 8)})",
    torch.float8_e4m3fn: "e4m3_(u8(bits))",
    torch.float8_e8m0fnu: "e8m0_(bits)",
    torch.uint8: "float(bits)",
}


def order_lines(name: str, order: Order | None) -> list[str]:
    """The C++ struct of an order; None: of the linear one."""
    if order is None:
        return [f"using {name} = LinearOrder;"]
    return order_struct(name, order, "u32", "__device__ ")


def _descriptor(of: Encoding, tiled: bool, layout: Tiled | None = None) -> list[str]:
    """The struct `Encoded`: see kernels/weights/derived.cuh."""
    scales = of.block_scales
    flip, first = of.element.affine or (0, 0)
    outer = next((s.part for s in of.scales if not s.block), None)
    matrix = _function("template <class S> @ const float* of(const S& s)", f"s.weight_{outer}")
    return [
        "struct Encoded {",
        *inner(
            [
                f"static constexpr int BITS = {of.element.bits};",
                f"static constexpr bool AFFINE = {_bool(of.element.affine is not None)}, "
                f"E4M3 = {_bool(_is_e4m3(of.element))};",
                f"static constexpr u32 FLIP = {flip};",
                f"static constexpr i32 FIRST = {first};",
                *([] if of.element.affine else _number(of.element)),
                *(line for i, s in enumerate(scales) for line in _scale(i, s, tiled)),
                f"using Scales = Parts<{', '.join(f'Scale{i}' for i in range(len(scales)))}>;",
                *order_lines("ScaleOrder", layout.scales if layout else None),
                *order_lines("ElementOrder", layout.elements if layout else None),
                *_step(of),
                *(["struct Matrix {", *inner(matrix), "};"] if outer else []),
                f"using Outer = {'OuterScale<Matrix>' if outer else 'NoOuterScale'};",
            ]
        ),
        "};",
    ]


def _step(of: Encoding) -> list[str]:
    """The type of scales, if numbers may be made in pairs: kernels/weights/pairs.cuh."""
    types = {torch.bfloat16: "bf16", torch.float16: "f16"}
    if of.element.bits != 4 or of.element.affine not in ((0, 0), (0, -8)) or not of.scales:
        return []
    scale, *zeros = of.scales
    usual = scale.block != 0 and not scale.zero_point and not scale.divides
    if not usual or scale.dtype not in types or [z.dtype for z in zeros] not in ([], [torch.uint8]):
        return []
    if bool(zeros) == bool(of.element.affine[1]) or not all(z.zero_point for z in zeros):
        return []
    return [f"using Step = {types[scale.dtype]};"]


def _is_e4m3(of: Element) -> bool:
    """Whether an instruction converts codes."""
    return of.dtype == torch.float8_e4m3fn and of.decode is None


def _number(of: Element) -> list[str]:
    """What a code means: codes of floats of few bits by their bits, others by a table."""
    if _is_e4m3(of):
        return []
    if (found := of.few_bits) and not any(map(math.isnan, of.values)):
        (mantissa, factor), half = found, 2 ** (of.bits - 1)
        bits = f"(code & {half}u) << {32 - of.bits} | (code & {half - 1}u) << {23 - mantissa}"
        return _function("@ float number(u32 code)", f"__uint_as_float({bits}) * {factor.hex()}f")
    return _look_up("number", of.values)


def _scale(i: int, scale: Scale, tiled: bool) -> list[str]:
    value = f"1.f / ({_VALUES[scale.dtype]})" if scale.divides else _VALUES[scale.dtype]
    return [
        f"struct Scale{i} {{",
        *inner(
            [
                f"static constexpr i32 BYTES = {scale.dtype.itemsize}, "
                f"BLOCK = {max(scale.block, 0)};",
                f"static constexpr bool ZERO_POINT = {_bool(scale.zero_point)};",
                *_function(
                    "template <class S> @ const u8* of(const S& s)",
                    f"reinterpret_cast<const u8*>(s.weight_{scale.part})",
                ),
                *(
                    _look_up("value", _recoded(scale))
                    if tiled and scale.recoding != UNCHANGED
                    else _function("@ float value(u32 bits)", value)
                ),
            ]
        ),
        "};",
    ]


@real_tensors()
def _recoded(scale: Scale) -> list[float]:
    """What each byte means that a tile stores for a scale."""
    stored = scale.recoding.inverse(torch.arange(256, dtype=torch.uint8))
    values = stored.view(scale.dtype).float()
    return (values.reciprocal() if scale.divides else values).tolist()


def _bool(x: bool) -> str:
    return str(x).lower()


def _function(declaration: str, value: str) -> list[str]:
    static = "static __device__ __forceinline__"
    return [f"{declaration.replace('@', static)} {{ return {value}; }}"]


@real_tensors()
def _look_up(name: str, values: list[float] | tuple[float, ...]) -> list[str]:
    words = torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()
    bits = ", ".join(hex(word & 0xFFFFFFFF) for word in words)
    return [
        f"static __device__ __forceinline__ float {name}(u32 code) {{",
        f"    static const u32 bits[] = {{{bits}}};",
        "    return __uint_as_float(bits[code]);",
        "}",
    ]
