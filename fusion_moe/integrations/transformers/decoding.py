"""Decoding with transformers' models: a token of each sequence after the other, by a static cache.
On a GPU a step, sampling included, is compiled, captured in a CUDA graph and replayed, so that no
Python runs between kernels. On CPUs the model is called as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LogitsProcessorList,
    StaticCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...errors import CheckpointError, OptionError
from ...runtime import nvrtc

WARM = 3  # steps before one is captured
SHARED_KEYS = "fusion_moe_shared_keys"
Choice = Callable[[Tensor], Tensor]


def greedy(logits: Tensor) -> Tensor:
    """Logits [B, V] -> the likeliest ids i64[B, 1]."""
    return logits.argmax(-1, keepdim=True)


def sampling(config: GenerationConfig, temperature: float) -> Choice:
    """How ids are drawn: at a temperature, among the top_k and top_p of a configuration; `greedy`
    at 0.
    """
    if temperature == 0:
        return greedy
    limits = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if config.top_k:
        limits.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1:
        limits.append(TopPLogitsWarper(config.top_p))

    def draw(logits: Tensor) -> Tensor:
        of = limits(torch.empty(0), logits.float()).softmax(-1)
        # the first of exponential clocks: unlike torch.multinomial, it waits for no device
        return (of / torch.empty_like(of).exponential_()).argmax(-1, keepdim=True)

    return draw


def context_of(model: Any) -> int | None:
    """How many tokens a language model was made for; None if its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_ids(model: Any, ids: Tensor) -> None:
    """OptionError for no ids. CheckpointError for those that a model's embedding has no row for, as
    of a tokenizer with added tokens: an index past the rows, which on a GPU ends all its work.
    """
    if not ids.numel():
        raise OptionError("a prompt without tokens", expected="at least one")
    rows, largest = model.get_input_embeddings().weight.shape[0], int(ids.max())
    if largest >= rows:
        raise CheckpointError(
            f"the tokenizer's id {largest:,}",
            expected=f"ids below {rows:,}, the rows of the model's embedding",
            todo="take the tokenizer that the model was trained with",
        )


class Decoder:
    """A model with a cache of its own, which decodes step by step, under CUDA graphs on GPUs.

    model: a language model of transformers; length: tokens that the cache holds; batch: sequences;
    backend: compiles steps on a GPU; experts: transformers' implementations for prompts and for
    steps, if not those that the model has; choose: logits [B, V] -> ids i64[B, 1]; compiled: the
    model as somebody compiled it, which computes prompts and steps on any device, by a cache of one
    size where there is one for the model; graph: whether steps may become a CUDA graph.

    ids: i64[batch, 1], the last tokens, which the next step reads and replaces. why_plain: why
    steps are no CUDA graph, "" if they are.
    """

    def __init__(
        self,
        model: Any,
        length: int,
        batch: int = 1,
        *,
        backend: str = "fusion_moe",
        experts: tuple[str, str] | None = None,
        choose: Choice = greedy,
        compiled: Callable[..., Any] | None = None,
        graph: bool = True,
    ):
        self.model, self.choose, self.experts = model, choose, experts
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.why_plain = why_plain(model)
        self.cache: Any = None
        self._called: Callable[..., Any] = model if compiled is None else compiled
        self._step: Callable[[], object] = partial(self._call, self._called)
        self._fixed = not self.why_plain or (compiled is not None and not _layers(model)[1])
        if self._fixed:
            self.cache = StaticCache(config=model.config, max_cache_len=length)
        if not self.why_plain and graph:
            if compiled is None:
                compiled = torch.compile(model, backend=backend, dynamic=False)
            self._step = self._captured(compiled)

    @torch.no_grad()
    def prompt(self, ids: Tensor) -> Tensor:
        """Reads ids i64[B, P] in place of all that was read before -> the next ids i64[B, 1]."""
        if self._fixed:
            self.cache.reset()
        else:
            self.cache = None  # the model makes one, of its own class
        self._use(0)
        self._call(self._called, ids)
        self._use(1)
        return self.ids

    @torch.no_grad()
    def step(self) -> Tensor:
        """The next ids i64[B, 1], the same tensor each time."""
        self._step()
        return self.ids

    def _use(self, which: int) -> None:
        if self.experts:
            self.model.set_experts_implementation(self.experts[which])

    def _call(self, model: Callable[..., Any], ids: Tensor | None = None) -> None:
        inputs = {cache_argument(self.model): self.cache, "use_cache": True, "logits_to_keep": 1}
        result = model(self.ids if ids is None else ids, **inputs)
        if not self._fixed:  # a model that classifies tokens has none
            self.cache = getattr(result, "past_key_values", None)
        self.ids.copy_(self.choose(result.logits[:, -1]))

    @torch.no_grad()
    def _captured(self, compiled: Callable[..., Any]) -> Callable[[], object]:
        """A replay of a step. The cache forgets what warming up wrote into it."""
        self._use(0)
        self._call(self.model)  # allocates the cache
        self._use(1)
        return captured(partial(self._call, compiled))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """A function that replays what `run` does on a GPU. It is called a few times first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
    """run: keeps the memory alive that the graph reads and writes."""
    graph.replay()


def why_plain(model: Any) -> str:
    """Why steps of a model are no CUDA graph, "" if they can be one."""
    if model.device.type != "cuda":
        return "not on a GPU"
    if missing := nvrtc.why_missing():
        return missing
    layers, why = _layers(model)
    # windows and states of linear attention count steps in Python, which a replay leaves out
    others = {type(layer).__name__ for layer in layers if type(layer) is not StaticLayer}
    return f"its cache has a {', '.join(sorted(others))}" if others else why


def _layers(model: Any) -> tuple[list[Any], str]:
    """Those of a model's cache of one size; none, and why."""
    try:
        return StaticCache(config=model.config, max_cache_len=1).layers, ""
    except KeyError as kind:  # of layers, such as DeepSeek-V4's
        return [], f"transformers has no cache of one size for {kind}"


def cache_argument(model: torch.nn.Module) -> str:
    """transformers' name of a model's cache argument: "cache" from 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


# Attention ----------------------------------------------------------------------------------------


def shared_keys(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, heads, Q, d], key [B, KV heads, S, d], value [B, KV heads, S, v] -> [B, Q, heads,
    v], None. For one token, heads that share keys become rows of one query, in plain products:
    torch's attention kernels use few multiprocessors for a sequence's keys, and transformers,
    compiled, would copy keys and values for each query. More tokens go to transformers' own
    attention.
    """
    (batch, heads, rows, d), groups = query.shape, key.shape[1]
    if rows > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    together = query.reshape(batch, groups, heads // groups, d)
    scaling = others.get("scaling")
    scores = (together @ key.mT).float() * (d**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    result = scores.softmax(-1).to(value.dtype) @ value
    return result.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(SHARED_KEYS, shared_keys)
AttentionMaskInterface.register(SHARED_KEYS, sdpa_mask)


def share_keys_(model: Any) -> None:
    """Gives a model on a GPU this attention, in place of torch's."""
    if model.device.type == "cuda" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(SHARED_KEYS)
