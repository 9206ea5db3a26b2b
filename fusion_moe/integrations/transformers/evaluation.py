"""How well a causal language model predicts texts, and how far it is from another model.

Every text is tokenized by itself, starts with the tokenizer's first token of a text, and is read in
windows that overlap by half, so that every token is scored once and (except in the first window)
with at least half a window of context.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import OptionError
from ...messages.progress import progress
from ...nn import contract_of
from ...nn.frozen import Projections
from .decoding import check_ids

CONTEXT = 1024
Window = tuple[Tensor, int]  # tokens i64 [at most CONTEXT + 1], of which the last ones are scored


@dataclass(frozen=True)
class Difference:
    """From another model, on the same tokens. perplexity: by how much it is higher, relatively, and
    the interval that holds 95 %, by the standard error over windows; kl: the mean divergence
    KL(other, this) in nats; same_token: how often the likeliest token is the same; routers: by the
    name of each module of experts, how many of a token's experts are the same.
    """

    perplexity: float
    interval: tuple[float, float]
    kl: float
    same_token: float
    routers: dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """losses: those of each window's tokens in nats, f64 [scored]; bits_per_byte: of UTF-8;
    perplexity: per token; difference: from the other model.
    """

    losses: tuple[Tensor, ...]
    bits_per_byte: float
    perplexity: float
    difference: Difference | None = None


@torch.inference_mode()
def evaluate(
    model: Any, tokenizer: Any, texts: Sequence[str], against: Any = None, context: int = CONTEXT
) -> Evaluation:
    """model, against: causal language models of transformers, which read a window at a time.
    OptionError for texts without a token to predict, CheckpointError as from `check_ids`.
    """
    windows = [w for text in texts for w in windows_of(tokenizer, text, context)]
    if not windows:
        raise OptionError("no text", expected="at least one token", where="evaluate")
    for each in (model, against):
        if each is not None:
            check_ids(each, torch.cat([tokens for tokens, _ in windows]))
    if against is None:
        losses = [_losses(_logits(model, w), w) for w in progress(windows, _WHAT, len(windows))]
        return _evaluation(losses, texts)
    pairs, sums = list[tuple[Tensor, Tensor]](), torch.zeros(2, dtype=torch.float64)
    alike = defaultdict[str, list[Tensor]](list)
    with ExitStack() as hooks:
        chosen = [_record(each, hooks) for each in (model, against)]
        for window in progress(windows, _WHAT, len(windows)):
            both = _logits(model, window), _logits(against, window)
            pairs.append((_losses(both[0], window), _losses(both[1], window)))
            ours, theirs = (rows.log_softmax(-1) for rows in both)
            same = ours.argmax(-1) == theirs.argmax(-1)
            sums += torch.stack([(theirs.exp() * (theirs - ours)).sum(), same.sum()]).double()
            for name in chosen[0].keys() & chosen[1].keys():
                a, b = (each[name][-len(same) :] for each in chosen)
                alike[name].append((a[:, :, None] == b[:, None]).any(-1).double().mean(-1))
    losses, others = map(list, zip(*pairs, strict=True))
    low, middle, high = change(losses, others)
    kl, same_token = (sums / sum(map(len, losses))).tolist()
    routers = {name: float(torch.cat(each).mean()) for name, each in sorted(alike.items())}
    return _evaluation(losses, texts, Difference(middle, (low, high), kl, same_token, routers))


_WHAT = "reading windows"


def _evaluation(
    losses: list[Tensor], texts: Sequence[str], difference: Difference | None = None
) -> Evaluation:
    each = torch.cat(losses)
    bits = float(each.sum()) / math.log(2) / sum(len(text.encode()) for text in texts)
    return Evaluation(tuple(losses), bits, math.exp(float(each.mean())), difference)


def windows_of(tokenizer: Any, text: str, context: int) -> Iterator[Window]:
    """The windows of tokens into which a text is cut for evaluation."""
    first = tokenizer.bos_token_id
    first = tokenizer.eos_token_id if first is None else first
    start = [] if first is None else [first]
    tokens = [*start, *tokenizer(text, add_special_tokens=False).input_ids]
    scored = 0  # how many of tokens[1:] are scored so far
    for begin in range(0, len(tokens) - 1, context // 2):
        end = min(begin + context, len(tokens) - 1)
        yield torch.tensor(tokens[begin : end + 1]), end - scored
        scored = end
        if end == len(tokens) - 1:
            return


def change(losses: Sequence[Tensor], of: Sequence[Tensor]) -> tuple[float, float, float]:
    """How much higher perplexity is on the same windows, relatively: the ends of the interval of
    95 % around the second number.
    """
    sums = torch.stack([(a - b).sum() for a, b in zip(losses, of, strict=True)]).double()
    sizes = torch.tensor([len(a) for a in losses], dtype=torch.float64)
    mean = sums.sum() / sizes.sum()
    spread = (sums - mean * sizes).square().sum().sqrt() / sizes.sum()
    low, middle, high = (math.expm1(float(mean + z * spread)) for z in (-1.96, 0, 1.96))
    return low, middle, high


def _logits(model: Any, window: Window) -> Tensor:
    """f32 [scored, V] of the last tokens of a window."""
    tokens, scored = window
    rows = model(input_ids=tokens[None, :-1].to(model.device), use_cache=False).logits
    kept: Tensor = rows[0, -scored:].float().cpu()
    return kept


def _losses(logits: Tensor, window: Window) -> Tensor:
    tokens, scored = window
    return F.cross_entropy(logits, tokens[-scored:], reduction="none").double()


def _record(model: Any, hooks: ExitStack) -> dict[str, Tensor]:
    """The experts int [T, k] of the tokens that a model reads last, by the name of each module of
    experts, until the hooks are closed.
    """
    results: dict[str, Tensor] = {}

    def add(name: str, _: Any, args: Any, kwargs: Any) -> None:
        index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        results[name] = index.reshape(-1, index.shape[-1]).cpu()

    for name, module in model.named_modules():
        if isinstance(module, Projections) or contract_of(module):
            hook = module.register_forward_pre_hook(partial(add, name), with_kwargs=True)
            hooks.callback(hook.remove)
    return results
