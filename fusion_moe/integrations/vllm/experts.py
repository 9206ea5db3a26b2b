"""Base of vLLM's expert methods for all checkpoints: what is refused, and how this library's module
replaces the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from ...checkpoints import Scheme
from ...encodings import Quantized, check_finite
from ...errors import UnsupportedError
from ...nn import Experts, activation, swiglu
from ..serving import (
    LEAVE,
    Adapters,
    Kept,
    dummy_scales,
    invariant,
    need_blocks,
    place_,
    refuse,
    serve_,
    unsupported,
    weight_of,
)
from . import exchange, states
from .loading import LoadsExperts, is_rounded, rounded
from .log import logger
from .names import name_in_files

# with it vLLM's groups gather tokens and reduce-scatter the ranks' results
_GATHERS = "allgather_reducescatter"


class ExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer, served by `Experts`. Subclasses load the parts of the weights and
    say where they are.
    """

    scheme: Scheme
    parts: tuple[str, ...] = ()  # vLLM's names of the parts, if they are not those in files
    unread: tuple[str, ...] = ()  # what vLLM loads beside them, except biases
    interleave = 0  # the interleave of gate and up rows as they are loaded
    supports_pre_processed_weights = False
    supports_eplb = True  # vLLM moves what is [E, ...] between ranks, in whatever order
    first_expert: int | None = None  # of this rank, None if all experts are here
    kept: Kept | None = None  # once weights are loaded
    adapters: Adapters | None = None  # of each number of tokens, with --enable-lora
    sends_tokens = False  # whether ranks send each other's experts the tokens that they have

    def __init__(self, moe: Any):
        """moe: vLLM's configuration of the layer. UnsupportedError if it cannot be served."""
        # not that of the next class, which selects a kernel of vLLM
        FusedMoEMethodBase.__init__(self, moe)
        need_served(moe)
        self.activation = activation_of(moe, self.interleave)

    @property
    def supports_internal_mk(self) -> bool:
        """Whether vLLM leaves tokens on their rank: `apply` then returns sums over ranks."""
        ranks = self.moe.moe_parallel_config
        return bool(ranks.dp_size > 1 or ranks.is_sequence_parallel)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: it would configure kernels of vLLM that are not used."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: Any,
        **attributes: Any,
    ) -> None:
        """Creates vLLM's parameters, which its loader fills: for all experts, or for those of this
        rank.

        ShapeError for sizes that the encoding does not take, UnsupportedError if a rank's experts
        are not consecutive, or as `need_kept`.
        """
        encoding = self.scheme.own_encoding
        need_blocks(encoding, hidden_size, intermediate_size_per_partition, layer.layer_name)
        states.need_kept(layer, self.loaded)
        self.first_expert = first_expert(layer.expert_map, layer.layer_name)
        super().create_weights(
            layer,
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            params_dtype,
            **attributes,
        )
        if self.moe.has_bias and not hasattr(layer, "w13_bias"):
            rows = self.moe.w13_num_shards * intermediate_size_per_partition
            for name, width in ("w13_bias", rows), ("w2_bias", hidden_size):
                bias = torch.zeros(num_experts, width, dtype=params_dtype)
                layer.register_parameter(name, nn.Parameter(bias, requires_grad=False))
                getattr(layer, name).weight_loader = attributes["weight_loader"]
        if isinstance(getattr(layer, "quant_config", None), LoadsExperts):
            layer.quant_config.experts[name_in_files(layer.layer_name)] = layer
        place_(layer, self.loaded)
        for name, value in zip(self._names[1:], dummy_scales(self.scheme).values(), strict=True):
            for weight in "w13", "w2":
                getattr(layer, f"{weight}_{name}").dummy_weight_value = value

    def loads(self, layer: Any, name: str) -> bool:
        """Whether `load` has a tensor of a layer's experts, by its name after "experts.": those of
        gpt-oss. vLLM loads others.
        """
        return self.moe.activation.value == "swigluoai"

    def load(self, layer: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads tensors of a layer's experts, by their names after "experts."."""
        deque(layer.load_weights(rounded(layer, tensors)), maxlen=0)

    def whole(self, name: str) -> tuple[int, ...]:
        """The shape of a weight of all experts, by its name after "experts.", that `renew_` takes:
        where experts are served and, if that is the shape of a model, whole on this rank. () where
        vLLM has to load it.
        """
        if self.kept is None or self.moe.moe_parallel_config.enable_eplb:
            return ()
        experts, projection = self.kept.restored(), name.removesuffix("_proj")
        if projection not in experts.projections:
            return ()
        return (self.moe.num_experts, *experts.shape_of(projection)[1:])

    def renew_(self, layer: Any, name: str, t: Tensor) -> bool:
        """Whether a tensor was rounded into the weights that are served: floats of all experts, as
        `whole`. Others vLLM divides first.
        """
        if not is_rounded(self, name, t) or t.shape != self.whole(name) or self.kept is None:
            return False
        experts: Any = self.kept.module
        check_finite(t, experts.encoding, f"{layer.layer_name}.{name}")
        count, *_ = experts.shape_of(name.removesuffix("_proj"))
        self.kept.update_({name: t.narrow(0, self.first_expert or 0, count)})
        get_layerwise_info(layer).load_numel_total = 0  # vLLM misses no tensors
        return True

    @property
    def _names(self) -> list[str]:
        """vLLM's names of the parts of a weight."""
        return [*(self.parts or (part.name for part in self.scheme.parts))]

    @property
    def loaded(self) -> list[str]:
        """The names of the layer's parameters that vLLM's loader fills, without biases: each part
        of w13 (gate and up) and of w2 (down). `Experts` takes their place.
        """
        names = *self._names, *self.unread
        return [f"{weight}_{name}" for weight in ("w13", "w2") for name in names]

    def weight(self, layer: Any, name: str) -> Quantized:
        """The weight that vLLM loaded: "w13" [E, 2I, H], gate above up, or [E, I, H] without a
        gate; "w2" [E, H, I]. Raises as `weight_of`.
        """
        tensors = [getattr(layer, key).data for key in self.loaded if key.startswith(f"{name}_")]
        # without a gate, scales of matrices are [E, 1]
        alone = [t.squeeze(1) if t.dim() == 2 else t for t in tensors]
        return weight_of(self.scheme, alone, f"{layer.layer_name}.{name}")

    def _loaded_weight(self, layer: Any, name: str) -> Quantized | None:
        """The same; None for one that a reload leaves out, as those that `renew_` took."""
        if self.kept is not None:
            reloaded = {parameter for parameter, _ in get_layerwise_info(layer).loaded_weights}
            if reloaded and f"{name}_{self._names[0]}" not in reloaded:
                return None
        return self.weight(layer, name)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces the loaded weights by `Experts`, in the layout that kernels read; when vLLM
        reloads, puts them where these have theirs. Raises as `weight`. UnsupportedError for a
        reload with load balancing: vLLM loads experts to where they were before they moved.
        """
        balanced = self.moe.moe_parallel_config.enable_eplb
        if balanced and self.kept is not None:
            raise unsupported(
                "vLLM",
                "new weights with --enable-eplb, which has moved experts",
                "experts that stay",
                "start another engine",
            )
        w13, w2 = (self._loaded_weight(layer, name) for name in ("w13", "w2"))
        biases = {
            name: getattr(layer, name).data if self.moe.has_bias else None
            for name in ("w13_bias", "w2_bias")
        }
        if biases["w2_bias"] is not None and self.moe.tp_rank:
            biases["w2_bias"].zero_()  # ranks' results are added up, and the first one has it
        for name in (*self.loaded, *(name for name, bias in biases.items() if bias is not None)):
            delattr(layer, name)
        if self.kept is not None:
            self.kept.update_(_named(layer.fusion_moe, w13, w2, *biases.values()))
            return
        assert w13 is not None
        assert w2 is not None
        layer.fusion_moe = Experts(
            w13,
            w2,
            scale_on="input" if layer.apply_router_weight_on_input else "output",
            gate_up_bias=biases["w13_bias"],
            down_bias=biases["w2_bias"],
            activation=self.activation,
        )
        layer.fusion_moe.first_expert = self.first_expert
        self.sends_tokens = exchange.sends_tokens_(layer.fusion_moe, self.moe)
        if hasattr(layer, "quant_config"):
            layer.fusion_moe.scales = getattr(layer.quant_config, "scales", "max")
        with invariant(envs.VLLM_BATCH_INVARIANT):
            text = serve_(layer.fusion_moe, self.moe.in_dtype, self.moe.experts_per_token)
        logger.info_once(text)
        if balanced:
            # not all that vLLM sends them with takes floats of 8 bits
            layer.fusion_moe.order()
            layer.fusion_moe.reform(integers=True)
        self.kept = Kept(layer.fusion_moe)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        """x [T, H], topk_weights [T, k], topk_ids int[T, k] -> [T, H]: under expert parallelism the
        partial sum of this rank's experts, which vLLM sums over ranks; if these have tokens of
        their own, the sum over ranks. vLLM computes shared experts itself.
        """
        adapters = self.adapters(len(x)) if self.adapters else None
        experts, given = layer.fusion_moe, (x, topk_ids, topk_weights)
        with invariant(envs.VLLM_BATCH_INVARIANT):
            if self.sends_tokens:
                return exchange.send(experts, *given)
            if self.supports_internal_mk:
                return exchange.gather(experts, *given, self.moe)
            return experts(*given, adapters)


def _named(
    experts: Experts,
    w13: Quantized | None,
    w2: Quantized | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> dict[str, Tensor]:
    """Weights that are there, by the names of the parameters."""
    found: dict[str, Tensor] = {}
    for name, weight, bias in zip(experts.projections, (w13, w2), (w13_bias, w2_bias), strict=True):
        if weight is not None:
            found.update(zip(experts.part_names[name], weight, strict=True))
        if bias is not None:
            found[f"{name}_proj_bias"] = bias
    return found


def need_served(moe: Any) -> None:
    """UnsupportedError for layers that cannot be served, by vLLM's configuration of them."""
    parallel, config = moe.moe_parallel_config, get_current_vllm_config_or_none()
    gathers = parallel.use_all2all_kernels
    refuse(
        "vLLM",
        (
            (
                gathers and parallel.all2all_backend != _GATHERS,
                f"--all2all-backend {parallel.all2all_backend}",
                _GATHERS,
                "leave it out",
            ),
            (
                gathers and parallel.pcp_size > 1,
                "expert parallelism with prefill context parallelism",
                "ranks that data parallelism divides",
                "run without --prefill-context-parallel-size",
            ),
            (
                config is not None and config.parallel_config.enable_elastic_ep,
                "--enable-elastic-ep",
                "ranks that keep their experts",
                "leave it out",
            ),
            (
                envs.VLLM_BATCH_INVARIANT and not HAS_TRITON,
                "VLLM_BATCH_INVARIANT=1, for which vLLM needs Triton",
                "a GPU, or the option of this library's experts alone",
                "set FUSION_MOE_ORDER=row in its place",
            ),
            (
                moe.moe_backend != "auto",
                f"--moe-backend {moe.moe_backend}, which names kernels of vLLM",
                "this library's",
                "leave out one of the two options",
            ),
        ),
    )
    if (parallel.dp_size > 1 or gathers) and current_platform.is_cpu():
        why = exchange.why_gathered(moe) if gathers else "experts are divided by features"
        if why:
            raise exchange.not_gathered(why)
    if moe.is_lora_enabled:
        from . import lora

        lora.need_served(moe)


def activation_of(moe: Any, interleave: int) -> str:
    """The activation of `Experts`, from vLLM's configuration of a layer. UnsupportedError for one
    that vLLM has no meaning of.

    interleave: that of the loaded rows. "swigluoai" means the constants of gpt-oss.
    """
    name = moe.activation.value
    if name == "swigluoai":
        return swiglu(interleave, limit=7.0, alpha=1.702, up_offset=1.0)
    if interleave:
        raise unsupported("vLLM", f"experts with activation {name!r}", "'swigluoai'", LEAVE)
    if name == "silu":
        return swiglu(limit=moe.swiglu_limit)
    if name == "swigluoai_uninterleave":
        alpha, offset = (
            usual if given is None else given
            for usual, given in ((1.0, moe.swiglu_alpha), (0.0, moe.swiglu_beta))
        )
        return swiglu(limit=moe.swiglu_limit, alpha=alpha, up_offset=offset)
    if name == "situ":
        return _situ(moe.activation_situ_beta, moe.activation_situ_linear_beta)
    if name not in _PROGRAMS:
        expected = ", ".join(("silu", "situ", "swigluoai", "swigluoai_uninterleave", *_PROGRAMS))
        raise unsupported("vLLM", f"experts with activation {name!r}", f"one of {expected}", LEAVE)
    return _traced(name)


_PROGRAMS: dict[str, Callable[..., Tensor]] = {  # of gate and up, or, without a gate, of up
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swiglustep": lambda gate, up: F.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0),
    "silu_no_mul": F.silu,
    "gelu_no_mul": F.gelu,
    "gelu_tanh_no_mul": lambda up: F.gelu(up, approximate="tanh"),
    "relu2_no_mul": lambda up: F.relu(up).square(),
}


@lru_cache
def _traced(name: str) -> str:
    return activation(_PROGRAMS[name], 1 if name.endswith("_no_mul") else 2)


@lru_cache
def _situ(beta: float, linear_beta: float | None) -> str:
    def situ(gate: Tensor, up: Tensor) -> Tensor:
        bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded

    return activation(situ)


def first_expert(expert_map: Tensor | None, where: str) -> int | None:
    """The id of the first of a rank's experts, from vLLM's map: int[E], an expert's index on this
    rank, -1 for experts of other ranks.

    None without a map: all experts are here. UnsupportedError for experts that are not consecutive,
    as with the placement "round_robin".
    """
    if expert_map is None:
        return None
    placed = expert_map.tolist()
    here = [expert for expert, index in enumerate(placed) if index >= 0]
    if not here or [placed[expert] for expert in range(here[0], here[0] + len(here))] != list(
        range(len(here))
    ):
        found, expected = (
            f"experts {', '.join(map(str, here)) or 'none'} on a rank",
            "some that follow one another, in their order",
        )
        todo = "--expert-placement-strategy linear, and no more ranks than experts"
        raise UnsupportedError(found, expected=expected, todo=todo, where=where)
    return here[0]
