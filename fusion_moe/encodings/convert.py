"""Converts floats to the parts of an encoding, and back: the reference for every kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UnsupportedError
from ..ops import nvfp4_quantize
from .checks import check_finite, check_floats, check_matrix_scale, check_parts, check_same_device
from .encoding import ENCODINGS, ROW, Element, Encoding, Quantized, Scale
from .search import block_kernels, check_rule, has_values, least_error


def quantize(
    x: Tensor, encoding: Encoding, matrix_scale: Tensor | None = None, scales: str = "max"
) -> Quantized:
    """x float [..., N, K] -> its parts; NVFP4: codes u8 [..., N, K/2], block_scale e4m3 [..., N,
    K/16], decode_scale f32 [...] or [..., S].

    matrix_scale: float32 [...] or [..., S] with S dividing N, if the encoding has one; None:
    `matrix_scale_of(x, encoding)`. Each encoding's file says how its scales are chosen; scales: by
    which of the rules in search.py; MXFP4 and INT4 have "max" and "mse", NVFP4 has all. A code is
    x / (scale_0 * scale_1 ...), plus the zero point, rounded as its element type rounds. NaN and
    infinity are not looked for, which would wait for the device: call `check_finite`. DtypeError,
    ShapeError, DeviceError, OptionError and UnsupportedError name what does not fit.
    """
    check_floats(x, encoding)
    check_rule(scales, encoding)
    if encoding.axis == -2:
        turned = _transposed(quantize(x.mT, _along_k(encoding), matrix_scale), encoding)
        return turned.of(t.contiguous() for t in turned)
    if encoding.plain:
        return Quantized(x.to(encoding.element.dtype), encoding=encoding)
    packed, x = encoding.packed(x.shape[-1]), _in_whole_blocks(x, encoding.block)
    *lead, n, k = x.shape
    step: Tensor | float = 1.0
    parts: dict[str, Tensor] = {}
    for scale in reversed(encoding.factors):
        parts[scale.part] = _scale(x, scale, step, matrix_scale, encoding, scales)
        step = step * _factor(parts[scale.part], scale, lead, n, k, encoding)
    elements = _elements(x, step, parts, encoding)[..., :packed].contiguous()
    return Quantized(elements, *(parts[s.part] for s in encoding.scales), encoding=encoding)


def quantize_weight(
    x: Tensor, encoding: Encoding, matrix_scale: Tensor | None = None, scales: str = "max"
) -> Quantized:
    """`quantize` for weights: to NVFP4 by "max" with the operation, which has kernels.
    NonFiniteError for NaN and infinity to NVFP4: on CUDA only the other rules look for them, and
    wait for the device.
    """
    if encoding.name == "nvfp4":
        if scales == "max":
            return Quantized(*nvfp4_quantize(x, matrix_scale), encoding=encoding)
        if has_values(x):
            check_finite(x, encoding)
    return quantize(x, encoding, matrix_scale, scales)


def matrix_scale_of(x: Tensor, encoding: Encoding) -> Tensor:
    """x float [..., N, K] -> f32 [...]: the scale of each matrix, amax / 2688 in NVFP4. A 2-D x
    gives a 0-d tensor.

    DtypeError unless x is float32, bfloat16 or float16; ShapeError if x has fewer than two
    dimensions or no elements.
    """
    check_floats(x, encoding, elements=True)
    return encoding.factors[-1].rounded(_size(x, (-2, -1), encoding), 1.0)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The parts of `[..., N, K]` -> dtype [..., N, K]: `(code - zero point) * (scale_0 * scale_1
    ...)` in float32, rounded once to dtype.

    The values equal those of ModelOpt, torchao, compressed-tensors and vLLM. Code 8 of E2M1 is
    -0.0, as in torchao, compressed-tensors and ml_dtypes; in ModelOpt it is 0.0. All bytes of a
    scale have the meaning of its dtype: the sign counts, NaN gives NaN. Raises as `check_parts`.
    """
    encoding = q.encoding
    if encoding.axis == -2:
        return dequantize(_transposed(q, _along_k(encoding)), dtype).mT
    *lead, n, k = check_parts(q, encoding)
    values = _in_whole_blocks(_values(q[0], encoding.element), encoding.block)
    whole = values.shape[-1]
    values = values.view(*lead, n, *_blocks(encoding, whole))
    step: Tensor | None = None
    for scale, part in zip(encoding.scales, q[1:], strict=True):
        factor = _factor(part, scale, lead, n, whole, encoding)
        if scale.zero_point:
            values = values - factor.unsqueeze(-1)
        else:
            step = factor if step is None else step * factor
    if step is not None:
        values = values * step.unsqueeze(-1) if encoding.plain else values.mul_(step.unsqueeze(-1))
    return values.view(*lead, n, whole)[..., :k].contiguous().to(dtype)


def exactly(q: Quantized, encoding: Encoding, runs: int = 0) -> Quantized:
    """The same values in another encoding, such as MXFP4 in NVFP4; runs: as many scales for each
    matrix, of equal runs of its rows (gate and up have one each); 0: one.

    UnsupportedError if there are none, or not for these values; the encoding's file says which.
    """
    if q.encoding == encoding:
        return q
    if encoding.name not in q.encoding.equivalents:
        held = (e.name for e in ENCODINGS.values() if encoding.name in e.equivalents)
        raise UnsupportedError(
            f"a weight in {q.encoding.name}",
            expected=" or ".join((encoding.name, *held)),
            todo="dequantize it and quantize that, with its rounding",
            where=f"exactly {encoding.name}",
        )
    return q.encoding.equivalents[encoding.name](q, runs)


# Scales -------------------------------------------------------------------------------------------


def _scale(
    x: Tensor,
    scale: Scale,
    outer: Tensor | float,
    tensor: Tensor | None,
    encoding: Encoding,
    rule: str,
) -> Tensor:
    """A scale of x, in its dtype: chosen, or the given one if it is the matrix's."""
    *lead, n, _ = x.shape
    if scale.block:
        size = _largest(x, scale, encoding)
        outer = _coarser(outer, size.shape[-1])
        if rule in scale.others:
            return least_error(x, size, outer, scale, encoding.element, rule)
        return scale.rounded(size, outer)
    matrix_scale = matrix_scale_of(x, encoding) if tensor is None else tensor
    check_matrix_scale(matrix_scale, lead, n, scale)
    check_same_device(x, matrix_scale, scale.part)
    return matrix_scale


def _largest(x: Tensor, scale: Scale, encoding: Encoding) -> Tensor:
    """The sizes of a scale's blocks of x [..., N, K] -> f32 [..., N, blocks]."""
    blocks = x.unflatten(-1, _of_size(scale.block, x.shape[-1]))
    zeros = encoding.zero_points
    sizes = _size(blocks, (-1,), encoding) if zeros else _amax(blocks, encoding.element)
    return _of_rows(sizes, scale.rows)


def _amax(blocks: Tensor, element: Element) -> Tensor:
    """The largest magnitudes of blocks float [..., block] -> f32 [...]."""
    flat = blocks.reshape(-1, blocks.shape[-1])
    if kernels := block_kernels(flat, element):
        return kernels.largest(flat).view(blocks.shape[:-1])
    return blocks.abs().amax(-1).float()


def _of_rows(size: Tensor, rows: int) -> Tensor:
    """The largest of so many rows each f32 [..., N, blocks], for each of them; the last may be
    fewer.
    """
    if rows == 1 or not size.numel():
        return size
    most = torch.stack([run.amax(-2) for run in size.split(rows, -2)], -2)
    return most.repeat_interleave(rows, -2)[..., : size.shape[-2], :]


def _size(x: Tensor, dims: tuple[int, ...], encoding: Encoding) -> Tensor:
    """The largest magnitude of x float [...] along some dimensions, or, where there are zero
    points, the distance from the least element to the largest, 0 among them -> f32.
    """
    if not encoding.zero_points:
        return x.abs().amax(dims).float()
    return (x.amax(dims).clamp(min=0) - x.amin(dims).clamp(max=0)).float()


def _zero_points(codes: Tensor, zero: Scale, element: Element) -> Tensor:
    """The zero points with which codes f32 [..., block] begin at the least code -> [...]."""
    least = min(element.values)
    wanted = (least - codes.amin(-1).clamp(max=0)).round()
    return wanted.clamp(least, element.maximum).to(zero.dtype)


def _coarser(outer: Tensor | float, blocks: int) -> Tensor | float:
    """The product of coarser scales f32 [..., finest blocks] at one block in so many."""
    if isinstance(outer, float) or outer.shape[-1] in (1, blocks):
        return outer
    return outer[..., :: outer.shape[-1] // blocks]


def _factor(
    part: Tensor, scale: Scale, lead: list[int], n: int, k: int, encoding: Encoding
) -> Tensor:
    """The factor of a scale -> f32 [..., N, blocks], with 1 where a dimension is shared; blocks:
    the finest of the encoding.
    """
    value = part.float().reciprocal() if scale.divides else part.float()
    if not scale.block:
        return _per_row(value, lead, n)
    blocks, own = _blocks(encoding, k)[0], value.shape[-1]
    return value if own == blocks else value.repeat_interleave(blocks // own, -1)


def _blocks(encoding: Encoding, k: int) -> tuple[int, int]:
    """How many runs of elements along K share all of their scales, and how many elements each
    has.
    """
    return _of_size(min((s.block for s in encoding.scales if s.block > 0), default=ROW), k)


def _in_whole_blocks(x: Tensor, block: int) -> Tensor:
    """x [..., K] with zeros after the last block, if that is short."""
    missing = -x.shape[-1] % block
    return pad(x, (0, missing)) if missing else x


def _of_size(block: int, k: int) -> tuple[int, int]:
    return (1, k) if block == ROW else (k // block, block)


def _per_row(scale: Tensor, lead: list[int], n: int) -> Tensor:
    """A scale f32 [...] or [..., S] -> f32 [..., 1, 1] or [..., N, 1]."""
    if scale.dim() == len(lead):
        return scale[..., None, None]
    runs = scale.shape[-1]
    return scale[..., None].expand(*lead, runs, n // runs).reshape(*lead, n, 1)


# Elements -----------------------------------------------------------------------------------------


def _elements(
    x: Tensor, step: Tensor | float, parts: dict[str, Tensor], encoding: Encoding
) -> Tensor:
    """The packed codes of x [..., N, K], whose scales multiply to `step`; adds zero points to the
    parts.
    """
    blocks = x.reshape(*x.shape[:-1], *_blocks(encoding, x.shape[-1]))
    if over := encoding.scales[0].over:
        codes = blocks * over(_largest(x, encoding.scales[0], encoding)).unsqueeze(-1)
    else:
        # the value of a code of 1; avoids 0 / 0
        unit = torch.where(_amax(blocks, encoding.element) == 0, 1.0, step)
        if (packed := _by_kernels(blocks, unit, encoding)) is not None:
            return packed
        codes = blocks / unit.unsqueeze(-1)
    for zero in encoding.zero_points:
        parts[zero.part] = _zero_points(codes, zero, encoding.element)
        codes = codes + parts[zero.part].float().unsqueeze(-1)
    return _coded(codes.reshape(x.shape), encoding.element)


def _coded(x: Tensor, element: Element) -> Tensor:
    """x f32 [..., K] -> the codes of an element, packed along K: the first in the lowest bits."""
    if element.encode is None:
        return x.to(element.dtype)
    codes = element.encode(x)
    packed = codes[..., 0 :: element.per_item]
    for i in range(1, element.per_item):
        packed = packed | codes[..., i :: element.per_item] << i * element.bits
    return packed


def _by_kernels(blocks: Tensor, unit: Tensor, encoding: Encoding) -> Tensor | None:
    """The packed codes of blocks [..., blocks, block] / unit f32 [..., blocks] by kernels of the
    device, [..., K / 2]; None if it has none for them.
    """
    flat, units = blocks.reshape(-1, blocks.shape[-1]), unit.expand(blocks.shape[:-1]).flatten()
    kernels = None if encoding.zero_points else block_kernels(flat, encoding.element)
    if kernels is None or not (units.isfinite() & (units > 0)).all():
        return None
    return kernels.encode(flat, units).unflatten(0, blocks.shape[:-1]).flatten(-2)


def _values(codes: Tensor, element: Element) -> Tensor:
    """The inverse of `_coded` -> f32 [..., K], new memory. One look-up decodes all elements of a
    byte: twice as fast as two look-ups.
    """
    if element.decode is None:
        return codes.float() if codes.dtype != torch.float32 else codes.clone()
    byte, mask = torch.arange(256, device=codes.device), 2**element.bits - 1
    table = torch.stack(
        [element.decode(byte >> i * element.bits & mask) for i in range(element.per_item)], -1
    ).contiguous()
    index = codes.view(torch.uint8).reshape(-1).int()
    if element.per_item <= 2:
        table = table.view({1: torch.float32, 2: torch.int64}[element.per_item]).view(256)
    result = table.index_select(0, index).view(torch.float32)
    return result.view(*codes.shape[:-1], codes.shape[-1] * element.per_item)


# Blocks along N -----------------------------------------------------------------------------------


def _along_k(encoding: Encoding) -> Encoding:
    return Encoding(encoding.name, encoding.element, encoding.scales)


def _transposed(q: Quantized, encoding: Encoding) -> Quantized:
    """The parts with their last dimensions swapped, except scales of a whole matrix."""
    return Quantized(*(t if part.of_matrix else t.mT for part, t in q.named()), encoding=encoding)
