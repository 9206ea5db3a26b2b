"""Registers our operation under the name that other projects' code calls: on request, never on
import.

lightning-thunder's inference benchmarks call
`torch.ops.nvf_cutlass.f16a_nvfp4weight_scaled_grouped_mm` and register it themselves. torch keeps
one registration for each name, the last one: register after importing them.

The arguments are those of thunder versions after 0.2.6, with the meaning that
`fusion_moe::f16a_nvfp4weight_scaled_grouped_mm` documents. Not everything that thunder passes has
it: its Llama4MoE leaves out the last group, and its quantization gives global scales that are
neither decode nor encode scales; `fusion_moe.quantize_` converts those modules as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops

from .definitions import translate
from .errors import Untranslatable, need_one_of
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
_SCHEMA = f"({', '.join(f'Tensor {name}' for name in _ARGUMENTS)}) -> Tensor"
NAME = "nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm"
_OURS = NAME.replace("nvf_cutlass", "fusion_moe")


def register_nvf_cutlass(activation_format: str = "bf16") -> None:
    """Registers our operation as NAME, in place of another `torch.library.custom_op` of that name.

    The operation has a fake, no derivative, and our translator, which refuses calls once somebody
    else has taken the name.

    Args:
        activation_format: "bf16": activations stay in 16 bits, as the operation's name says. Or
            they are quantized too: "nvfp4", as nvFuser's cutlass_nvfp4_grouped_mm has them (compute
            capability 10.0 only; docs/formats.md says how results differ), or "int8" (CPUs only).

    Raises:
        OptionError: for another format.
    """
    need_one_of(
        "activation_format", activation_format, ACTIVATION_FORMATS, where="register_nvf_cutlass"
    )

    def body(*args: Tensor) -> Tensor:
        ours = torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm
        return ours(*args, activation_format=activation_format)

    made = torch.library.custom_op(
        NAME, body, mutates_args=(), schema=_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,)
    )
    made.register_fake(body)

    def translated(fd: FusionDefinition, *args: Any, **kwargs: Any) -> Any:
        if custom_ops.OPDEFS.get(NAME) is not made:
            raise Untranslatable(f"{NAME} was registered again, after register_nvf_cutlass()")
        ours, named = translate.find(_OURS), dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        assert ours is not None
        return ours.function(
            fd, *(named[name] for name in _ARGUMENTS), activation_format=activation_format
        )

    translate.unregister(NAME)
    translate.translator(NAME, version=f"fusion_moe.compat {activation_format}")(translated)
