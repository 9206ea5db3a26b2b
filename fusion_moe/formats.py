"""Number formats with block scales: what the bytes are, how floats become bytes, and what the bytes mean.

NVFP4 keeps a weight `[..., N, K]` (N out-features, K in-features) as three tensors:

    codes         uint8          [..., N, K/2]    two E2M1 codes a byte, the low nibble is the even k
    block_scale   float8_e4m3fn  [..., N, K/16]   one for 16 codes along K; linear order, never negative
    decode_scale  float32        [...] or [..., S]   S divides N: row n uses entry n // (N // S), so gate and up keep their own

and `element = code * (float32(block_scale) * decode_scale)`, in that association and in float32. An E2M1 code is a sign bit
(8) and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; code 8 is -0.0.

>>> q = quantize(torch.tensor([[6.0, -3.0, 0.5, 0.0] * 4]), decode_scale=torch.tensor(1.0))
>>> [hex(b) for b in q.codes[0, :2].tolist()], q.block_scale.float().tolist()   # 7 is 6.0, 13 is -3.0, 1 is 0.5
(['0xd7', '0x1'], [[1.0]])
>>> dequantize(q)[0, :4].tolist()
[6.0, -3.0, 0.5, 0.0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fusion_moe.errors import DeviceError, DtypeError, NonFiniteError, ShapeError


@dataclass(frozen=True)
class Format:
    """A block-scaled 4-bit format. The one place that knows how many bytes K elements take."""

    name: str
    block: int  # elements along K that share a block scale
    scale_dtype: torch.dtype  # of a block scale
    element_max: float
    scale_max: float
    scale_min: float  # the least scale that is written: the smallest positive number of scale_dtype

    def packed(self, k: int) -> int:
        """Bytes that k elements (int or SymInt) take along K. ShapeError when k is not a multiple of the block."""
        self._whole(k)
        return k // 2

    def blocks(self, k: int) -> int:
        """Block scales that k elements (int or SymInt) take along K. ShapeError when k is not a multiple of the block."""
        self._whole(k)
        return k // self.block

    def elements(self, packed_k: int) -> int:
        """Elements along K in packed_k bytes (int or SymInt): the inverse of `packed`."""
        return packed_k * 2

    def _whole(self, k: int) -> None:
        if k % self.block != 0:
            raise ShapeError(
                f"K = {k}",
                expected=f"a multiple of {self.block}, the block of {self.name}",
                todo=f"pad K with zeros to a multiple of {self.block}, or keep this weight in floating point",
                where=self.name,
            )


NVFP4 = Format("nvfp4", 16, torch.float8_e4m3fn, element_max=6.0, scale_max=448.0, scale_min=2.0**-9)
FORMATS = {fmt.name: fmt for fmt in (NVFP4,)}

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Quantized(NamedTuple):
    """A quantized `[..., N, K]`: see the head of this file for the three tensors."""

    codes: Tensor  # uint8 [..., N, K/2]
    block_scale: Tensor  # float8_e4m3fn [..., N, K/16]
    decode_scale: Tensor  # float32 [...] or [..., S]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        return (*self.codes.shape[:-1], NVFP4.elements(self.codes.shape[-1]))


# ---------------------------------------------------------------------------------------- float -> bytes


def decode_scale_of(x: Tensor, fmt: Format = NVFP4) -> Tensor:
    """x float [..., N, K] -> f32 [...]: the largest magnitude of each matrix over (element_max * scale_max), 2688 for NVFP4.

    With it the block of the largest element gets the largest block scale. A 2-D x gives a 0-d tensor; a zero matrix gives 0.
    DtypeError unless x is float32, bfloat16 or float16; ShapeError when x has fewer than two dimensions or no elements.
    """
    _check_floats(x, fmt)
    if x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ShapeError(f"x is {list(x.shape)}", expected="at least one element in each matrix", where="decode_scale_of")
    return _over(x.abs().amax((-2, -1)).float(), fmt.element_max * fmt.scale_max)


def quantize(x: Tensor, decode_scale: Tensor | None = None, fmt: Format = NVFP4) -> Quantized:
    """x float [..., N, K] -> codes uint8 [..., N, K/2], block_scale e4m3 [..., N, K/16], decode_scale f32 [...] or [..., S].

    decode_scale: f32 [...] or [..., S] with S dividing N; `decode_scale_of(x)` when None. For finite x these are the bits of
    nvidia-modelopt's `NVFP4QTensor.quantize` on the CPU (source: its order of operations, compared byte by byte):

    - block scale = e4m3(block amax / (6 * decode_scale)), clamped to [2^-9, 448] first; 1.0 for a block of zeros;
    - code = e2m1(x / (float32(block scale) * decode_scale)), ties to the even code, beyond 6 to 6; -0.0 gives code 0, a negative
      number that rounds to zero gives code 8.

    It differs for a matrix of zeros without a given decode_scale: ModelOpt writes NaN block scales, here it stays zeros (codes 0,
    block scales 1.0, decode_scale 0). NaN and infinity are not looked for (that would wait for the device): `check_finite` does.
    DtypeError, ShapeError and DeviceError name what does not fit.
    """
    _check_floats(x, fmt)
    *lead, n, k = x.shape
    if decode_scale is None:
        decode_scale = decode_scale_of(x, fmt)
    _check_decode_scale(decode_scale, lead, n, "decode_scale")
    _check_device(x, decode_scale, "decode_scale")
    decode = _per_row(decode_scale, lead, n)  # f32 [..., N or 1, 1]
    blocks = x.reshape(*lead, n, fmt.blocks(k), fmt.block)

    amax = blocks.abs().amax(-1).float()  # f32 [..., N, K/16]
    wanted = torch.where(amax == 0, 1.0, amax / (fmt.element_max * decode))
    block_scale = wanted.clamp(fmt.scale_min, fmt.scale_max).to(fmt.scale_dtype)
    step = torch.where(amax == 0, 1.0, block_scale.float() * decode)  # what one unit of code is worth; 0 / 0 must not arise
    codes = _e2m1(blocks / step.unsqueeze(-1)).reshape(*lead, n, k)
    return Quantized(codes[..., 0::2] | codes[..., 1::2] << 4, block_scale, decode_scale)


def _over(x: Tensor, divisor: float) -> Tensor:
    """x f32 / divisor, correctly rounded. CUDA would multiply by the reciprocal of a Python number, so it gets a tensor."""
    return x / torch.full_like(x, divisor)


def _e2m1(x: Tensor) -> Tensor:
    """x f32 [...] -> the nearest code, uint8 [...]: 7 less the midpoints above |x|. A tie goes to the even code, NaN to 7.

    Comparisons with Python numbers, since a table of midpoints would have to be copied to the device at every call.
    """
    size = x.abs()
    code = 7 - (size <= 0.25).view(torch.uint8)
    for midpoint, tie_goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code -= (size < midpoint if tie_goes_up else size <= midpoint).view(torch.uint8)
    return code.add_((x < 0).view(torch.uint8), alpha=8)


# ---------------------------------------------------------------------------------------- bytes -> float


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32, fmt: Format = NVFP4) -> Tensor:
    """codes, block_scale, decode_scale -> dtype [..., N, K]: `code * (float32(block_scale) * decode_scale)`, rounded once to dtype.

    Every product is one float32 operation in that order, as in ModelOpt, torchao, compressed-tensors and vLLM: equal numbers. Code 8 is
    -0.0, as in torchao, compressed-tensors and ml_dtypes; ModelOpt makes it 0.0. All 256 scale bytes mean what e4m3 says: the sign
    counts, NaN gives NaN. Raises as `check_quantized`.
    """
    *lead, n, k = check_quantized(q.codes, q.block_scale, q.decode_scale, fmt=fmt)
    pairs = _byte_to_pair(q.codes.device)
    index = q.codes.view(torch.uint8).reshape(-1).int()
    values = pairs.index_select(0, index).view(torch.float32).view(*lead, n, fmt.blocks(k), fmt.block)
    values *= (q.block_scale.float() * _per_row(q.decode_scale, lead, n)).unsqueeze(-1)
    return values.view(*lead, n, k).to(dtype)


def e2m1_values(device: torch.device | str = "cpu") -> Tensor:
    """-> f32 [16]: what each E2M1 code is worth. Made by arithmetic on the device, so a CUDA graph may capture it."""
    code = torch.arange(16, device=device)
    magnitude, mantissa, exponent = code & 7, code & 1, code >> 1 & 3
    positive = torch.where(magnitude < 2, magnitude * 0.5, (2 + mantissa) * (1 << exponent) * 0.25)
    return torch.where(code < 8, positive, -positive)


def _byte_to_pair(device: torch.device) -> Tensor:
    """-> int64 [256]: for each byte the two floats it stands for, side by side: one look-up moves both, twice as fast as two."""
    byte, value = torch.arange(256, device=device), e2m1_values(device)
    return torch.stack([value[byte & 15], value[byte >> 4]], -1).view(torch.int64).view(256)


# ---------------------------------------------------------------------------------------- checks


def check_quantized(
    codes: Tensor, block_scale: Tensor, decode_scale: Tensor, *, prefix: str = "", where: str = "", fmt: Format = NVFP4
) -> tuple[int, ...]:
    """The logical shape (..., N, K) of three tensors that fit together; ShapeError, DtypeError or DeviceError naming the one that does not.

    codes uint8 (or the same bytes as float4_e2m1fn_x2) [..., N, K/2], block_scale e4m3 [..., N, K/16], decode_scale f32 [...] or
    [..., S] with S dividing N. Reads shapes, dtypes and devices only, so fake tensors will do. `prefix` goes before the argument
    names in messages ("b_" for an argument called b_codes), `where` before the message.
    """
    if codes.dtype not in (torch.uint8, torch.float4_e2m1fn_x2):
        raise DtypeError(
            f"{prefix}codes is {codes.dtype}",
            expected="torch.uint8 (or torch.float4_e2m1fn_x2), two codes a byte",
            todo="quantize floats with fusion_moe.formats.quantize; view packed bytes as torch.uint8",
            where=where,
        )
    if block_scale.dtype != fmt.scale_dtype:
        raise DtypeError(
            f"{prefix}block_scale is {block_scale.dtype}",
            expected=f"{fmt.scale_dtype}",
            todo=f"scales stored as bytes: {prefix}block_scale.view({fmt.scale_dtype}), not a cast",
            where=where,
        )
    if codes.dim() < 2:
        raise ShapeError(f"{prefix}codes is {list(codes.shape)}", expected="[..., N, K/2], at least two dimensions", where=where)
    *lead, n, packed_k = codes.shape
    k = fmt.elements(packed_k)
    if k % fmt.block != 0:
        raise ShapeError(
            f"{prefix}codes is {list(codes.shape)}, so K = {k}",
            expected=f"K a multiple of {fmt.block}, the block of {fmt.name}",
            todo="pack two codes a byte along K, the last dimension",
            where=where,
        )
    if (*block_scale.shape,) != (*lead, n, fmt.blocks(k)):
        raise ShapeError(
            f"{prefix}block_scale is {list(block_scale.shape)}",
            expected=f"{[*lead, n, fmt.blocks(k)]}, one scale for {fmt.block} codes of {prefix}codes {list(codes.shape)}",
            todo="undo a swizzle or padding with fusion_moe.layouts first: block scales are linear",
            where=where,
        )
    _check_decode_scale(decode_scale, lead, n, f"{prefix}decode_scale", where)
    _check_device(codes, block_scale, f"{prefix}block_scale", where)
    _check_device(codes, decode_scale, f"{prefix}decode_scale", where)
    return (*lead, n, k)


def check_block_scales(block_scale: Tensor, name: str = "block_scale") -> None:
    """NonFiniteError when an e4m3 tensor holds NaN or a negative number (-0.0 too): no quantizer writes either. Waits for the device.

    For loading a checkpoint: kernels may store scales in an unsigned type.
    """
    if block_scale.dtype != torch.float8_e4m3fn:
        raise DtypeError(f"{name} is {block_scale.dtype}", expected="torch.float8_e4m3fn")
    byte = block_scale.view(torch.uint8)
    bad = byte > 0x7E  # 0x7F and 0xFF are NaN, from 0x80 the sign bit is set
    if bad.any():
        nan = int(((byte & 0x7F) == 0x7F).sum())
        raise _at_first(
            bad, block_scale, name, f"{nan} NaN and {int(bad.sum()) - nan} negative",
            expected="block scales that are numbers and not negative, as every quantizer writes them",
            todo="the file is damaged, or these are bytes of another type or of another tensor",
        )  # fmt: skip


def check_finite(x: Tensor, name: str = "x") -> None:
    """NonFiniteError when float x [...] holds NaN or infinity, with how many and where the first one is. Waits for the device."""
    bad = ~x.isfinite()
    if bad.any():
        nan = int(x.isnan().sum())
        raise _at_first(
            bad, x, name, f"{nan} NaN and {int(bad.sum()) - nan} infinite",
            expected="finite numbers: NVFP4 has nothing else, the rest would be quantized away",
            todo=f"find what made them, or replace them with torch.nan_to_num({name})",
        )  # fmt: skip


def check_decode_scales(decode_scale: Tensor, name: str = "decode_scale") -> None:
    """NonFiniteError when float scales [...] hold NaN, infinity or a negative number. Waits for the device."""
    bad = ~(decode_scale.isfinite() & (decode_scale >= 0))
    if bad.any():
        raise _at_first(
            bad, decode_scale, name, f"{int(bad.sum())} NaN, infinite or negative",
            expected="decode scales, amax / 2688 each, or 0 for a matrix of zeros",
            todo="pass a scale that multiplies; or leave it out, to have it computed",
        )  # fmt: skip


def _at_first(bad: Tensor, x: Tensor, name: str, found: str, *, expected: str, todo: str) -> NonFiniteError:
    """The error about x [...] at the first True of bad [...]."""
    first = tuple(bad.nonzero()[0].tolist())
    found = f"{found} among the {x.numel()} elements of {name} {list(x.shape)}, the first at {first}: {x[first].float().item()}"
    return NonFiniteError(found, expected=expected, todo=todo)


def _check_floats(x: Tensor, fmt: Format) -> None:
    if x.dtype not in FLOATS:
        raise DtypeError(f"x is {x.dtype}", expected="float32, bfloat16 or float16", todo="cast it, say with x.float()", where=fmt.name)
    if x.dim() < 2:
        raise ShapeError(
            f"x is {list(x.shape)}", expected="[..., N, K], at least two dimensions", todo="x[None] makes one row", where=fmt.name
        )
    fmt.blocks(x.shape[-1])


def _check_decode_scale(decode_scale: Tensor, lead: list[int], n: int, name: str, where: str = "") -> None:
    """decode_scale f32 [...] or [..., S] against the leading sizes and N of its matrices."""
    if decode_scale.dtype != torch.float32:
        raise DtypeError(
            f"{name} is {decode_scale.dtype}",
            expected="torch.float32",
            todo="take the scale that the weight was quantized with; a rounded one gives other weights",
            where=where,
        )
    shape = (*decode_scale.shape,)
    whole = shape == (*lead,)
    split = len(shape) == len(lead) + 1 and shape[:-1] == (*lead,) and shape[-1] > 0 and n % shape[-1] == 0
    if not (whole or split):
        raise ShapeError(
            f"{name} is {list(shape)}",
            expected=f"{lead} (one for each matrix) or {[*lead, 'S']} (one for each of S equal runs of its rows, S dividing N = {n})",
            todo="expand a scale that all matrices share; it multiplies, so take the reciprocal of an encode scale (2688 / amax)",
            where=where,
        )


def _check_device(codes: Tensor, other: Tensor, name: str, where: str = "") -> None:
    if codes.device != other.device:
        raise DeviceError(
            f"{name} is on {other.device}",
            expected=f"{codes.device}, where the others are",
            todo=f"{name}.to({str(codes.device)!r})",
            where=where,
        )


def _per_row(decode_scale: Tensor, lead: list[int], n: int) -> Tensor:
    """decode_scale f32 [...] or [..., S] -> f32 [..., 1, 1] or [..., N, 1], to multiply with [..., N, K/16]."""
    if decode_scale.dim() == len(lead):
        return decode_scale[..., None, None]
    runs = decode_scale.shape[-1]
    return decode_scale[..., None].expand(*lead, runs, n // runs).reshape(*lead, n, 1)
