"""The readers of weights in kernels/weights/, by encoding and layout: only this file names encodings and layouts."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UnsupportedError


@dataclass(frozen=True)
class Reader:
    """A C++ class template of a reader, and its header. The parts of a weight have the encoding's names for them.

    See kernels/weights/reader.cuh. activations: the dtypes for which it makes fragments; tiled: whether weights are in tiles of 16 rows and
    64 columns, as large-M kernels need.
    """

    template: str
    header: str
    activations: tuple[str, ...] = ("bf16", "f16")
    tiled: bool = False

    def of(self, activations: str) -> str:
        """The C++ class for activations of a dtype."""
        return f"{self.template}<{activations}>"


TILED = "w16x64"
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
    """The reader of weights, for activations of a dtype. UnsupportedError with the reason if there is none."""
    found = READERS[encoding, layout]
    if activations not in found.activations:
        said = f"activations in {activations} with weights in {encoding} have no kernel here"
        raise UnsupportedError(said, expected=" or ".join(found.activations))
    return found
