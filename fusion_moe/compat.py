"""Registers our operation under the name that other projects' code calls: on request, never on
import.

lightning-thunder's inference benchmarks call
`torch.ops.nvf_cutlass.f16a_nvfp4weight_scaled_grouped_mm` and register it themselves. torch keeps
one registration for each name, the last one: register after importing them.

There are two signatures: the seven arguments of thunder versions after 0.2.6, with the meaning that
`fusion_moe::f16a_nvfp4weight_scaled_grouped_mm` documents; and the nine of thunder 0.2.6, with
ab_strides and c_strides, which nothing reads, and fp4_weight as it is stored, [G, N, K/2].
nvFuser's test has an eighth one, `dropme`, a placeholder of which nothing is computed: leave it
out. Not everything that thunder passes has
it: its Llama4MoE leaves out the last group, and its quantization gives global scales that are
neither decode nor encode scales; `fusion_moe.quantize_` converts those modules as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops

from .definitions import translate
from .errors import OptionError, Untranslatable, need_one_of
from .ir.builder import FusionDefinition
from .target import ACTIVATION_FORMATS

_ARGUMENTS = (
    "activation",
    "fp4_weight",
    "weight_scaling_factor",
    "weight_global_scale",
    "offsets",
    "blockscale_offsets",
    "problem_sizes",
)
_STRIDES = ("ab_strides", "c_strides")  # of thunder 0.2.6, before the offsets
_SIGNATURES = {7: _ARGUMENTS, 9: (*_ARGUMENTS[:4], *_STRIDES, *_ARGUMENTS[4:])}
NAME = "nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm"
_OURS = NAME.replace("nvf_cutlass", "fusion_moe")


def register_nvf_cutlass(activation_format: str = "bf16", arguments: int = 0) -> None:
    """Registers our operation as NAME, in place of another `torch.library.custom_op` of that name.

    The operation has a fake, a derivative with respect to the activation, which computes the
    product once more, and, with seven arguments, our translator, which refuses calls once somebody
    else has taken the name.

    Args:
        activation_format: "bf16": activations stay in 16 bits, as the operation's name says. Or
            they are quantized too: "nvfp4", as nvFuser's cutlass_nvfp4_grouped_mm has them (compute
            capability 10.0 only; docs/formats.md says how results differ), or "int8" (CPUs only).
        arguments: 7 or 9, the signature; 0: as many as who has the name now, or else 7.

    Raises:
        OptionError: for another format, or number of arguments.
    """
    where = "register_nvf_cutlass"
    need_one_of("activation_format", activation_format, ACTIVATION_FORMATS, where=where)
    if arguments not in (0, *_SIGNATURES):
        raise OptionError(f"arguments = {arguments}", expected="7, 9 or 0", where=where)
    names = _SIGNATURES[arguments or _registered()]

    def ours(*args: Tensor) -> Tensor:
        values = dict(zip(names, args, strict=True))
        if len(names) == 9:
            values["fp4_weight"] = values["fp4_weight"].transpose(1, 2)
        return torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm(
            *(values[name] for name in _ARGUMENTS), activation_format=activation_format
        )

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(ours(x, *others), x, dy)
        return dx, *[None] * len(others)

    custom_op = torch.library.custom_op(
        NAME,
        ours,
        mutates_args=(),
        schema=f"({', '.join(f'Tensor {name}' for name in names)}) -> Tensor",
        tags=(torch.Tag.cudagraph_unsafe,),
    )
    custom_op.register_fake(ours)
    custom_op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    translate.unregister(NAME)
    if len(names) == 7:
        translate.translator(NAME, version=f"fusion_moe.compat {activation_format}")(
            _translator(custom_op, activation_format)
        )


def _registered() -> int:
    """How many arguments the operation has that is registered now; 7 if there is none."""
    entry = custom_ops.OPDEFS.get(NAME)
    count = len(entry._opoverload._schema.arguments) if entry is not None else 7
    return count if count in _SIGNATURES else 7


def _translator(made: Any, activation_format: str) -> Callable[..., Any]:
    def translated(fd: FusionDefinition, *args: Any, **kwargs: Any) -> Any:
        if custom_ops.OPDEFS.get(NAME) is not made:
            raise Untranslatable(f"{NAME} was registered again, after register_nvf_cutlass()")
        ours, named = translate.find(_OURS), dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        assert ours is not None
        return ours.function(
            fd, *(named[name] for name in _ARGUMENTS), activation_format=activation_format
        )

    return translated
