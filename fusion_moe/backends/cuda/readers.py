"""The readers of weights in kernels/weights/, by encoding and layout: only this file names
encodings and layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...encodings import Encoding, find
from ...errors import UnsupportedError


@dataclass(frozen=True)
class Reader:
    """A C++ class template of a reader, and its header. The parts of a weight have the encoding's
    names for them.

    See kernels/weights/reader.cuh. activations: the dtypes for which it makes fragments; tiled:
    whether weights are in tiles of 16 rows and 64 columns, as large-M kernels need.
    """

    template: str
    header: str
    activations: tuple[str, ...] = ("bf16", "f16")
    tiled: bool = False

    def of(self, activations: str) -> str:
        """The C++ class for activations of a dtype."""
        return f"{self.template}<{activations}>"


def constants(of: Encoding) -> str:
    """What readers of four bits check of a segment's weight: FourBits of
    kernels/weights/four_bits_shared.cuh.
    """
    block, size = next(((s.block, s.dtype.itemsize) for s in of.block_scales), (0, 0))
    return (
        f"static constexpr i32 CODE_BITS = {of.element.bits}, SCALE_BLOCK = {block}, "
        f"SCALE_BYTES = {size};"
    )


TILED = "w16x64"
_BLOCKS = 16, 32, 64  # elements that share a scale, in kernels/weights/four_bits.cuh
READERS = {
    ("nvfp4", "linear"): Reader("Nvfp4Linear", "weights/nvfp4.cuh"),
    ("nvfp4", TILED): Reader("Nvfp4Tiled", "weights/nvfp4.cuh", tiled=True),
    ("mxfp4", "linear"): Reader("Mxfp4Linear", "weights/mxfp4.cuh"),
    ("mxfp4", TILED): Reader("Mxfp4Tiled", "weights/mxfp4.cuh", tiled=True),
    ("int4", "linear"): Reader("Int4Linear", "weights/int4.cuh"),
    ("int4", TILED): Reader("Int4Tiled", "weights/int4.cuh", tiled=True),
    ("bf16", "linear"): Reader("PlainLinear", "weights/plain.cuh", ("bf16",)),
    ("bf16", TILED): Reader("PlainTiled", "weights/plain.cuh", ("bf16",), tiled=True),
    ("f16", "linear"): Reader("PlainLinear", "weights/plain.cuh", ("f16",)),
    ("f16", TILED): Reader("PlainTiled", "weights/plain.cuh", ("f16",), tiled=True),
}


def reader(encoding: str, layout: str, activations: str) -> Reader:
    """The reader of weights, for activations of a dtype. UnsupportedError with the reason if there
    is none.
    """
    found = READERS[encoding, layout]
    if activations not in found.activations:
        said = f"activations in {activations} with weights in {encoding} have no kernel here"
        raise UnsupportedError(said, expected=" or ".join(found.activations))
    for scale in find(encoding).block_scales:
        if scale.block not in _BLOCKS:
            said = (
                f"weights in {encoding}, with a scale for {scale.block} elements, have no "
                "kernel here"
            )
            raise UnsupportedError(said, expected=f"a scale for {' or '.join(map(str, _BLOCKS))}")
    return found
