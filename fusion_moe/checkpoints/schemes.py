"""How weights are stored in files: the names of the tensors for the parts of an encoding, and how each tensor is converted.

A tensor's name is the name of a weight and a suffix: `…experts.3.gate_proj` with `.weight`, `.weight_scale`, `.weight_scale_2`; or, if all
experts are one tensor, `…experts.gate_up_proj` with ``, `_weight_scale`, `_weight_scale_2`. The tensors decide which weights are encoded
and how, never a configuration's list of what was left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..encodings import INT4, MXFP4, NVFP4, Encoding


class Direction(Enum):
    """Whether the scale of a matrix multiplies or divides its codes."""

    MULTIPLIER = "multiplier"
    DIVISOR = "divisor"


@dataclass(frozen=True)
class StoredPart:
    """A part of an encoding in a file.

    part: its name in the encoding; dtypes: those that it may have; view: the dtype as which its bytes are read; flattened: stored with its
    last dimension split in two; transposed: stored with its last two dimensions swapped; direction: of a matrix's scale, stored as [] or
    [1].
    """

    part: str
    suffix: str
    dtypes: tuple[torch.dtype, ...]
    view: torch.dtype | None = None
    flattened: bool = False
    transposed: bool = False
    direction: Direction | None = None

    def to_part(self, t: Tensor) -> Tensor:
        """A stored tensor -> the part; a view if no number changes. The scale of a matrix becomes a 0-d multiplier."""
        if self.view is not None:
            t = t.contiguous().view(self.view)
        if self.flattened:
            t = t.flatten(-2)
        if self.transposed:
            t = t.mT
        if self.direction is None:
            return t
        t = t.reshape(())
        return 1.0 / t if self.direction is Direction.DIVISOR else t

    def from_part(self, t: Tensor) -> Tensor:
        """The inverse of `to_part`, with equal values; the scales of matrices, which must all be equal, become one 0-d tensor."""
        if self.direction is not None:
            t = t.flatten()[0]
            return 1.0 / t if self.direction is Direction.DIVISOR else t
        if self.transposed:
            t = t.mT
        if self.flattened:
            t = t.unflatten(-1, (-1, 16))
        return t.contiguous() if self.view is None else t.contiguous().view(self.dtypes[0])


@dataclass(frozen=True)
class Scheme:
    """One way to store weights.

    methods: the `quant_method` values of configurations. encoding: None for 8-bit floats with scales, which are read as floats (`fp8.py`).
    fused: a tensor holds all experts, [E, N, K], and there is one matrix scale for all of them. The first part holds the elements.
    """

    name: str
    methods: tuple[str, ...]
    encoding: Encoding | None
    parts: tuple[StoredPart, ...]
    fused: bool = False


_U8, _E4M3, _F32 = (torch.uint8,), (torch.float8_e4m3fn,), (torch.float32,)
_BYTES = (torch.uint8, torch.float8_e8m0fnu)
_MULTIPLIER, _DIVISOR = Direction.MULTIPLIER, Direction.DIVISOR

SCHEMES: tuple[Scheme, ...] = (
    Scheme(
        "ModelOpt NVFP4", ("modelopt",), NVFP4,
        (
            StoredPart("codes", ".weight", _U8),
            StoredPart("block_scale", ".weight_scale", _E4M3),
            StoredPart("decode_scale", ".weight_scale_2", _F32, direction=_MULTIPLIER),
        ),
    ),
    Scheme(
        "ModelOpt NVFP4, fused", ("modelopt",), NVFP4,
        (
            StoredPart("codes", "", _U8, transposed=True),
            StoredPart("block_scale", "_weight_scale", _E4M3, transposed=True),
            StoredPart("decode_scale", "_weight_scale_2", _F32, direction=_MULTIPLIER),
        ),
        fused=True,
    ),
    Scheme(
        "FP8 per tensor", ("modelopt",), None,
        (
            StoredPart("values", ".weight", _E4M3),
            StoredPart("scale", ".weight_scale", _F32),
        ),
    ),
    Scheme(
        "compressed-tensors NVFP4", ("compressed-tensors",), NVFP4,
        (
            StoredPart("codes", ".weight_packed", _U8),
            StoredPart("block_scale", ".weight_scale", _E4M3),
            StoredPart("decode_scale", ".weight_global_scale", _F32, direction=_DIVISOR),
        ),
    ),
    Scheme(
        "compressed-tensors INT4", ("compressed-tensors",), INT4,
        (
            StoredPart("codes", ".weight_packed", (torch.int32,), view=torch.uint8),
            StoredPart("block_scale", ".weight_scale", (torch.bfloat16,)),
        ),
    ),
    Scheme(
        "MXFP4", ("mxfp4",), MXFP4,
        (
            StoredPart("codes", "_blocks", _U8, flattened=True),
            StoredPart("block_scale", "_scales", _BYTES, view=torch.float8_e8m0fnu),
        ),
        fused=True,
    ),
    Scheme(
        "MXFP4 of DeepSeek-V4", ("fp8",), MXFP4,
        (
            StoredPart("codes", ".weight", (torch.int8,), view=torch.uint8),
            StoredPart("block_scale", ".scale", _BYTES, view=torch.float8_e8m0fnu),
        ),
    ),
    Scheme(
        "FP8 in blocks", ("fp8",), None,
        (
            StoredPart("values", ".weight", _E4M3),
            StoredPart("scale", ".weight_scale_inv", (*_F32, torch.bfloat16)),
        ),
    ),
    Scheme(
        "FP8 in blocks, DeepSeek-V4", ("fp8",), None,
        (
            StoredPart("values", ".weight", _E4M3),
            StoredPart("scale", ".scale", (torch.float8_e8m0fnu, *_F32)),
        ),
    ),
)  # fmt: skip

# Suffixes of tensors that no weight needs: scales of activations and of key-value caches, and shapes that packed tensors have anyway.
KNOWN = (
    ".input_scale", "_input_scale", ".input_global_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
    ".weight_shape",
)  # fmt: skip
