"""Registers our operations under names that other projects' code calls: on request, never on
import.

lightning-thunder's inference benchmarks call
`torch.ops.nvf_cutlass.f16a_nvfp4weight_scaled_grouped_mm` and register it themselves. torch keeps
one registration for each name: `torch.library.custom_op` silently replaces an earlier `custom_op`
of the same name, and raises if the name was defined with `torch.library.Library.define`. So
registering is up to the caller, who can check whose operation the name calls:

    registration = fusion_moe.compat.register_nvf_cutlass()
    registration.replaced         # the schema of what had the name before, or None
    registration.overwritten()    # what has happened to the name since then, or None

The activations stay in 16 bits, as the operation's name says. nvFuser's 4-bit product,
cutlass_nvfp4_grouped_mm, needs both operands in 4 bits: its results differ (docs/formats.md says
how), and it needs compute capability 10.0. To get it, ask for it:

    fusion_moe.compat.register_nvf_cutlass(activation_format="nvfp4")

The arguments are those of thunder versions after 0.2.6, with the meaning that
`fusion_moe::f16a_nvfp4weight_scaled_grouped_mm` documents. Not everything that thunder passes has
it: its Llama4MoE leaves out the last group, and its quantization gives global scales that are
neither decode nor encode scales; `fusion_moe.quantize_` converts those modules as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops

from .definitions import translate
from .errors import UnsupportedError, Untranslatable, need_one_of
from .ir.builder import FusionDefinition
from .ir.core import Value
from .target import ACTIVATION_FORMATS

NAME = "nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm"
_OURS = NAME.replace("nvf_cutlass", "fusion_moe")
_SCHEMA = """(
    Tensor activation, Tensor fp4_weight, Tensor weight_scaling_factor, Tensor weight_global_scale,
    Tensor offsets, Tensor blockscale_offsets, Tensor problem_sizes) -> Tensor"""


@dataclass(frozen=True)
class Registration:
    """Our registration of NAME. activation_format: the format in which products take activations.
    replaced: the schema that the name had before, or None.

    kernels: the dispatcher's description of the registered kernels.
    """

    operation: custom_ops.CustomOpDef
    activation_format: str
    replaced: str | None
    kernels: frozenset[str]

    def overwritten(self) -> str | None:
        """What has happened to the name since it was registered, in a sentence; None if it is still
        ours.
        """
        if custom_ops.OPDEFS.get(NAME) is not self.operation:
            return (
                f"{NAME} was registered again, at {_where()}, after "
                "fusion_moe.compat.register_nvf_cutlass()"
            )
        other = sorted(_kernels() ^ self.kernels)
        return (
            (
                f"{NAME} has other kernels than fusion_moe.compat.register_nvf_cutlass() gave it: "
                f"{'; '.join(other)}"
            )
            if other
            else None
        )


_registration: Registration | None = None


def register_nvf_cutlass(activation_format: str = "bf16") -> Registration:
    """Registers our operation as NAME, replacing another `torch.library.custom_op` of that name.
    Does nothing if NAME is ours already.

    activation_format: "bf16", activations as they come in; or quantized too: "nvfp4" (compute
    capability 10.0 only) or "int8" (CPUs only). A format other than before registers again. The
    operation has a fake, no derivative, and our translator, which refuses calls once somebody else
    has taken the name. OptionError for another format; UnsupportedError if the name was defined
    with `torch.library.Library.define`, which cannot be replaced.
    """
    global _registration
    need_one_of(
        "activation_format", activation_format, ACTIVATION_FORMATS, where="register_nvf_cutlass"
    )
    known = _registration
    if (
        known is not None
        and known.activation_format == activation_format
        and known.overwritten() is None
    ):
        return known
    replaced, body = _schema(), _body_of(activation_format)
    try:
        made = torch.library.custom_op(
            NAME, body, mutates_args=(), schema=_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,)
        )
    except RuntimeError as error:
        if "multiple times" not in str(error):
            raise
        raise UnsupportedError(
            f"{NAME} is registered already, by torch.library.Library.define",
            expected="a free name, or one that can be replaced",
            todo="do not import what registers it, or make it with torch.library.custom_op",
            where="register_nvf_cutlass",
        ) from error
    made.register_fake(body)
    _register_translator(activation_format)
    _registration = Registration(made, activation_format, replaced, _kernels())
    return _registration


def _body_of(activation_format: str) -> Callable[..., Tensor]:
    def body(
        activation: Tensor,
        fp4_weight: Tensor,
        weight_scaling_factor: Tensor,
        weight_global_scale: Tensor,
        offsets: Tensor,
        blockscale_offsets: Tensor,
        problem_sizes: Tensor,
    ) -> Tensor:
        return torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm(
            activation,
            fp4_weight,
            weight_scaling_factor,
            weight_global_scale,
            offsets,
            blockscale_offsets,
            problem_sizes,
            activation_format=activation_format,
        )

    return body


def _translator_of(activation_format: str) -> Callable[..., Any]:
    """A new closure for each format, so that a program compiled for one format is not taken from a
    cache for another.
    """

    def translated(
        fd: FusionDefinition,
        activation: Value,
        fp4_weight: Value,
        weight_scaling_factor: Value,
        weight_global_scale: Value,
        offsets: Value,
        blockscale_offsets: Value,
        problem_sizes: Value,
    ) -> Any:
        if _registration is not None and (why := _registration.overwritten()):
            raise Untranslatable(why)
        ours = translate.find(_OURS)
        assert ours is not None
        return ours.function(
            fd,
            activation,
            fp4_weight,
            weight_scaling_factor,
            weight_global_scale,
            offsets,
            blockscale_offsets,
            problem_sizes,
            activation_format=activation_format,
        )

    return translated


def _register_translator(activation_format: str) -> None:
    """Registers our translator for NAME in place of an earlier one from here; TranslatorError if
    NAME has somebody else's translator.
    """
    found = translate.find(NAME)
    if found is not None and found.function.__module__ == __name__:
        translate.unregister(NAME)
    register = translate.translator(NAME, version=f"fusion_moe.compat {activation_format}")
    register(_translator_of(activation_format))


def _schema() -> str | None:
    """The schema of NAME; None if it has none."""
    namespace, name = NAME.split("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return None if packet is None else str(packet.default._schema)


def _kernels() -> frozenset[str]:
    """The dispatcher's lines about who registered NAME and each of its kernels."""
    return frozenset(torch._C._dispatch_dump(NAME).splitlines())


def _where() -> str:
    """The source location of the function that was last registered as NAME."""
    code = getattr(getattr(custom_ops.OPDEFS.get(NAME), "_init_fn", None), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else "an unknown place"
