"""What GGUF files call the tensors of a model, and what config.json would say of it, for the
architectures that are known here. Of others, experts alone get names as in safetensors, and all
other tensors keep theirs: some are stored in another order, which only an architecture knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsupportedError
from .headers import shown

Shapes = Mapping[str, tuple[int, ...]]

_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<leaf>\w+)(?P<suffix>\.\w+)?")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_PROJECTIONS: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = {"gate": (0,), "up": (1,), "down": (2,), "gate_up": (0, 1)}
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_WITHOUT_SUFFIX = ("attn_sinks", "exp_probs_b", "ssm_dt")
_ENTRIES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts_per_tok": "expert_used_count",
}
_FLOATS = (
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "expert_weights_scale",
)
# entries that change what is computed, and the values with which they do not
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "router_logit_softcapping": (0.0,),
    "swiglu_clamp_exp": (0.0,),
    "swiglu_clamp_shexp": (0.0,),
    "use_parallel_residual": (False,),
}
_ROPE = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


@dataclass(frozen=True)
class Order:
    """Rows (dim 0) or columns (dim -1) that a file has in another order. Those from `start` on are
    of these sizes, one of which may be -1; the model has the sizes in the order `by`.
    """

    sizes: tuple[int, ...]
    by: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def fits(self, length: int) -> bool:
        """Whether so many rows or columns have such sizes."""
        each, rest = math.prod(abs(size) for size in self.sizes), length - self.start
        return rest > 0 and (rest == each or (-1 in self.sizes and each > 0 and rest % each == 0))

    def __call__(self, t: Tensor) -> Tensor:
        """A tensor of the file, as the model has it."""
        dim = self.dim % t.dim()
        kept, rest = t.tensor_split([self.start], dim)
        order = [*range(dim), *(dim + i for i in self.by)]
        apart = rest.unflatten(dim, self.sizes)
        turned = apart.permute(*order, *range(len(order), apart.dim()))
        return torch.cat([kept, turned.flatten(dim, dim + len(self.by) - 1)], dim)


@dataclass(frozen=True)
class Change:
    """What undoes llama.cpp's change of a tensor. order: of rows or columns; number: of its
    numbers.
    """

    order: Order | None = None
    number: Callable[[Tensor], Tensor] | None = None


NO_CHANGE = Change()
Changes = Mapping[str, Change]


def _half_by_half(config: Mapping[str, Any]) -> Changes:
    """Of rows of q and k, those that rotate together lie side by side."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return {
        leaf: Change(Order((int(config[which]), -1, 2), (0, 2, 1))) for leaf, which in heads.items()
    }


def _gated_delta(config: Mapping[str, Any]) -> Changes:
    """The heads of values are grouped by their place below a head of keys, not by that head. Decays
    are stored, not their logarithms; and factors of norms, not what they are beside 1.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, before = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def order(each: int = 1, dim: int = 0, start: int = 0) -> Order:
        return Order((values // keys, keys, each), (1, 0, 2), dim, start)

    norms = "attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm"
    return {
        "attn_qkv": Change(order(size, start=before)),
        "ssm_conv1d": Change(order(size, start=before)),
        "attn_gate": Change(order(size)),
        "ssm_out": Change(order(size, dim=-1)),
        "ssm_alpha": Change(order()),
        "ssm_beta": Change(order()),
        "ssm_dt": Change(order()),
        "ssm_a": Change(order(), lambda t: (-t.double()).log().float()),
        **dict.fromkeys(norms, Change(number=lambda t: t - 1)),
    }


@dataclass(frozen=True)
class Family:
    """What differs between architectures. layer: names of a layer's tensors, beside the usual;
    experts, size: the entries of config.json for the number of experts, and for their inner size;
    changes: of which tensors llama.cpp changes something, by config.json; dense: the entry of
    config.json for the number of layers before those with experts; optional: entries that files may
    leave out, with what holds then; present: entries that say whether a tensor is there; partial:
    whether config.json says which part of a head rotates; linear: whether some layers have linear
    attention; gating: llama.cpp's number of the function of a router's logits.
    """

    model_type: str
    architecture: str
    size: str
    experts: str = "num_experts"
    layer: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    block: str = "mlp"
    projections: tuple[str, ...] = _PROJECTIONS
    changes: Callable[[Mapping[str, Any]], Changes] = field(default=lambda config: {})
    dense: str = ""
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    linear: bool = False
    gating: int = 1

    def check_neutral(
        self, metadata: Mapping[str, Any], architecture: str, head_dim: int, where: str
    ) -> None:
        """UnsupportedError for entries of metadata that config.json has no place for here, and that
        change what is computed.
        """
        neutral = _NEUTRAL | {
            "attention.sliding_window": (0, metadata.get(f"{architecture}.context_length")),
            "expert_gating_func": (0, self.gating),
            "rope.dimension_count": (head_dim,),
        }
        read = {*self.entries.values(), *(key for key, _ in self.optional.values())}
        read |= {"rope.dimension_count"} if self.partial else set()
        for key in neutral.keys() - read:
            value = metadata.get(f"{architecture}.{key}", neutral[key][0])
            each = value if isinstance(value, tuple) else (value,)  # of layers
            if not {*each} <= {*neutral[key]}:
                known = " or ".join(map(str, neutral[key]))
                raise UnsupportedError(
                    f"{architecture}.{key} is {shown(value)}",
                    expected=f"{known}, as {self.architecture} computes",
                    where=where,
                )


FAMILIES = {
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "moe_intermediate_size",
        optional={"norm_topk_prob": ("expert_weights_norm", True)},
    ),
    "qwen2moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "moe_intermediate_size",
        optional={"norm_topk_prob": ("expert_weights_norm", False)},
    ),
    "olmoe": Family(
        "olmoe",
        "OlmoeForCausalLM",
        "intermediate_size",
        optional={"norm_topk_prob": ("expert_weights_norm", False)},
    ),
    "llama": Family(
        "mixtral",
        "MixtralForCausalLM",
        "intermediate_size",
        "num_local_experts",
        layer={"ffn_gate_inp": "block_sparse_moe.gate"},
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        changes=_half_by_half,
    ),
    "minimax-m2": Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        "intermediate_size",
        "num_local_experts",
        layer={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
        },
        entries={"rotary_dim": "rope.dimension_count"},
        gating=2,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    ),
    "glm4moe": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        "moe_intermediate_size",
        "n_routed_experts",
        layer={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        entries={
            "intermediate_size": "feed_forward_length",
            "n_shared_experts": "expert_shared_count",
        },
        gating=2,
        dense="first_k_dense_replace",
        optional={
            "routed_scaling_factor": ("expert_weights_scale", 1.0),
            "norm_topk_prob": ("expert_weights_norm", True),
            "n_group": ("expert_group_count", 1),
            "topk_group": ("expert_group_used_count", 1),
        },
        present={
            "use_qk_norm": "blk.0.attn_q_norm.weight",
            "attention_bias": "blk.0.attn_q.bias",
        },
        partial=True,
    ),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        "moe_intermediate_size",
        layer={
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_a": "linear_attn.A_log",
            "ssm_dt": "linear_attn.dt_bias",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
        },
        entries={
            "head_dim": "attention.key_length",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_key_head_dim": "ssm.state_size",
            "linear_num_key_heads": "ssm.group_count",
            "linear_num_value_heads": "ssm.time_step_rank",
        },
        changes=_gated_delta,
        partial=True,
        linear=True,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        "intermediate_size",
        "num_local_experts",
        layer={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        entries={"sliding_window": "attention.sliding_window"},
        rope={"truncate": False},
        gating=3,
    ),
}


@dataclass(frozen=True)
class Model:
    """config: config.json; family: None for an architecture that is not known."""

    config: dict[str, Any]
    family: Family | None

    def experts_at(self, name: str) -> tuple[list[str], str] | None:
        """If a tensor has the weights or biases of all experts of a layer: the names of the
        matrices whose rows it has, with `*` for the number of the expert, and the suffix.
        """
        layer, leaf, suffix = _divided(name)
        if not layer or not (match := _OF_EXPERTS.fullmatch(leaf)):
            return None
        block, names = "mlp", _PROJECTIONS
        if self.family:
            block, names = self.family.block, self.family.projections
        base = f"model.layers.{layer}.{block}.experts.*"
        return [f"{base}.{names[i]}" for i in _EXPERTS[match[1]]], suffix

    def left_out(self, name: str) -> bool:
        """Whether a tensor is of a layer for multi-token prediction, or a scale of activations."""
        layers = self.config["num_hidden_layers"] if self.family else None
        block = _BLOCK.match(name)
        further = block is not None and layers is not None and int(block[1]) >= layers
        return further or name.endswith(".input_scale")

    def name_of(self, name: str, where: str) -> str:
        """The name of any other tensor. UnsupportedError for one that the architecture does not
        have.
        """
        if self.family is None:
            return name
        layer, leaf, suffix = _divided(name)
        if layer:
            new = {**_LAYER, **self.family.layer}.get(leaf)
            new = new and f"model.layers.{layer}.{new}"
        else:
            new = _WHOLE.get(leaf)
        if new is None:
            raise UnsupportedError(
                shown(name),
                expected=f"tensors of {self.family.architecture}",
                where=where,
            )
        return new if leaf in _WITHOUT_SUFFIX else new + suffix

    @cached_property
    def _changes(self) -> Changes:
        return self.family.changes(self.config) if self.family else {}

    def change_of(self, name: str) -> Change:
        """What undoes llama.cpp's change of a tensor, if it changes that."""
        return self._changes.get(_divided(name)[1], NO_CHANGE)


def model_of(metadata: Mapping[str, Any], shapes: Shapes, where: str) -> Model:
    """The model that a file's metadata and shapes describe. CheckpointError for an entry that is
    missing or not a number.
    """
    architecture = str(metadata.get("general.architecture"))
    family = FAMILIES.get(architecture)
    if family is None or f"{architecture}.expert_count" not in metadata:
        known = {"num_hidden_layers": "block_count", "num_experts": "expert_count"}
        entries = {key: metadata.get(f"{architecture}.{own}") for key, own in known.items()}
        return Model({"model_type": architecture, "architectures": [], **entries}, None)

    def entry(key: str, usual: Any = None) -> int | float:
        value: Any = metadata.get(f"{architecture}.{key}", usual)
        kind = float if key in _FLOATS else int
        if type(value) is bool and type(usual) is bool:
            return value
        if type(value) is not kind or not 0 < value < math.inf:
            noun = "number" if kind is float else "whole number"
            raise CheckpointError(
                f"{architecture}.{key} is {shown(value)}",
                expected=f"a {noun} above 0",
                where=where,
            )
        # float32 in the file
        number: int | float = float(f"{value:.7g}") if kind is float else value
        return number

    def size(name: str, dim: int) -> int:
        if name not in shapes:
            raise CheckpointError(f"no {name}", expected="all tensors of a model", where=where)
        return shapes[name][dim]

    config: dict[str, Any] = {
        key: entry(parts) for key, parts in {**_ENTRIES, **family.entries}.items()
    }
    # layers for multi-token prediction follow
    further: Any = metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if type(further) is not int or not 0 <= further < config["num_hidden_layers"]:
        raise CheckpointError(
            f"{architecture}.nextn_predict_layers is {shown(further)}",
            expected=f"fewer than {config['num_hidden_layers']}, all layers",
            where=where,
        )
    config["num_hidden_layers"] -= further
    first = 0
    if family.dense:
        first = config[family.dense] = int(entry("leading_dense_block_count"))
    last = f"blk.{config['num_hidden_layers'] - 1}."
    if not any(name.startswith(last) for name in shapes):
        raise CheckpointError(f"no {last}*", expected="all tensors of a model", where=where)
    if "head_dim" not in config:
        rows, heads = size("blk.0.attn_q.weight", 0), config["num_attention_heads"]
        if rows % heads:
            raise CheckpointError(
                f"blk.0.attn_q.weight of {rows} rows",
                expected=f"rows of {heads} heads",
                where=where,
            )
        config["head_dim"] = rows // heads
    family.check_neutral(metadata, architecture, config["head_dim"], where)
    if family.linear:
        heads, inner = config["linear_num_value_heads"], entry("ssm.inner_size")
        config["linear_value_head_dim"] = inner // heads
        config["layer_types"] = _layer_types(metadata, architecture, config, entry, where)
    config |= {
        family.experts: entry("expert_count"),
        family.size: size(f"blk.{first}.ffn_down_exps.weight", -1),
        **{key: entry(answer, usual) for key, (answer, usual) in family.optional.items()},
        **{key: name in shapes for key, name in family.present.items()},
        "vocab_size": size("token_embd.weight", 0),
    }
    if "blk.0.ffn_down_shexp.weight" in shapes:
        config["shared_expert_intermediate_size"] = size("blk.0.ffn_down_shexp.weight", -1)
    ids = {
        f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    rope = _rope(metadata, architecture, family, entry, where)
    if family.partial:
        rotates = entry("rope.dimension_count", config["head_dim"])
        rope["partial_rotary_factor"] = rotates / config["head_dim"]
    sections = metadata.get(f"{architecture}.rope.dimension_sections")
    if family.linear and isinstance(sections, tuple):
        rope |= {"mrope_section": [*sections[:3]], "mrope_interleaved": True}
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "dtype": "bfloat16",
        **config,
        **family.fixed,
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in shapes,
        **{key: value for key, value in ids.items() if isinstance(value, int)},
    }
    return Model(config, family)


def _layer_types(
    metadata: Mapping[str, Any],
    architecture: str,
    config: Mapping[str, Any],
    entry: Callable[..., int | float],
    where: str,
) -> list[str]:
    """By what newer files say of each layer, or by every how many one has full attention."""
    count, key = config["num_hidden_layers"], f"{architecture}.attention.recurrent_layers"
    every = entry("full_attention_interval", 4)
    recurrent: Any = metadata.get(key, tuple((i + 1) % every != 0 for i in range(count)))
    if not isinstance(recurrent, tuple) or len(recurrent) < count:
        raise CheckpointError(
            f"{key} is {shown(recurrent)}", expected=f"one for each of {count} layers", where=where
        )
    return ["linear_attention" if each else "full_attention" for each in recurrent[:count]]


def _rope(
    metadata: Mapping[str, Any],
    architecture: str,
    family: Family,
    entry: Callable[..., int | float],
    where: str,
) -> dict[str, Any]:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    results: dict[str, Any] = {"rope_theta": entry("rope.freq_base", 10000.0)}
    if kind == "none":
        return {"rope_type": "default", **results}
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"{architecture}.rope.scaling.type is {shown(kind)}",
            expected="none, linear or yarn",
            where=where,
        )
    for key, own in _ROPE.items():
        own = f"rope.scaling.{own}"
        if key == "factor" or f"{architecture}.{own}" in metadata:
            results[key] = entry(own)
    return {"rope_type": kind, **results, **family.rope}


def _divided(name: str) -> tuple[str, str, str]:
    """The number of the layer, the name below it, and the suffix; "" for what is not there."""
    match = _TENSOR.fullmatch(name)
    return (match["layer"] or "", match["leaf"], match["suffix"] or "") if match else ("", "", "")
