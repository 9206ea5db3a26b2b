"""The readers of weights in kernels/weights/, by encoding and layout: the only place here that names either."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import UnsupportedError


@dataclass(frozen=True)
class Reader:
    """A C++ class template of a reader, its header, and its names of the parts of a weight. See kernels/weights/reader.cuh.

    activations: the dtypes that it makes fragments for; tiled: whether weights are in tiles of 16 rows and 64 columns, as products of many
    rows need them.
    """

    template: str
    header: str
    parts: tuple[str, ...]
    activations: tuple[str, ...] = ("bf16", "f16")
    tiled: bool = False

    def of(self, activations: str) -> str:
        """The C++ class, for activations of a dtype."""
        return f"{self.template}<{activations}>"


TILED = "w16x64"
_NVFP4, _MXFP4, _PLAIN = ("codes", "block_scale", "decode_scale"), ("codes", "block_scale"), ("values",)
READERS = {
    ("nvfp4", "linear"): Reader("Nvfp4Linear", "weights/nvfp4.cuh", _NVFP4),
    ("nvfp4", TILED): Reader("Nvfp4Tiled", "weights/nvfp4.cuh", _NVFP4, tiled=True),
    ("mxfp4", "linear"): Reader("Mxfp4Linear", "weights/mxfp4.cuh", _MXFP4),
    ("mxfp4", TILED): Reader("Mxfp4Tiled", "weights/mxfp4.cuh", _MXFP4, tiled=True),
    ("bf16", "linear"): Reader("PlainLinear", "weights/plain.cuh", _PLAIN, ("bf16",)),
    ("bf16", TILED): Reader("PlainTiled", "weights/plain.cuh", _PLAIN, ("bf16",), tiled=True),
    ("f16", "linear"): Reader("PlainLinear", "weights/plain.cuh", _PLAIN, ("f16",)),
    ("f16", TILED): Reader("PlainTiled", "weights/plain.cuh", _PLAIN, ("f16",), tiled=True),
}
LAYOUTS = tuple(dict.fromkeys(layout for _, layout in READERS))


def reader(encoding: str, layout: str, activations: str) -> Reader:
    """The reader of weights for activations of a dtype. UnsupportedError with the sentence why there is none."""
    encodings = dict.fromkeys(name for name, _ in READERS)
    if encoding not in encodings:
        raise UnsupportedError(f"weights in {encoding} have no kernel here", expected=_either(encodings))
    if (encoding, layout) not in READERS:
        of_encoding = [known for name, known in READERS if name == encoding]
        raise UnsupportedError(f"{encoding} weights in the layout {layout} have no kernel here", expected=_either(of_encoding))
    found = READERS[encoding, layout]
    if activations not in found.activations:
        said = f"activations in {activations} with weights in {encoding} have no kernel here"
        raise UnsupportedError(said, expected=_either(found.activations))
    return found


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
