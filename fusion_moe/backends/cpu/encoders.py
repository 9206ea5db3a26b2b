"""The encodings that the C++ can quantize to. The reference quantizes to all others."""

from __future__ import annotations

from dataclasses import dataclass

from ...encodings import MXFP8, MXFP8_COLUMNS, NVFP4, Encoding
from ...errors import UnsupportedError


@dataclass(frozen=True)
class Encoder:
    """function: in kernels/numbers.h; takes a block of floats, and the scale of its matrix if it
    has one, gives codes and a block scale, and returns False if the encoding cannot hold them.

    divisor: the scale of a matrix is its largest magnitude divided by this; 0 if matrices have no
    scale.
    """

    function: str
    divisor: float = 0.0


_ENCODERS = {
    NVFP4.name: Encoder("quantize_block", NVFP4.element.maximum * NVFP4.scales[0].maximum),
    MXFP8.name: Encoder("quantize_mxfp8"),
    MXFP8_COLUMNS.name: Encoder("quantize_mxfp8"),
}


def encoder(encoding: Encoding) -> Encoder:
    """The encoder for an encoding. UnsupportedError if there is none."""
    if encoding.name not in _ENCODERS:
        raise UnsupportedError(
            f"quantizing to {encoding.name} has no kernel here", expected=" or ".join(_ENCODERS)
        )
    return _ENCODERS[encoding.name]
