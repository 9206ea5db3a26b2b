"""Rules of the cache of offloaded experts, by the share of slots whose expert is there.

    python benchmarks/offload_cache.py

Traces: tokens whose experts follow Zipf's law with exponent 1.2, 8 of 256, two of which change
their popularity every so many steps (drift); and what a layer of the small model of this repository
chose while it generated. "static": what the first quarter used most stays; "lru": each miss
replaces the expert that was used longest ago, which copies all misses; a number: the half-life of
`fusion_moe.offload.cache`, with so many steps between two changes. Then: how many of the experts
that a layer of the small model chooses are among those that its router finds best for what an
earlier layer's experts got, and so could be fetched before. At the end: what that would be worth in
layers of larger models, by the model of a machine.
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
from fusion_moe.offload.machine import EXPECTED
from fusion_moe.offload.plan import LAUNCHES
from fusion_moe.offload.split import Split, split
from fusion_moe.transformers import from_pretrained

SMALL = Path(__file__).parents[1] / "examples" / "tiny_qwen3_moe"
EXPERTS, SLOTS_OF_TOKEN, STEPS = 256, 8, 2000
LEARNING = ((4.0, 16), (2.0, 16), (1.0, 16), (1.0, 4), (1.0, 1))  # half-life, steps between changes
# hidden, intermediate features, bits of a weight, weights of a layer that are not of routed experts
SIZES = {
    "DeepSeek-V3": (7168, 2048, 4.5, 231e6),
    "gpt-oss-120b": (2880, 2880, 4.25, 26.5e6),
    "Qwen3-235B": (4096, 1536, 4.5, 71e6),
}
_GUESS = 5000  # nanoseconds: a router's product, and what of its best is not there


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


class Routes:
    """What the small model's layers chose for tokens of a text, and what was to be guessed before.

    chosen i64[T, k] of each layer; guessed(layer, ahead) i64[T, E]: all experts of a layer, the
    best ones first, by its router of what so many layers before it got.
    """

    @torch.no_grad()
    def __init__(self, tokens: int = 1000):
        model, self._got = small(), dict[int, Tensor]()
        self.layers = list(model.model.layers)
        for i, layer in enumerate(self.layers):
            layer.mlp.register_forward_pre_hook(
                lambda _, args, i=i: self._got.update({i: args[0][0].float()})
            )
        model(text(tokens))
        self.k, self.experts = model.config.num_experts_per_tok, model.config.num_local_experts
        numbers = range(len(self.layers))
        self.chosen = [self.guessed(layer, 0)[:, : self.k] for layer in numbers]

    def guessed(self, layer: int, ahead: int) -> Tensor:
        norms = [
            self.layers[i].post_attention_layernorm.weight.float() for i in (layer - ahead, layer)
        ]
        router = self.layers[layer].mlp.gate.weight.float().T
        found = self._got[layer - ahead] / norms[0] * norms[1] @ router
        return found.argsort(-1, descending=True)


def predicted(routes: Routes) -> Iterator[str]:
    """A row for each distance between two layers."""
    k = routes.k
    for ahead in range(1, len(routes.layers)):
        shares = {fetched: list[float]() for fetched in (k, 3 * k // 2, 2 * k)}
        for layer in range(ahead, len(routes.layers)):
            chosen, guess = routes.chosen[layer], routes.guessed(layer, ahead)
            for fetched, found in shares.items():
                best = guess[:, :fetched]
                found.append((chosen[:, :, None] == best[:, None]).any(-1).float().mean().item())
        yield f"| {ahead} | " + " | ".join(f"{mean(found):.2f}" for found in shares.values()) + " |"


class Early:
    """Steps of one token in layers of a model's sizes, whose misses are those of the small model,
    without and with experts that are copied while the layer before runs: by the constants that
    `fusion-moe plan` has for an H100, in nanoseconds.

    What the link has left of that layer, attention included, is for the best guesses that are not
    there: only whole copies, which slow the CPU down. A guess takes _GUESS.
    """

    def __init__(self, name: str, routes: Routes, slots: int):
        hidden, inner, bits, others = SIZES[name]
        machine, self.routes = EXPECTED["H100"], routes
        weights = 3 * hidden * inner
        self.costs = machine.constants(int(weights * bits / 8), weights)
        self.attention = int(1e9 * max(LAUNCHES, 2 * others / machine.gpu))
        self.caches = [Cache(routes.experts, slots + 1) for _ in routes.layers]
        self.guesses = [routes.guessed(i, min(i, 1)) for i, _ in enumerate(routes.layers)]
        self.steps = self.without = self.time = self.hits = self.fetched = self.right = 0

    def run(self) -> Early:
        """Counts layers that are between two others, after the first quarter of tokens."""
        tokens = len(self.guesses[0])
        for t in range(tokens):
            self._token(t, counted=t >= tokens // 4)
            if t % 16 == 15:
                for cache, chosen in zip(self.caches, self.routes.chosen, strict=True):
                    uses = torch.bincount(
                        chosen[t - 15 : t + 1].flatten(), minlength=len(cache.expert_map)
                    )
                    cache.learn(uses)
        return self

    def _token(self, t: int, counted: bool) -> None:
        room, costs, last = 0, self.costs, len(self.caches) - 1
        for layer in range(last + 1):
            missed = self._absent(layer, self.routes.chosen[layer][t])
            fetched = self._absent(layer, self.guesses[layer][t, : self.routes.k])[:room]
            left = [e for e in missed if e not in fetched]
            early = self._split(left)
            time, free = early.time, early.time - len(early.copied) * costs.copy_expert
            room = max(0, (self.attention + free) // costs.copy_expert_beside)
            if early.computed and layer < last:
                coming = self._absent(layer + 1, self.guesses[layer + 1][t, : self.routes.k])
                beside = min(min(room, len(coming)) * costs.copy_expert_beside, time)
                time += beside - beside * costs.cpu_expert // costs.cpu_expert_beside
            if counted and 0 < layer < last:
                self.steps += 1
                self.without += self.attention + self._split(missed).time
                self.time += self.attention + time + _GUESS
                self.hits += self.routes.k - len(missed)
                self.fetched += len(fetched)
                self.right += len(missed) - len(left)

    def _absent(self, layer: int, experts: Tensor) -> list[int]:
        return [e for e in experts.tolist() if self.caches[layer].expert_map[e] < 0]

    def _split(self, experts: Sequence[int]) -> Split:
        k = self.routes.k
        return split(dict.fromkeys(experts, 1), self.costs, k, there=k - len(experts))

    def __str__(self) -> str:
        n = self.steps
        return (
            f"{self.hits / n / self.routes.k:.2f} | {self.fetched / n:.2f} | "
            f"{self.right / max(self.fetched, 1):.2f} | {self.without / n / 1e3:.0f} | "
            f"{self.time / n / 1e3:.0f} | {self.without / self.time:.2f} |"
        )


def learned(trace: Sequence[Tensor], experts: int, slots: int, life: float, every: int) -> str:
    """Hits after the first quarter of a trace, and copies in a step."""
    cache = Cache(experts, slots, max(1, slots // 16), life)
    uses, hits, moves = torch.zeros(experts), list[Tensor](), 0
    for step, ids in enumerate(trace):
        hits.append((cache.expert_map[ids] >= 0).float().mean())
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
    routes = Routes()
    print("\n| layers before | 4 of 16 experts | 6 | 8 |\n|---|---|---|---|")
    for row in predicted(routes):
        print(row, flush=True)
    print(f"\n| sizes of | there | hits | fetched | right | us | early | ratio |\n{'|---' * 8}|")
    for name in SIZES:
        for slots in (2, 4, 8, 12, 14):
            early = Early(name, routes, slots).run()
            print(f"| {name} | {slots} of {routes.experts} | {early}", flush=True)


if __name__ == "__main__":
    main()
