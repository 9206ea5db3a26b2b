"""As much of vLLM as the plug-in's modules import, for machines that it cannot be installed on: its
parameters have vLLM's shapes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

import fusion_moe.integrations.vllm


class Method:
    """FusedMoEMethodBase: keeps the configuration of the layer."""

    def __init__(self, moe: Any):
        self.moe = moe


def parameters(layer: nn.Module, **made: torch.Tensor) -> None:
    for name, tensor in made.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class ModelOpt(Method):
    """ModelOptNvFp4FusedMoE's weights."""

    def create_weights(
        self, layer: Any, experts: int, hidden: int, inner: int, dtype: Any, **attributes: Any
    ) -> None:
        shards = self.moe.w13_num_shards
        for name, n, k in ("w13", shards * inner, hidden), ("w2", hidden, inner):
            scalar = (experts, shards) if name == "w13" else (experts,)
            parameters(
                layer,
                **{
                    f"{name}_weight": torch.empty(experts, n, k // 2, dtype=torch.uint8),
                    f"{name}_weight_scale": torch.empty(
                        experts, n, k // 16, dtype=torch.float8_e4m3fn
                    ),
                    f"{name}_weight_scale_2": torch.empty(scalar),
                    f"{name}_input_scale": torch.empty(scalar),
                },
            )


class GptOss(Method):
    """GptOssMxfp4MoEMethod's weights."""

    def create_weights(
        self, layer: Any, experts: int, hidden: int, inner: int, dtype: Any, **attributes: Any
    ) -> None:
        for name, n, k in ("w13", 2 * inner, hidden), ("w2", hidden, inner):
            parameters(
                layer,
                **{
                    f"{name}_weight": torch.zeros(experts, n, k // 2, dtype=torch.uint8),
                    f"{name}_weight_scale": torch.zeros(experts, n, k // 32, dtype=torch.uint8),
                    f"{name}_bias": torch.zeros(experts, n, dtype=torch.bfloat16),
                },
            )


def logger(name: str) -> Any:
    made = logging.getLogger(name)
    made.info_once = made.info  # type: ignore[attr-defined]
    return made


GIVEN = {
    "vllm": {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
    "vllm.logger": {"init_logger": logger},
    "vllm.model_executor.layers.fused_moe": {"FusedMoEMethodBase": Method},
    "vllm.model_executor.layers.linear": {
        "register_weight_loader_v2_supported_method": lambda method: method
    },
    "vllm.model_executor.layers.quantization.modelopt": {"ModelOptNvFp4FusedMoE": ModelOpt},
    "vllm.model_executor.layers.quantization.mxfp4": {
        "GptOssMxfp4MoEMethod": GptOss,
        "Mxfp4MoEMethod": Method,
    },
}


_STUBBED = (
    "vllm",
    "fusion_moe.integrations.vllm.",
)  # how names of modules begin that are taken out of the way


class Stub(ModuleType):
    """A module of vLLM: what is not given is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return GIVEN.get(self.__name__, {}).get(name) or type(name, (), {})


class Finder(MetaPathFinder, Loader):
    """Has every module of vLLM, each a package."""

    def find_spec(self, fullname: str, *others: Any) -> ModuleSpec | None:
        is_vllm = fullname.split(".")[0] == "vllm"
        return ModuleSpec(fullname, self, is_package=True) if is_vllm else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has all."""


@contextmanager
def installed() -> Iterator[None]:
    """In the place of vLLM, inside the block; the plug-in's modules are imported anew, and after it
    those are back that were there.
    """
    before = dict(sys.modules)
    _forget()
    sys.meta_path.insert(0, Finder())
    try:
        yield
    finally:
        del sys.meta_path[0]
        _forget()
        for name in [name for name in before if name.startswith(_STUBBED)]:
            sys.modules[name] = before[name]
            if name.startswith("fusion_moe."):
                setattr(
                    fusion_moe.integrations.vllm,
                    name.removeprefix("fusion_moe.integrations.vllm."),
                    before[name],
                )


def _forget() -> None:
    """Takes modules out of sys.modules, and ours out of their package, which holds them too."""
    for name in [name for name in sys.modules if name.startswith(_STUBBED)]:
        del sys.modules[name]
        vars(fusion_moe.integrations.vllm).pop(
            name.removeprefix("fusion_moe.integrations.vllm."), None
        )
