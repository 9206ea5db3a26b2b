"""transformers: its experts that are converted by name, and models that it saves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from ... import plugins
from ...errors import UnsupportedError
from ...messages import count, install
from ...nn import Llama4MoE, NVFP4Experts, QuantizationConfig

if TYPE_CHECKING:  # needs safetensors
    from ...checkpoints.directory import Directory
    from ...checkpoints.families import Family

# Experts that have no converter and do not follow the contract (nn's contract.py), and the reasons.
REFUSED = {
    "transformers.models.dbrx.modeling_dbrx.DbrxExperts": "its weights are [E * I, H], and down "
    "is not the transpose of the others",
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts": "attention has experts "
    "too, one product each",
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": "some experts "
    "have no weights and return what they get",
    "transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeExperts": "each expert is a module of "
    "its own, without a gate",
    "transformers.models.step3p7.modeling_step3p7.Step3p7Experts": "the gate is clamped after its "
    "activation",
    "transformers.models.switch_transformers.modeling_switch_transformers."
    "SwitchTransformersExperts": "each expert is a module of its own, without a gate",
}


@plugins.converters
def converters() -> Mapping[str, Any]:
    """Converters of transformers' modules, by class names: transformers need not be imported to
    look at a model.
    """
    return {
        "transformers.models.llama4.modeling_llama4.Llama4TextMoe": _llama4_text_moe,
        **REFUSED,
    }


@plugins.quantized
def quantized(model: nn.Module) -> None:
    """Prevents `save_pretrained` from writing the new parameters under the old names, which nothing
    could load.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is not None and isinstance(model, modeling.PreTrainedModel):
        from ..transformers.quantizer import attach

        attach(model)


@plugins.families
def families(directory: Directory) -> Family | None:
    """By the class that config.json names, where transformers is installed."""
    if find_spec("transformers") is None:
        return None
    from ..transformers.families import family_of

    return family_of(directory)


@plugins.training
def training() -> str:
    """How the experts of its models train with our operations."""
    return 'import fusion_moe.transformers and set experts_implementation="fusion_moe"'


@plugins.advice
def advice(module: nn.Module) -> Iterator[str]:
    """About routers that could be part of the programs of their experts."""
    if "transformers.modeling_utils" not in sys.modules:
        return
    from ..transformers.routers import unfused

    if names := list(unfused(module)):
        which = f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]
        yield (
            f"fusion_moe.transformers.fuse_routers_(model): {count(len(names), 'router')} "
            f"({which}) then {'choose' if names[1:] else 'chooses'} experts inside their programs"
        )


@plugins.packages
def packages() -> tuple[plugins.Package, ...]:
    """The packages that this integration needs: transformers itself."""
    why = "" if find_spec("transformers") else f"not installed; {install('models')}"
    return (plugins.Package("transformers", "transformers", why),)


def _llama4_text_moe(moe: nn.Module, config: QuantizationConfig) -> nn.Module:
    """Llama4TextMoe: gate_up_proj [E, H, 2I], gate before up, and down_proj [E, I, H], as in x @
    weight
    """
    act_fn = type(moe.get_submodule("experts").act_fn).__name__
    if act_fn not in ("SiLU", "SiLUActivation"):
        raise UnsupportedError(
            f"activation {act_fn}", expected="SiLU", todo="only SwiGLU experts are quantized"
        )
    gate_up, down = (
        moe.get_parameter(f"experts.{name}").detach().mT for name in ("gate_up_proj", "down_proj")
    )
    experts = NVFP4Experts.from_float(
        gate_up, down, config.activation_format, "input", config.scales
    )
    experts.transposed = experts.turned = True
    router, shared_expert = moe.get_submodule("router"), moe.get_submodule("shared_expert")
    return Llama4MoE(router, experts, shared_expert, int(moe.top_k))  # type: ignore[arg-type]
