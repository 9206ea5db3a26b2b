"""What the C++ knows of making an encoding from floats. An encoding that is not here is made by the reference."""

from __future__ import annotations

from dataclasses import dataclass

from ...encodings import MXFP8, MXFP8_COLUMNS, NVFP4, Encoding
from ...errors import UnsupportedError


@dataclass(frozen=True)
class Encoder:
    """function: of kernels/numbers.h, a block of floats, and the scale of its matrix if it has one -> codes and a block scale, False unless
    the encoding holds them.

    divisor: the largest magnitude of a matrix over this is the scale of the matrix; 0 where there is none.
    """

    function: str
    divisor: float = 0.0


_ENCODERS = {
    NVFP4.name: Encoder("quantize_block", NVFP4.element.maximum * NVFP4.scales[0].maximum),
    MXFP8.name: Encoder("quantize_mxfp8"),
    MXFP8_COLUMNS.name: Encoder("quantize_mxfp8"),
}


def encoder(encoding: Encoding) -> Encoder:
    """The encoder of an encoding. UnsupportedError if there is none."""
    if encoding.name not in _ENCODERS:
        raise UnsupportedError(f"quantizing to {encoding.name} has no kernel here", expected=" or ".join(_ENCODERS))
    return _ENCODERS[encoding.name]
