"""Rules by which the scale of each block is chosen. The scale of a matrix is the same by all.

    max            from the block's largest magnitude, as `Scale.choose` says
    four_over_six  that one, or the one that makes the largest magnitude 4 in place of 6
    mse            that one, or one of its neighbours, as the encoding's file says

A search takes the candidate whose codes have the least squared error, the first of equal ones; that
of "max" is the first, and the choice where no error is finite. Its arithmetic is elementwise in
float32, sums of squares too: CPUs and GPUs choose the same scales. Source of "four_over_six": Cook
et al., "Four Over Six", where however the scale of a matrix is amax / 1536.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import UnsupportedError, need_one_of
from .encoding import Element, Encoding, Scale
from .real import real_tensors

RULES = ("max", "four_over_six", "mse")
_INTEGERS = {1: torch.uint8, 2: torch.int16}
_PANEL = 2**25  # elements that are searched at once
_CPU_PANEL = 2**19  # on a CPU: what caches hold


class BlockKernels(Protocol):
    """A device's kernels over blocks of an element type, with the bits of plain torch. Scales,
    outers and units are finite.
    """

    def largest(self, x: Tensor) -> Tensor:
        """x float [n, block] -> f32 [n]: the largest magnitudes, or NaN."""

    def least_errors(self, x: Tensor, scales: Tensor, outers: Tensor) -> Tensor:
        """x float [n, block], scales [tried, n], outers f32 [n] -> u8 [n]: which of the steps
        scales * outers rounds a block with the least squared error, the first of equal ones.
        """

    def encode(self, x: Tensor, units: Tensor) -> Tensor:
        """x float [n, block], units f32 [n] -> u8 [n, block / 2]: the codes of x / units."""


# by the type of a device: what a backend registers, which gives None where it has no kernels
BLOCK_KERNELS: dict[str, Callable[[Tensor, Element], BlockKernels | None]] = {}


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
    blocks, sizes, usual = x.reshape(-1, scale.block), amax.flatten(), rounded.flatten()
    outers = torch.as_tensor(outer, device=x.device).expand_as(amax).flatten()
    kernels = block_kernels(blocks, element)
    if kernels and not sizes.isfinite().all():
        kernels = None
    least = kernels.least_errors if kernels else partial(_least_errors, element)
    step = (_CPU_PANEL if x.device.type == "cpu" else _PANEL) // scale.block

    def best(start: int) -> Tensor:
        some = slice(start, start + step)
        tried = _tried(usual[some], sizes[some], outers[some], scale, rule)
        which = least(blocks[some], tried.view(scale.dtype), outers[some])
        return tried.gather(0, which.long()[None])[0]

    result = torch.cat([*map(best, range(0, len(blocks), step))])
    return result.view(scale.dtype).view_as(rounded)


def has_values(x: Tensor) -> bool:
    """Whether x is neither fake nor on the meta device."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def block_kernels(x: Tensor, element: Element) -> BlockKernels | None:
    """The device's kernels for blocks x [n, block]; None if it has none."""
    find = BLOCK_KERNELS.get(x.device.type)
    if find is None or type(x) is not Tensor or not has_values(x) or not x.numel():
        return None
    return None if torch._C._are_functorch_transforms_active() else find(x, element)


def _tried(usual: Tensor, amax: Tensor, outer: Tensor, scale: Scale, rule: str) -> Tensor:
    """usual, the scales of "max", amax and outer f32 [n] -> the candidates [1 + others, n], as
    integers of the same bits; those of "max" are the first.
    """
    kind = _INTEGERS[scale.dtype.itemsize]
    others = [
        (usual if factor == 1 else scale.rounded(amax * factor, outer)).view(kind).short() + offset
        for factor, offset in scale.others[rule]
    ]
    return torch.cat([usual.view(kind)[None], torch.stack(others).clamp_(*_limits(scale)).to(kind)])


def _least_errors(element: Element, x: Tensor, scales: Tensor, outers: Tensor) -> Tensor:
    """`BlockKernels.least_errors`, in plain torch."""
    columns = x.float().T.contiguous()
    which = torch.zeros(len(x), dtype=torch.uint8, device=x.device)
    least = torch.full_like(columns[0], torch.inf)
    for i, scale in enumerate(scales):
        error = _squared_error(columns, outers * scale.float(), element)
        which.masked_fill_(error < least, i)
        least = torch.fmin(error, least)
    return which


def _squared_error(x: Tensor, step: Tensor, element: Element) -> Tensor:
    assert element.nearest, "of encodings that say other scales"
    over = step.masked_fill(step == 0, 1.0)  # avoids 0 / 0; every code stands for 0 then
    squares = element.nearest(x / over).mul_(step).sub_(x).square_()
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
