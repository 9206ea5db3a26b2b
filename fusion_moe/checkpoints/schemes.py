"""How weights are stored in files: the names of the tensors for the parts of an encoding, and how
each tensor is converted.

A tensor's name is the name of a weight and a suffix: `…experts.3.gate_proj` with `.weight`,
`.weight_scale`, `.weight_scale_2`; or, if all experts are one tensor, `…experts.gate_up_proj` with
``, `_weight_scale`, `_weight_scale_2`. The names and dtypes of a weight's own tensors decide how it
is encoded, never a configuration: one directory may hold weights of several schemes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from ..encodings import (
    FLOATS,
    FP8_TENSOR,
    INT4,
    MXFP4,
    NF4,
    NIBBLES,
    NVFP4,
    Encoding,
    Quantized,
    dequantize,
)
from ..errors import Error, UnsupportedError
from ..layouts import as_bytes
from .words import Words


class Direction(Enum):
    """Whether the scale of a matrix multiplies or divides its codes."""

    MULTIPLIER = "multiplier"
    DIVISOR = "divisor"


_Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StoredPart:
    """A part of an encoding in a file.

    part: its name in the encoding; dtypes: those that it may have; view: the dtype as which its
    bytes are read; cast: the dtype to which its numbers are rounded; flattened: stored with its
    last dimension split in two; transposed: stored with its last two dimensions swapped; direction:
    of a matrix's scale, stored as [] or [1]; rows: how many rows of the encoding share a stored
    one; shape: in which it is written, if that is another one, such as a scale of rows as [N];
    words: how int32 words hold codes or zero points; high_first: whether the first of two codes in
    a byte has the high bits.
    """

    part: str
    suffix: str
    dtypes: tuple[torch.dtype, ...]
    view: torch.dtype | None = None
    cast: torch.dtype | None = None
    flattened: bool = False
    transposed: bool = False
    direction: Direction | None = None
    rows: int = 1
    shape: tuple[int, ...] | None = None
    words: Words | None = None
    high_first: bool = False

    @property
    def name(self) -> str:
        """The suffix as the name of a module's parameter."""
        return self.suffix.removeprefix(".")

    def to_part(self, t: Tensor, matrices: tuple[int, ...] = (), n: int | None = None) -> Tensor:
        """A stored tensor -> the part; a view if no number changes and none is repeated. Scales of
        matrices become multipliers of this shape. n: the rows of the matrix; None: whole blocks.
        """
        for forward, _ in self._steps(matrices, n):
            t = forward(t)
        return t

    def from_part(self, t: Tensor) -> Tensor:
        """The inverse of `to_part`, with equal values; the scales of matrices, which must all be
        equal, become one. UnsupportedError for rows that do not have equal ones.
        """
        for _, inverse in reversed(self._steps()):
            t = inverse(t)
        return t.contiguous()

    def _steps(
        self, matrices: tuple[int, ...] = (), n: int | None = None
    ) -> list[tuple[_Map, _Map]]:
        """What is done to a stored tensor, one after the other, each with its inverse."""
        view, cast = self.view or torch.uint8, self.cast or torch.float32
        words, shape = self.words or Words(4), self.shape or ()
        nibbles, of_matrix = self._of_nibbles, self.direction is not None
        column = shape == (-1,) and not of_matrix
        steps: tuple[tuple[bool, _Map, _Map], ...] = (
            (
                self.view is not None,
                lambda t: t.contiguous().view(view),
                lambda t: t.contiguous().view(self.dtypes[0]),
            ),
            (
                self.cast is not None,
                lambda t: t.to(cast),
                lambda t: t.to(self.dtypes[0]) if len(self.dtypes) == 1 else t,
            ),
            (self.flattened, lambda t: t.flatten(-2), lambda t: t.unflatten(-1, (-1, 16))),
            (self.high_first, lambda t: t << 4 | t >> 4, lambda t: t << 4 | t >> 4),
            (self.words is not None, words.codes, words.words),
            (self.transposed, lambda t: t.mT, lambda t: t.mT),
            (nibbles, NIBBLES.packed, NIBBLES.unpacked),
            (
                self.words is not None and not nibbles,
                lambda t: _first(t, n, 32 // words.bits),
                lambda t: t,
            ),
            (self.rows > 1, lambda t: _first(self._of_rows(t), n, self.rows), self._of_blocks),
            (
                self.shape is not None,
                lambda t: t.unsqueeze(-1) if column and t.dim() == 1 else t,
                lambda t: t.reshape(shape),
            ),
            (of_matrix, lambda t: t.reshape(matrices), lambda t: t.flatten()[0]),
            (self.direction is Direction.DIVISOR, lambda t: 1.0 / t, lambda t: 1.0 / t),
        )
        return [(forward, inverse) for applies, forward, inverse in steps if applies]

    @property
    def _of_nibbles(self) -> bool:
        """Whether words hold elements, of which the encoding has two in a byte."""
        return self.words is not None and self.words.bits == 4 and self.part == "codes"

    def _of_rows(self, t: Tensor) -> Tensor:
        """The scales of blocks -> of all rows that blocks have."""
        return as_bytes(t).repeat_interleave(self.rows, -2).view(t.dtype)

    def _of_blocks(self, t: Tensor) -> Tensor:
        """The scales of rows [N, K/128] -> of blocks [ceil(N/128), K/128]."""
        stored = t[:: self.rows]
        if t.is_meta:
            return stored
        if not torch.equal(*map(as_bytes, (self.to_part(stored, n=t.shape[0]), t))):
            raise UnsupportedError(
                f"{self.part} {list(t.shape)} that differ between the rows of a block",
                expected=f"equal ones in {self.rows} rows, as files have them",
            )
        return stored


def _first(t: Tensor, n: int | None, each: int) -> Tensor:
    """The first n rows of t [..., R, C], of which each word or block has some; all if there are
    words or blocks too many.
    """
    return t if n is None or t.shape[-2] - n >= each else t[..., :n, :]


@dataclass(frozen=True)
class Fixed:
    """A tensor that repeats what the other tensors of a weight say.

    made(n, k, encoding): what it has to be; refused(found, wanted): the error if it is anything
    else. of_columns: whether it is the group of each column; if columns are out of order, which is
    an UnsupportedError, numbers can be read nevertheless.
    """

    suffix: str
    dtype: torch.dtype
    made: Callable[[int, int, Encoding], Tensor] = field(compare=False)
    refused: Callable[[Tensor, Tensor], Error] = field(compare=False)
    of_columns: bool = False


@dataclass(frozen=True)
class Scheme:
    """One way in which files store weights: names and dtypes of the parts of a weight.

    encoding: None for those whose encoding follows from their shapes (`fp8.py`, `integers.py`).
    fused: a tensor holds all experts, [E, N, K], and there is one matrix scale for all of them. The
    first part holds the elements. fixed: tensors that may be there too; without: the suffix of one
    that other schemes have beside such parts.
    """

    name: str
    encoding: Encoding | None
    parts: tuple[StoredPart, ...]
    fused: bool = False
    fixed: tuple[Fixed, ...] = field(default=(), compare=False)
    without: str = ""

    @property
    def eight_bits(self) -> bool:
        """Whether elements are 8-bit floats."""
        return self.encoding is None or self.encoding.element.dtype == torch.float8_e4m3fn

    @property
    def integers(self) -> bool:
        """Whether elements are integers, of which shapes say the encoding."""
        return self.parts[0].dtypes == (torch.int32,)

    @property
    def own_encoding(self) -> Encoding:
        """Only for a scheme with an encoding."""
        assert self.encoding is not None, self.name
        return self.encoding

    def quantized(self, parts: Iterable[Tensor]) -> Quantized:
        """[N, K] or [E, N, K], of the parts as `StoredPart.to_part` returns them."""
        return Quantized(*parts, encoding=self.own_encoding)

    def floats(self, parts: Iterable[Tensor]) -> Tensor:
        """The same as f32."""
        return dequantize(self.quantized(parts))


_U8, _E4M3, _E8M0 = (torch.uint8,), (torch.float8_e4m3fn,), (torch.uint8, torch.float8_e8m0fnu)
_MULTIPLIER, _DIVISOR = Direction.MULTIPLIER, Direction.DIVISOR


def _of_matrix(suffix: str, direction: Direction) -> StoredPart:
    return StoredPart("decode_scale", suffix, FLOATS, cast=torch.float32, direction=direction)


def _fp8(name: str, suffix: str) -> Scheme:
    return Scheme(
        name,
        None,
        (
            StoredPart("values", ".weight", _E4M3),
            StoredPart("scale", suffix, (*FLOATS, torch.float8_e8m0fnu)),
        ),
    )


def of_encoding(
    scheme: Scheme, encoding: Encoding, dtype: torch.dtype, shape: tuple[int, ...]
) -> Scheme:
    """The scheme of an FP8 weight (E4M3 values and one tensor of scales) adapted to what a file
    holds: an encoding, and the dtype and shape of the scales.
    """
    (scale,), (elements, stored) = encoding.scales, scheme.parts
    part = replace(
        stored,
        part=scale.part,
        dtypes=(dtype,),
        cast=None if dtype == scale.dtype else scale.dtype,
        direction=None if scale.block else _MULTIPLIER,
        rows=scale.rows,
        shape=None if scale.rows > 1 else (-1, *shape[1:]) if scale.block else shape,
    )
    return replace(scheme, encoding=encoding, parts=(replace(elements, part="codes"), part))


MODELOPT = Scheme(
    "ModelOpt NVFP4",
    NVFP4,
    (
        StoredPart("codes", ".weight", _U8),
        StoredPart("block_scale", ".weight_scale", _E4M3),
        _of_matrix(".weight_scale_2", _MULTIPLIER),
    ),
)
MODELOPT_FUSED = Scheme(
    "ModelOpt NVFP4, fused",
    NVFP4,
    (
        StoredPart("codes", "", _U8, transposed=True),
        StoredPart("block_scale", "_weight_scale", _E4M3, transposed=True),
        _of_matrix("_weight_scale_2", _MULTIPLIER),
    ),
    fused=True,
)
PACKED_NVFP4 = Scheme(
    "compressed-tensors NVFP4",
    NVFP4,
    (
        StoredPart("codes", ".weight_packed", _U8),
        StoredPart("block_scale", ".weight_scale", _E4M3),
        _of_matrix(".weight_global_scale", _DIVISOR),
    ),
)
PACKED_MXFP4 = Scheme(
    "compressed-tensors MXFP4",
    MXFP4,
    (
        StoredPart("codes", ".weight_packed", _U8),
        StoredPart("block_scale", ".weight_scale", _E8M0, view=torch.float8_e8m0fnu),
    ),
)
QUARK_MXFP4 = Scheme(
    "Quark MXFP4",
    MXFP4,
    (
        StoredPart("codes", ".weight", _U8),
        StoredPart("block_scale", ".weight_scale", _E8M0, view=torch.float8_e8m0fnu),
    ),
    without=".weight_scale_2",
)
_INT32 = (torch.int32,)
MXFP4_FUSED = Scheme(
    "MXFP4",
    MXFP4,
    (
        StoredPart("codes", "_blocks", _U8, flattened=True),
        StoredPart("block_scale", "_scales", _E8M0, view=torch.float8_e8m0fnu),
    ),
    fused=True,
)
PACKED_INT4 = Scheme(
    "compressed-tensors INT4",
    INT4,
    (
        StoredPart("codes", ".weight_packed", _INT32, view=torch.uint8),
        StoredPart("block_scale", ".weight_scale", FLOATS, cast=torch.bfloat16),
    ),
)
PACKED_ZERO_POINT = StoredPart(
    "zero_point", ".weight_zero_point", _INT32, words=Words(4, along_rows=True)
)
PACKED_WITH_ZEROS = Scheme(
    "compressed-tensors INT4 with zero points", None, (*PACKED_INT4.parts, PACKED_ZERO_POINT)
)
QWEIGHT = Scheme(
    "GPTQ or AWQ",
    None,
    (
        StoredPart("codes", ".qweight", _INT32),
        StoredPart("block_scale", ".scales", FLOATS, transposed=True),
        StoredPart("zero_point", ".qzeros", _INT32, transposed=True),
    ),
)
NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"


def _table(n: int, k: int, encoding: Encoding) -> Tensor:
    assert encoding.element.decode is not None
    return encoding.element.decode(torch.arange(16, dtype=torch.uint8))


def nf4_state(n: int, k: int, encoding: Encoding) -> Tensor:
    """What bitsandbytes says of a matrix whose scales are not quantized."""
    texts = {"quant_type": "nf4", "blocksize": encoding.block, "dtype": "bfloat16", "shape": [n, k]}
    return torch.tensor([*json.dumps(texts).encode()], dtype=torch.uint8)


def _other_table(found: Tensor, wanted: Tensor) -> Error:
    return UnsupportedError("a table of other numbers", expected="the 16 of NF4")


# as nf4.py reads them: codes [N, K/2], scales [N, K/64]
NF4_FLAT = Scheme(
    "bitsandbytes NF4",
    NF4,
    (
        StoredPart("codes", ".weight", _U8, shape=(-1, 1), high_first=True),
        StoredPart("block_scale", ".weight.absmax", (torch.float32,), shape=(-1,)),
    ),
    fixed=(
        Fixed(".weight.quant_map", torch.float32, _table, _other_table),
        Fixed(NF4_STATE, torch.uint8, nf4_state, _other_table),
    ),
)
FP8 = _fp8("FP8", ".weight_scale")  # ModelOpt's and compressed-tensors'
FP8_OF_MATRIX = of_encoding(FP8, FP8_TENSOR, torch.float32, ())
FP8_INVERSE = _fp8("FP8 in blocks", ".weight_scale_inv")  # a multiplier, for all that

SCHEMES: tuple[Scheme, ...] = (
    MODELOPT,
    MODELOPT_FUSED,
    FP8,
    PACKED_NVFP4,
    PACKED_MXFP4,
    QUARK_MXFP4,
    PACKED_WITH_ZEROS,
    PACKED_INT4,
    QWEIGHT,
    NF4_FLAT,
    MXFP4_FUSED,
    Scheme(
        "MXFP4 of DeepSeek-V4",
        MXFP4,
        (
            StoredPart("codes", ".weight", (torch.int8,), view=torch.uint8),
            StoredPart("block_scale", ".scale", _E8M0[::-1], view=torch.float8_e8m0fnu),
        ),
    ),
    FP8_INVERSE,
    _fp8("FP8 in blocks, DeepSeek-V4", ".scale"),
)

# Suffixes of tensors that no weight needs: scales of activations and of key-value caches, and
# what repeats packed tensors.
KNOWN = (
    ".input_scale",
    "_input_scale",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".weight_shape",
    ".g_idx",
    ".weight_g_idx",
)
