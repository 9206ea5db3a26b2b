"""SGLang's expert methods: what is refused, and how this library's module replaces the weights."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
from sglang.srt.model_loader.loader import ShardedStateLoader
from sglang.srt.runtime_context import get_exec, get_lora, get_model

from ...checkpoints import MODELOPT, PACKED_MXFP4, Scheme
from ...encodings import MXFP4, Quantized
from ...nn import Experts, swiglu
from ..serving import (
    LEAVE,
    NAME,
    dummy_scales,
    invariant,
    need_blocks,
    of_states,
    place_,
    refuse,
    save_no_states_,
    serve_,
    unsupported,
    weight_of,
)

_BIASES = ("w13_weight_bias", "w2_weight_bias")
_NO_UPDATE = f"New weights are not supported with --quantization {NAME}: restart the engine"
log_once = functools.cache(logging.getLogger(__name__).info)


class ExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer, served by `Experts`. Subclasses load the parts of the weights and
    say where they are.
    """

    scheme: Scheme
    parts: tuple[str, ...]  # SGLang's names
    unread: tuple[str, ...] = ()  # what SGLang makes beside them, except biases
    fuse_routed_scaling_factor_in_topk = True  # SGLang scales the routers' weights

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Creates SGLang's parameters, which its loader fills with this rank's experts.
        UnsupportedError for layers that cannot be served, ShapeError for sizes that the encoding
        does not take.
        """
        need_served(layer.moe_runner_config)
        self.activation = activation_of(layer.moe_runner_config, self.scheme)
        encoding = self.scheme.own_encoding
        need_blocks(encoding, hidden_size, intermediate_size_per_partition, layer.layer_name)
        super().create_weights(
            layer,
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            params_dtype,
            **attributes,
        )
        for weight in "w13", "w2":
            place_(layer, [f"{weight}_{part}" for part in self.parts])

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """None is made: SGLang then gives standard top-k outputs, whose ids are this rank's."""
        self.moe_runner_config = moe_runner_config

    def get_moe_runner_backend(self, layer: Any) -> None:
        """None: no kernel of SGLang."""

    def weight(self, layer: Any, name: str) -> Quantized:
        """The weight "w13" [E, 2I, H] or "w2" [E, H, I] that SGLang loaded, or drew. Raises as
        `weight_of`.
        """
        tensors = [getattr(layer, f"{name}_{part}").data for part in self.parts]
        if get_model().load_format == "dummy":
            for t, value in zip(tensors[1:], dummy_scales(self.scheme).values(), strict=True):
                t.fill_(value)
        return weight_of(self.scheme, tensors, f"{layer.layer_name}.{name}")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces the loaded weights by `Experts`, in the layout that kernels read. Raises as
        `weight`.
        """
        w13, w2 = self.weight(layer, "w13"), self.weight(layer, "w2")
        biases = [getattr(layer, name).data if layer.with_bias else None for name in _BIASES]
        results = [f"{w}_{part}" for w in ("w13", "w2") for part in (*self.parts, *self.unread)]
        for name in (*results, *(name for name in _BIASES if hasattr(layer, name))):
            delattr(layer, name)
        on_input = self.moe_runner_config.apply_router_weight_on_input
        layer.fusion_moe = Experts(
            w13,
            w2,
            scale_on="input" if on_input else "output",
            gate_up_bias=biases[0],
            down_bias=biases[1],
            activation=self.activation,
        )
        # SGLang's answer to requests to load new weights; its loader would skip experts
        layer._derived_weight_cache_error = _NO_UPDATE
        with _order():
            text = serve_(layer.fusion_moe, layer.params_dtype, self.moe_runner_config.top_k)
        log_once(text)

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """Tokens [T, H] and their slots -> [T, H]: the partial sum of this rank's experts or
        features, which SGLang sums over ranks. Slots of other ranks, and those that pad a batch,
        have the id -1.
        """
        weights, ids, _ = dispatch_output.topk_output
        with _order():
            y = layer.fusion_moe(dispatch_output.hidden_states, ids, weights)
        return StandardCombineInput(y)


def _order() -> AbstractContextManager[Any]:
    return invariant(get_exec().deterministic.enable_deterministic_inference)


class FusionMoeModelOptMethod(ExpertsMethod, ModelOptNvFp4FusedMoEMethod):
    """Experts in ModelOpt's NVFP4. SGLang's loader keeps separate scales of gate and up because of
    the second base, and because the class name contains "ModelOpt".
    """

    scheme = MODELOPT
    parts = tuple(part.name for part in MODELOPT.parts)
    unread = ("input_scale", "blockscale_swizzled")
    enable_flashinfer_trtllm_moe = use_flashinfer_trtllm_weight_layout = False

    def __init__(self, quant_config: Any):
        """quant_config: of the checkpoint."""
        # not that of the second base, which looks for a kernel of SGLang
        self.quant_config = quant_config


class FusionMoeMxfp4Method(ExpertsMethod, Mxfp4MoEMethod):
    """Experts in MXFP4: gpt-oss's, with biases and rows of gate and up interleaved, and others."""

    scheme = PACKED_MXFP4
    parts = ("weight", "weight_scale")
    use_flashinfer = use_marlin = use_mega_moe = use_triton_kernels = False
    use_deep_gemm = True  # of all kernels, the one for which SGLang pads nothing

    def __init__(self, prefix: str):
        """prefix: the layer's name."""
        self.prefix = prefix

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """As the base, with a rank's features in whole blocks: SGLang's model of gpt-oss divides
        them so, also 2880 by 4 ranks.
        """
        blocks = -(-intermediate_size_per_partition // MXFP4.block)
        super().create_weights(
            layer, num_experts, hidden_size, blocks * MXFP4.block, params_dtype, **attributes
        )


def need_served(config: Any) -> None:
    """UnsupportedError for layers that cannot be served, by SGLang's configuration of them."""
    runner, exchange = get_moe_runner_backend(), get_moe_a2a_backend()
    saves = get_exec().features
    save_no_states_("SGLang", ShardedStateLoader)
    refuse(
        "SGLang",
        (
            (
                not runner.is_auto(),
                f"experts by {runner.value}, kernels of SGLang",
                "this library's",
                "leave out --moe-runner-backend, or, where SGLang names one by itself (as for "
                f"gpt-oss on Blackwell), --quantization {NAME}",
            ),
            (
                not exchange.is_none(),
                f"--moe-a2a-backend {exchange.value}",
                "tokens that all ranks have",
                "leave it out",
            ),
            (
                bool(get_exec().moe.enable_eplb or get_exec().moe.ep_num_redundant_experts),
                "load balancing of experts",
                "experts that stay",
                "run without --enable-eplb",
            ),
            (
                get_lora().enable_lora,
                "LoRA",
                "experts without adapters",
                "merge the adapter into the weights first",
            ),
            of_states(str(get_model().load_format)),
            (
                saves.enable_memory_saver and not saves.enable_weights_cpu_backup,
                "--enable-memory-saver, which drops weights",
                "weights that come back, since none are loaded into a running engine",
                "--enable-weights-cpu-backup too",
            ),
            (
                bool(config.num_fused_shared_experts),
                "shared experts among the others",
                "shared experts by themselves",
                "--disable-shared-experts-fusion",
            ),
            (config.no_combine, "a result for each expert", "their sum", LEAVE),
        ),
    )


def activation_of(config: Any, scheme: Scheme) -> str:
    """The activation of `Experts`, from SGLang's configuration of a layer. UnsupportedError for
    another one.

    SGLang says gpt-oss's by its constants; its rows, which take turns, are loaded in MXFP4 alone.
    """
    if config.is_gated and config.activation == "silu":
        alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
        beta = getattr(config, "gemm1_beta", None)  # older versions have none
        if alpha is None and limit is None:
            return swiglu(limit=config.swiglu_limit)
        if config.gate_up_interleaved and beta is None and scheme is PACKED_MXFP4:
            return swiglu(1, limit=limit, alpha=alpha, up_offset=1.0)
    text = f"experts in {scheme.name} with activation {config.activation!r}" + "".join(
        f", {name} {value}"
        for name in ("is_gated", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
        if (value := getattr(config, name, None)) not in (None, True)
    )
    raise unsupported("SGLang", text, "SwiGLU, or gpt-oss's in MXFP4", LEAVE)
