"""The routers of transformers' models, computed by our operation. Letters: T tokens, k experts a
token, E experts, H hidden features.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...messages import log
from ...ops import topk_router

Routed = tuple[Tensor, Tensor, Tensor]  # logits [T, E], weights [T, k], ids int64 [T, k]


def fuse_routers_(model: torch.nn.Module) -> tuple[str, ...]:
    """Makes a model's routers call `fusion_moe.ops.topk_router`, in place -> the names of these
    modules.

    Under `torch.compile(backend="fusion_moe")` a router's choice is then part of the program of its
    experts. Parameters, state dicts and the results of routers (logits, weights, ids) keep their
    form; gradients reach logits. Weights differ by a few units in the last place of float32, and so
    may ids if scores are equal. `del module.forward` undoes it.

    A router is recognized by the code of its forward: that of Qwen3-MoE, Qwen3.5-MoE, Mixtral,
    gpt-oss, Granite-MoE or DeepSeek-V3, which many families share. Other routers are left as they
    are, with a warning if there are only such.
    """
    fused = []
    for name, module in model.named_modules():
        if forward := _forward_of(type(module)):
            module.forward = MethodType(forward, module)
            fused.append(name)
    if not fused:
        log.warning(
            "fuse_routers_ changes nothing: no router in a %s has a forward that it knows",
            type(model).__name__,
        )
    return tuple(fused)


def unfused(model: torch.nn.Module) -> Iterator[str]:
    """The names of the routers that `fuse_routers_` would change."""
    for name, module in model.named_modules():
        if "forward" not in vars(module) and _forward_of(type(module)):
            yield name


def _qwen3_moe(self: Any, hidden_states: Tensor) -> Routed:
    """Softmax over all experts, renormalized if the model says so, in the dtype of logits."""
    logits = linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    return logits, *topk_router(
        logits, self.top_k, renormalize=self.norm_topk_prob, out_dtype=logits.dtype
    )


def _qwen3_5_moe(self: Any, hidden_states: Tensor) -> Routed:
    """Softmax over the chosen experts, in the dtype of logits."""
    logits = linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    return logits, *topk_router(logits, self.top_k, renormalize=True, out_dtype=logits.dtype)


def _mixtral(self: Any, hidden_states: Tensor) -> Routed:
    """Softmax over the chosen experts, in float32."""
    logits = linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    return logits, *topk_router(logits, self.top_k, renormalize=True)


def _gpt_oss(self: Any, hidden_states: Tensor) -> Routed:
    """Softmax over the chosen experts, in the dtype of logits, which have a bias."""
    logits = linear(hidden_states, self.weight, self.bias)
    return logits, *topk_router(logits, self.top_k, renormalize=True, out_dtype=logits.dtype)


def _granitemoe(self: Any, hidden_states: Tensor) -> Routed:
    """Softmax over the chosen experts, in the dtype of tokens; logits in float32."""
    logits = linear(hidden_states, self.weight).float()
    return logits, *topk_router(logits, self.top_k, renormalize=True, out_dtype=hidden_states.dtype)


def _deepseek_v3(self: Any, hidden_states: Tensor) -> Routed:
    """Sigmoids, all in float32, with a bias for choosing, groups ranked by their two best scores,
    and a scaling factor.
    """
    logits = linear(hidden_states.reshape(-1, self.hidden_dim).float(), self.weight.float())
    weights, ids = topk_router(
        logits,
        self.top_k,
        self.e_score_correction_bias.float(),
        scoring="sigmoid",
        renormalize=self.norm_topk_prob,
        routed_scaling_factor=self.routed_scaling_factor,
        n_group=self.num_group,
        topk_group=self.topk_group,
        best_of_group=2,
    )
    return logits, weights, ids


_MODULE = "transformers.models.{family}.modeling_{family}"
_FORWARDS: dict[tuple[str, str], Callable[[Any, Tensor], Routed]] = {
    ("qwen3_moe", "Qwen3MoeTopKRouter"): _qwen3_moe,
    ("qwen3_5_moe", "Qwen3_5MoeTopKRouter"): _qwen3_5_moe,
    ("mixtral", "MixtralTopKRouter"): _mixtral,
    ("gpt_oss", "GptOssTopKRouter"): _gpt_oss,
    ("granitemoe", "GraniteMoeTopKRouter"): _granitemoe,
    ("deepseek_v3", "DeepseekV3TopkRouter"): _deepseek_v3,
}


def _forward_of(of: type) -> Callable[[Any, Tensor], Routed] | None:
    """The replacement for a class's forward, if it is a router's. Imports other families only for a
    class whose forward calls topk.
    """
    code = _code(of)
    if not code or "topk" not in code[1]:
        return None
    own = next(
        (forward for (family, name), forward in _FORWARDS.items() if of is _loaded(family, name)),
        None,
    )
    return own or next(
        (forward for router, forward in _FORWARDS.items() if code == _code(_imported(*router))),
        None,
    )


def _imported(family: str, name: str) -> Any:
    """The class, or None if this version of transformers does not have it."""
    return getattr(import_module(_MODULE.format(family=family)), name, None)


def _loaded(family: str, name: str) -> Any:
    """The class, if its family is imported already."""
    return getattr(sys.modules.get(_MODULE.format(family=family)), name, None)


def _code(of: type) -> Any:
    """The code of a class's forward, independent of where it is defined."""
    code = getattr(inspect.unwrap(getattr(of, "forward", None) or _code), "__code__", None)
    return code and (code.co_code, code.co_names, code.co_varnames, code.co_consts)
