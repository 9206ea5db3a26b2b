"""NVFP4 linear layers on CPUs, for which vLLM has no kernel: attention, shared experts. On GPUs
vLLM keeps them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter
from vllm.platforms import current_platform

from ...checkpoints import Scheme
from ...encodings import NVFP4, Quantized
from ...errors import ShapeError, UnsupportedError
from ...nn import QuantizedLinear, prepare_
from ..serving import Kept, dummy_scales, weight_of
from . import states
from .log import logger


def linear_method(layer: Any, prefix: str, scheme: Scheme, activations: str) -> LinearMethodBase:
    """The method of an NVFP4 linear layer on a CPU. UnsupportedError for a quantized lm_head."""
    if isinstance(layer, ParallelLMHead):
        todo = "quantize without lm_head: both packages leave it out by default"
        raise UnsupportedError(
            "lm_head in NVFP4", expected="an lm_head in floats, on CPUs", todo=todo, where=prefix
        )
    return NVFP4LinearMethod(prefix, scheme, activations)


def is_linear_on_cpu(layer: Any) -> bool:
    """Whether a layer, if it is quantized, is one that this module serves."""
    return current_platform.is_cpu() and isinstance(layer, (LinearBase, ParallelLMHead))


@register_weight_loader_v2_supported_method
class NVFP4LinearMethod(LinearMethodBase):
    """x @ weight.T + bias by `QuantizedLinear`. Layers that vLLM joins (q, k and v; gate and up)
    keep the decode scales of their parts.
    """

    def __init__(self, prefix: str, scheme: Scheme, activations: str):
        """scheme: of the weights; activations: the name of their scales, which are not read."""
        self.prefix, self.scheme, self.activations = prefix, scheme, activations
        self.kept: Kept | None = None  # once weights are loaded
        config = get_current_vllm_config_or_none()
        # who starts with drawn weights reloads others, whose parts may have scales of their own
        self.drawn = config is not None and config.load_config.load_format == "dummy"

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Any,
        **attributes: Any,
    ) -> None:
        """Creates vLLM's parameters, which its loader fills. ShapeError for an input size that
        NVFP4 does not take, UnsupportedError as `need_kept`.
        """
        states.need_kept(layer, [part.name for part in self.scheme.parts])
        n, k = sum(output_partition_sizes), input_size_per_partition
        if k % NVFP4.block:
            expected, todo = f"a multiple of {NVFP4.block}", "choose another --tensor-parallel-size"
            raise ShapeError(f"input size {k}", expected=expected, todo=todo, where=self.prefix)
        layer.logical_widths = output_partition_sizes
        for stored, part in zip(self.scheme.parts, NVFP4.parts, strict=True):
            if part.of_matrix:
                empty = torch.empty(len(output_partition_sizes), dtype=part.dtype)
                parameter = PerTensorScaleParameter(data=empty, weight_loader=weight_loader)
            else:
                empty = torch.empty(NVFP4.part_shape(part, (), n, k), dtype=part.dtype)
                parameter = ModelWeightParameter(
                    data=empty, input_dim=1, output_dim=0, weight_loader=weight_loader
                )
            layer.register_parameter(stored.name, parameter)
        unread = torch.empty(len(output_partition_sizes), dtype=torch.float32)
        layer.register_parameter(
            self.activations, PerTensorScaleParameter(data=unread, weight_loader=weight_loader)
        )
        for name, value in dummy_scales(self.scheme).items():
            getattr(layer, name).dummy_weight_value = value

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces the loaded weights by `QuantizedLinear`; when vLLM reloads, puts them where
        these have theirs. NonFiniteError for bad scales.
        """
        widths, names = layer.logical_widths, [part.name for part in self.scheme.parts]
        tensors = [getattr(layer, name).data for name in names]
        codes, scale, matrix = weight_of(self.scheme, tensors, self.prefix)
        one = bool((matrix == matrix[0]).all())
        joined = one and not self.drawn if self.kept is None else len(layer.fusion_moe) == 1
        if joined:
            if not one:
                raise UnsupportedError(
                    "joined layers with scales of their own",
                    expected="one scale, as in the weights that are reloaded",
                    todo="start another engine",
                    where=self.prefix,
                )
            widths = [sum(widths)]
        weights = [
            Quantized(*parts, encoding=NVFP4)
            for parts in zip(codes.split(widths), scale.split(widths), matrix, strict=False)
        ]
        for name in (*names, self.activations):
            delattr(layer, name)
        # vLLM asks a weight for its device: adapters, and MLA, which multiplies kv_b_proj by an
        # identity matrix
        empty = nn.Parameter(codes.new_empty(0), requires_grad=False)
        layer.register_parameter(names[0], empty)
        if self.kept is not None:
            named = zip(layer.fusion_moe, weights, strict=True)
            self.kept.update_(
                {
                    f"{i}.{name}": t
                    for i, (linear, weight) in enumerate(named)
                    for name, t in zip(linear.part_names["weight"], weight, strict=True)
                }
            )
            return
        layer.fusion_moe = nn.ModuleList(map(QuantizedLinear, weights))
        prepare_(layer.fusion_moe)
        self.kept = Kept(layer.fusion_moe)
        logger.info_once(
            "fusion_moe serves linear layers in nvfp4 on CPUs, activations as they are"
        )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        parts = [linear(x) for linear in layer.fusion_moe]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if bias is None else y + bias
