"""Checks before a launch, and the launch: nvFuser fails assertions or ends the CUDA context where
users need an error or a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...ir import Fusion
from ...schedule.product import products
from ...target import why_not_on
from . import scheduler as facts
from .definition import Definition
from .headers import check_headers
from .targets import BLACKWELL
from .values import form_of


def launcher(definition: Definition, fusion: Fusion) -> Callable[..., tuple[Any, ...]]:
    """launch(*inputs, sizes=...) -> the outputs."""
    four_bits = any(
        facts.lowering(product) == facts.PRODUCTS["nvfp4"] for product in products(fusion)
    )
    sorts = facts.sorts(fusion)

    def launch(*inputs: Tensor, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        # nvFuser's layout operation would fail an assertion, and there is hardly anything to do
        if any(t.numel() == 0 for t in inputs):
            return fusion.evaluate(*inputs, sizes=sizes)
        # with only constants, results are on the current device
        device = inputs[0].device if inputs else torch.device("cuda")
        _check_device(device, four_bits)
        if sorts:
            check_headers()
        outputs = definition.fd.execute(arguments(definition, inputs, sizes))
        return tuple(
            _as_stored(t, v.type.dtype) for t, v in zip(outputs, fusion.outputs, strict=True)
        )

    return launch


def arguments(
    definition: Definition, inputs: Sequence[Tensor], sizes: Mapping[str, int]
) -> list[Any]:
    """The arguments with which a definition is called."""
    return [
        sizes[a.symbol]
        if a.symbol
        else form_of(inputs[a.input], a.form, a.transposed)
        if a.form
        else inputs[a.input].contiguous()
        for a in definition.arguments
    ]


def _check_device(device: torch.device, four_bits: bool) -> None:
    """The tensors must be on a CUDA device; a 4-bit product launched below capability 10.0 would
    end the process's CUDA context.
    """
    elsewhere = "" if device.type == "cuda" else f"nvFuser requires CUDA tensors, got {device}"
    why = why_not_on(BLACKWELL, device) if four_bits else elsewhere
    if why:
        raise UnsupportedError(
            why, expected="a CUDA device that runs the definition", where="nvfuser"
        )


def _as_stored(t: Tensor, dtype: str) -> Tensor:
    return t.view(torch.uint8) if dtype == "u8" else t
