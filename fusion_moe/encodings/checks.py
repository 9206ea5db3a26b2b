"""Checks whether tensors are the parts of an encoding, and whether their values are ones that a
quantizer can take or could have written.

Shapes, dtypes and devices are checked without reading values, so fake tensors work. `check_finite`,
`check_part_scales` and `check_matrix_scales` read values and wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CheckpointError, DeviceError, DtypeError, NonFiniteError, ShapeError, need
from .encoding import FLOATS, Encoding, Part, Scale


def check_parts(
    tensors: Sequence[Tensor], encoding: Encoding, prefix: str = "", where: str = ""
) -> tuple[int, ...]:
    """The logical shape (..., N, K) of parts that fit together; ShapeError, DtypeError or
    DeviceError naming the one that does not.

    `prefix` goes before the names of parts in messages ("b_" for an argument called b_codes),
    `where` before the message.
    """
    parts = encoding.parts
    if len(tensors) != len(parts):
        raise ShapeError(
            f"{len(tensors)} tensors",
            expected=f"{encoding.name}: {', '.join(p.name for p in parts)}",
            where=where,
        )
    names = [f"{prefix}{p.name}" for p in parts]
    for part, name, tensor in zip(parts, names, tensors, strict=True):
        _check_dtype(part, name, tensor, where)
    *lead, n, k = _logical_shape(tensors[0], names[0], encoding, where)
    for part, name, tensor in zip(parts[1:], names[1:], tensors[1:], strict=True):
        assert part.scale is not None
        if part.of_matrix:
            check_matrix_scale(tensor, lead, n, part.scale, name, where)
        elif tuple(tensor.shape) != (want := encoding.part_shape(part, lead, n, k)):
            raise ShapeError(
                f"{name} is {list(tensor.shape)}",
                expected=f"{list(want)}, one "
                f"{'zero point' if part.scale.zero_point else 'scale'} for "
                f"{part.scale.block if part.scale.block > 0 else 'a row of'} codes of {names[0]} "
                f"{list(tensors[0].shape)}",
                todo="undo a swizzle or padding with fusion_moe.layouts first: block scales are "
                "linear",
                where=where,
            )
    for name, tensor in zip(names[1:], tensors[1:], strict=True):
        check_same_device(tensors[0], tensor, name, where)
    return (*lead, n, k)


def _check_dtype(part: Part, name: str, tensor: Tensor, where: str) -> None:
    if tensor.dtype == part.dtype or (
        part.dtype == torch.uint8 and tensor.dtype == torch.float4_e2m1fn_x2
    ):
        return
    expected, todo = f"{part.dtype}", ""
    if part.of_matrix:
        todo = "pass the scale that the weight was quantized with; rounding it changes the weights"
    elif part.scale is not None:
        todo = f"scales stored as bytes: {name}.view({part.dtype}), not a cast"
    elif part.dtype == torch.uint8:
        expected = "torch.uint8 (or torch.float4_e2m1fn_x2), two codes a byte"
        todo = (
            "quantize floats with fusion_moe.encodings.quantize; view packed bytes as torch.uint8"
        )
    raise DtypeError(f"{name} is {tensor.dtype}", expected=expected, todo=todo, where=where)


def _logical_shape(elements: Tensor, name: str, encoding: Encoding, where: str) -> tuple[int, ...]:
    if elements.dim() < 2:
        per_item = encoding.element.per_item
        expected = f"[..., N, {f'K/{per_item}' if per_item > 1 else 'K'}], at least two dimensions"
        raise ShapeError(f"{name} is {list(elements.shape)}", expected=expected, where=where)
    k = encoding.elements(elements.shape[-1])
    along, size = ("N", elements.shape[-2]) if encoding.axis == -2 else ("K", k)
    if size % encoding.multiple != 0:
        raise ShapeError(
            f"{name} is {list(elements.shape)}, so {along} = {size}",
            expected=f"{along} a multiple of {encoding.multiple}, the block of {encoding.name}",
            todo="pack two codes a byte along K, the last dimension",
            where=where,
        )
    return (*elements.shape[:-1], k)


def check_matrix_scale(
    tensor: Tensor, lead: Sequence[int], n: int, scale: Scale, name: str = "", where: str = ""
) -> None:
    """Checks a scale [...] or [..., S] against the leading sizes and N of its matrices."""
    name = name or scale.part
    if tensor.dtype != scale.dtype:
        _check_dtype(Part(scale.part, scale.dtype, scale), name, tensor, where)
    of_matrix = tensor.shape[len(lead) :]
    divides = len(of_matrix) == 1 and of_matrix[0] > 0 and n % of_matrix[0] == 0
    if tensor.shape[: len(lead)] != (*lead,) or not (divides or not of_matrix):
        raise ShapeError(
            f"{name} is {list(tensor.shape)}",
            expected=f"{list(lead)} (one for each matrix) or {[*lead, 'S']} (one for each of S "
            f"equal runs of its rows, S dividing N = {n})",
            todo="expand a scale that all matrices share; it multiplies, so take the reciprocal "
            "of an encode scale (2688 / amax)",
            where=where,
        )


def check_same_device(first: Tensor, other: Tensor, name: str, where: str = "") -> None:
    """DeviceError unless two parts are on one device."""
    if first.device != other.device:
        raise DeviceError(
            f"{name} is on {other.device}",
            expected=f"{first.device}, where the others are",
            todo=f"{name}.to({str(first.device)!r})",
            where=where,
        )


def check_floats(x: Tensor, encoding: Encoding, *, elements: bool = False) -> None:
    """Raises unless x is float [..., N, K] with K in whole blocks; elements: each matrix must also
    have at least one element.
    """
    need(x, Tensor, expected="a tensor", todo="torch.as_tensor makes one", where=encoding.name)
    if x.dtype not in FLOATS:
        raise DtypeError(
            f"x is {x.dtype}",
            expected="float32, bfloat16 or float16",
            todo="cast it, for example with x.float()",
            where=encoding.name,
        )
    if x.dim() < 2:
        raise ShapeError(
            f"x is {list(x.shape)}",
            expected="[..., N, K], at least two dimensions",
            todo="x[None] makes one row",
            where=encoding.name,
        )
    encoding.need_whole(x.shape[encoding.axis])
    if elements and 0 in x.shape[-2:]:
        raise ShapeError(
            f"x is {list(x.shape)}",
            expected="at least one element in each matrix",
            where=encoding.name,
        )


# Values -------------------------------------------------------------------------------------------


def check_finite(x: Tensor, encoding: Encoding, name: str = "x") -> None:
    """NonFiniteError if float x [...] contains NaN or infinity, with how many and where the first
    one is. Waits for the device.

    encoding: the encoding to which x is to be quantized.
    """
    # aminmax propagates NaN and needs no memory of x's size
    if x.numel() and not torch.stack(x.aminmax()).isfinite().all():
        bad, nan = ~x.isfinite(), int(x.isnan().sum())
        holds = encoding.plain or encoding.element.holds_nan
        lacks = "" if holds else ", which has no NaN or infinity"
        raise _at_first(
            bad,
            x,
            name,
            f"{nan} NaN and {int(bad.sum()) - nan} infinite",
            expected=f"finite numbers to quantize to {encoding.name}{lacks}",
            todo=f"find what produced them, or replace them with torch.nan_to_num({name})",
        )


def check_matrix_scales(
    scale: Tensor,
    name: str = "decode_scale",
    *,
    expected: str = "decode scales, amax / 2688 each, or 0 for a matrix of zeros",
    todo: str = "pass a scale that multiplies; or leave it out, to have it computed",
) -> None:
    """NonFiniteError if float scales [...] contain NaN, infinity or a negative number. Waits for
    the device.
    """
    bad = ~(scale.isfinite() & (scale >= 0))
    if bad.any():
        raise _at_first(
            bad,
            scale,
            name,
            f"{int(bad.sum())} NaN, infinite or negative",
            expected=expected,
            todo=todo,
        )


def check_part_scales(part: Part, tensor: Tensor, name: str) -> None:
    """NonFiniteError if a part in linear order holds scales that no quantizer writes: NaN,
    infinity, and negative ones where the encoding has none; CheckpointError for zero points that
    are no codes. Elements are not checked. For loading a checkpoint: kernels may store scales in an
    unsigned type. Waits for the device.
    """
    if part.scale is not None and part.scale.zero_point:
        _check_zero_points(tensor, part.scale, name)
    elif part.of_blocks and part.scale is not None:
        _check_block_scales(tensor, part.scale, name)
    elif part.of_matrix:
        check_matrix_scales(tensor, name)


def _check_block_scales(tensor: Tensor, scale: Scale, name: str) -> None:
    values = tensor.float()
    nan = ~values.isfinite()
    bad = nan if scale.signed else nan | values.signbit()
    if bad.any():
        count = int(nan.sum())
        raise _at_first(
            bad,
            tensor,
            name,
            f"{count} NaN or infinite"
            if scale.signed
            else f"{count} NaN and {int(bad.sum()) - count} negative",
            expected="block scales that are "
            f"{'finite' if scale.signed else 'numbers and not negative'}, as every quantizer "
            "writes them",
            todo="the file is damaged, or these are bytes of another type or of another tensor",
        )


def _check_zero_points(tensor: Tensor, zero: Scale, name: str) -> None:
    largest = tensor.float().max().item() if tensor.numel() else 0
    if not largest <= zero.maximum:
        raise CheckpointError(
            f"zero points of up to {largest:g} in {name} {list(tensor.shape)}",
            expected=f"at most {zero.maximum:g}, the largest code",
            todo="the file is damaged, or stores them in another way than it says "
            "(checkpoint_format)",
        )


def _at_first(
    bad: Tensor, x: Tensor, name: str, text: str, *, expected: str, todo: str
) -> NonFiniteError:
    """The error for x [...] at the first True of bad [...]."""
    first = tuple(bad.nonzero()[0].tolist())
    text = (
        f"{text} among the {x.numel()} elements of {name} {list(x.shape)}, the first at "
        f"{first}: {x[first].float().item()}"
    )
    return NonFiniteError(text, expected=expected, todo=todo)
