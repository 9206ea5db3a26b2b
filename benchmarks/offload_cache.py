"""Rules of the cache of offloaded experts, by the share of slots whose expert is there.

    python benchmarks/offload_cache.py

Traces: tokens whose experts follow Zipf's law with exponent 1.2, 8 of 256, two of which change
their popularity every so many steps (drift); and what a layer of the small model of this repository
chose while it generated. "static": what the first quarter used most stays; "lru": each miss
replaces the expert that was used longest ago, which copies all misses; a number: the half-life of
`fusion_moe.offload.cache`, with so many steps between two changes. At the end: how many of the
experts that a layer of the small model chooses are among those that its router finds best for what
an earlier layer's experts got, and so could be fetched before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from fusion_moe import NVFP4Config
from fusion_moe.offload.cache import Cache
from fusion_moe.transformers import from_pretrained

SMALL = Path(__file__).parents[1] / "examples" / "tiny_qwen3_moe"
EXPERTS, SLOTS_OF_TOKEN, STEPS = 256, 8, 2000
LEARNING = ((4.0, 16), (2.0, 16), (1.0, 16), (1.0, 4), (1.0, 1))  # half-life, steps between changes


def drifting(drift: int) -> Iterator[Tensor]:
    """Routings i64[8] of one token each."""
    g = torch.Generator().manual_seed(0)
    p, order = 1 / torch.arange(1, EXPERTS + 1).float() ** 1.2, torch.arange(EXPERTS)
    for step in range(STEPS):
        if drift and step % drift == 0:
            a, b = torch.randint(EXPERTS, (2,), generator=g).tolist()
            order[[a, b]] = order[[b, a]]
        yield order[torch.multinomial(p, SLOTS_OF_TOKEN, generator=g)]


@torch.no_grad()
def recorded(tokens: int) -> list[Tensor]:
    """Routings i64[4] of a layer of the small model."""
    model, found = small(), list[Tensor]()
    experts = model.model.layers[2].mlp.experts
    experts.register_forward_pre_hook(lambda _, args: found.append(args[1].clone()))
    torch.manual_seed(0)
    model.generate(text(32), max_new_tokens=tokens, do_sample=True, top_k=50)
    return [t[0] for t in found if len(t) == 1]


def small() -> Any:
    """The small model."""
    return from_pretrained(SMALL, dtype=torch.bfloat16, quantization_config=NVFP4Config()).eval()


def text(tokens: int) -> Tensor:
    """The first ids i64[1, tokens] of its held-out texts."""
    lines = (SMALL / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    joined = "".join(json.loads(line)["text"] for line in lines[:20])
    ids: Tensor = AutoTokenizer.from_pretrained(SMALL)(joined, return_tensors="pt").input_ids
    return ids[:, :tokens]


@torch.no_grad()
def predicted(tokens: int = 1000) -> Iterator[str]:
    """A row for each distance between two layers."""
    layers, got = (model := small()).model.layers, dict[int, Tensor]()
    for i, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, i=i: got.update({i: args[0][0].float()})
        )
    model(text(tokens))
    k = model.config.num_experts_per_tok
    for ahead in range(1, len(layers)):
        shares = {fetched: list[float]() for fetched in (k, 3 * k // 2, 2 * k)}
        for late in range(ahead, len(layers)):
            norms = [
                layers[i].post_attention_layernorm.weight.float() for i in (late - ahead, late)
            ]
            router = layers[late].mlp.gate.weight.float().T
            chosen = (got[late] @ router).topk(k).indices
            guess = got[late - ahead] / norms[0] * norms[1] @ router
            for fetched, found in shares.items():
                best = guess.topk(fetched).indices
                found.append((chosen[:, :, None] == best[:, None]).any(-1).float().mean().item())
        yield f"| {ahead} | " + " | ".join(f"{mean(found):.2f}" for found in shares.values()) + " |"


def learned(trace: Sequence[Tensor], experts: int, slots: int, life: float, every: int) -> str:
    """Hits after the first quarter of a trace, and copies in a step."""
    cache = Cache(experts, slots, max(1, slots // 16), life)
    uses, hits, moves = torch.zeros(experts), list[Tensor](), 0
    for step, ids in enumerate(trace):
        hits.append((cache.places[ids] >= 0).float().mean())
        uses += torch.bincount(ids, minlength=experts)
        if (step + 1) % every == 0:
            moves += len(cache.learn(uses))
            uses.zero_()
    return _said(hits, moves)


def least_recently_used(trace: Sequence[Tensor], experts: int, slots: int) -> str:
    """The same, if all misses are copied into the cache."""
    last, hits, moves = dict.fromkeys(range(slots), -1), list[Tensor](), 0
    for step, ids in enumerate(trace):
        named = ids.tolist()
        hits.append(torch.tensor([e in last for e in named]).float().mean())
        for e in named:
            if e not in last:
                del last[min(last, key=last.__getitem__)]
                moves += 1
            last[e] = step
    return _said(hits, moves)


def static(trace: Sequence[Tensor], experts: int, slots: int) -> str:
    """The same, if what the first quarter used most is there from then on."""
    uses = torch.bincount(torch.cat([*trace[: len(trace) // 4]]), minlength=experts)
    here = torch.zeros(experts).index_fill_(0, uses.argsort(descending=True)[:slots], 1)
    return _said([here[ids].mean() for ids in trace], 0)


def _said(hits: Sequence[Tensor], moves: int) -> str:
    return f"{torch.stack([*hits[len(hits) // 4 :]]).mean():.3f} ({moves / len(hits):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=600, help="that the small model generates")
    tokens = parser.parse_args().tokens
    rules = "static", "lru", *(f"{life:g}, every {every}" for life, every in LEARNING)
    print(f"| trace | slots | {' | '.join(rules)} |")
    print("|---" * (len(rules) + 2) + "|")
    traces = {f"Zipf, drift {d or 'none'}": (EXPERTS, list(drifting(d))) for d in (0, 20, 4)}
    traces["the small model"] = 16, recorded(tokens)
    for name, (experts, trace) in traces.items():
        for slots in (26, 95) if experts == EXPERTS else (4, 8):
            found = [static(trace, experts, slots), least_recently_used(trace, experts, slots)]
            found += [learned(trace, experts, slots, life, every) for life, every in LEARNING]
            print(f"| {name} | {slots} of {experts} | {' | '.join(found)} |", flush=True)
    print("\n| layers before | 4 of 16 experts | 6 | 8 |\n|---|---|---|---|")
    for row in predicted():
        print(row, flush=True)


if __name__ == "__main__":
    main()
