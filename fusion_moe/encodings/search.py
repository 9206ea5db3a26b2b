"""Rules by which the scale of each block is chosen. The scale of a matrix is the same by all.

    max            from the block's largest magnitude, as `Scale.choose` says
    four_over_six  that one, or the one that makes the largest magnitude 4 in place of 6
    mse            that one, or one of its neighbours, as the encoding's file says

A search takes the candidate whose codes have the least squared error, the first of equal ones; that
of "max" is the first. Its arithmetic is elementwise in float32, sums of squares too: CPUs and GPUs
choose the same scales. Source of "four_over_six": Cook et al., "Four Over Six", where however the
scale of a matrix is amax / 1536.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import UnsupportedError, need_one_of
from .encoding import Element, Encoding, Scale
from .real import real_tensors

RULES = ("max", "four_over_six", "mse")
_INTEGERS = {1: torch.uint8, 2: torch.int16}
_PANEL = 2**25  # elements that are searched at once
_CPU_PANEL = 2**15  # by each thread: what torch does not divide between its own, and caches hold


def usual_rule(encoding: Encoding) -> str:
    """The rule by which `quantize_` chooses scales."""
    return encoding.scales[0].usual if encoding.scales else "max"


def check_rule(rule: str, encoding: Encoding, where: str = "") -> None:
    """OptionError for an unknown rule, UnsupportedError for one that the encoding does not have."""
    need_one_of("scales", rule, RULES, where=where)
    known = ("max", *(encoding.scales[0].others if encoding.scales else ()))
    if rule not in known:
        raise UnsupportedError(
            f"scales = {rule!r} for {encoding.name}",
            expected=" or ".join(map(repr, known)),
            where=where,
        )


def least_error(
    x: Tensor, amax: Tensor, outer: Tensor | float, scale: Scale, element: Element, rule: str
) -> Tensor:
    """The scales [..., N, blocks] of x float [..., N, K], by a rule that searches. amax: those of
    the blocks; outer: the product of the other scales, a number or f32 [..., N or 1, 1].
    """
    rounded = scale.rounded(amax, outer)
    if not has_values(x) or not x.numel():
        return rounded
    blocks, sizes = x.reshape(-1, scale.block), amax.flatten()
    outers = torch.as_tensor(outer, device=x.device).expand_as(amax).flatten()
    cpu = x.device.type == "cpu"
    step = (_CPU_PANEL if cpu else _PANEL) // scale.block

    def best(start: int) -> Tensor:
        some = slice(start, start + step)
        columns = blocks[some].float().T.contiguous()
        return _best(columns, sizes[some], outers[some], scale, element, rule)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        each = pool.map if cpu else map  # another thread has another stream
        result = torch.cat([*each(best, range(0, len(blocks), step))])
    return result.view(scale.dtype).view_as(rounded)


def has_values(x: Tensor) -> bool:
    """Whether x is neither fake nor on the meta device."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def _best(
    x: Tensor, amax: Tensor, outer: Tensor, scale: Scale, element: Element, rule: str
) -> Tensor:
    """x f32 [block, n], amax and outer f32 [n] -> the scales as integers [n] of the same bits."""
    kind = _INTEGERS[scale.dtype.itemsize]
    best = usual = scale.rounded(amax, outer).view(kind)
    least = _squared_error(x, best, outer, scale, element)
    for factor, offset in scale.others[rule]:
        at = usual if factor == 1 else scale.rounded(amax * factor, outer).view(kind)
        tried = (at.short() + offset).clamp_(*_limits(scale)).to(kind)
        error = _squared_error(x, tried, outer, scale, element)
        best = torch.where(error < least, tried, best)
        least = torch.minimum(error, least)
    return best


def _squared_error(
    x: Tensor, tensor: Tensor, outer: Tensor, scale: Scale, element: Element
) -> Tensor:
    assert element.nearest, "of encodings that say other scales"
    step = outer * tensor.view(scale.dtype).float()
    squares = element.nearest(x / step).mul_(step).sub_(x).square_()
    while len(squares) > 1:  # in an order that does not depend on the device
        squares = squares[0::2] + squares[1::2]
    return squares[0]


@cache
@real_tensors()
def _limits(scale: Scale) -> tuple[int, int]:
    """The least scale and the largest, as integers of the same bits."""
    limits = scale.minimum, min(scale.maximum, torch.finfo(scale.dtype).max)
    kind = _INTEGERS[scale.dtype.itemsize]
    least, largest = torch.tensor(limits).to(scale.dtype).view(kind).tolist()
    return least, largest
