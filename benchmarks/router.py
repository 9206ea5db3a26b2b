"""Routers on a GPU, from logits to sorted rows: one program beside torch's operations, as they are
and under torch.compile.

python benchmarks/router.py            # medians of 200 replays of a CUDA graph with 20 calls each,
                                       in us a call
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda_graphs import capture, medians

import fusion_moe
from fusion_moe import FusionDefinition
from fusion_moe.ir.core import Fusion

MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qwen3-30b-a3b": (128, 8, {"renormalize": True}),
    "gpt-oss-120b": (128, 4, {"renormalize": True}),
    "deepseek-v3": (
        256,
        8,
        {
            "scoring": "sigmoid",
            "renormalize": True,
            "n_group": 8,
            "topk_group": 4,
            "best_of_group": 2,
        },
    ),
}


def program(
    experts: int, k: int, scoring: str = "softmax", renormalize: bool = True, **groups: int
) -> Fusion:
    """logits bf16[t, E] -> weights, ids, ends, row_of, slot_of."""
    fd = FusionDefinition()
    logits = fd.define_tensor(shape=[fd.define_size("t"), experts], dtype="bf16")
    ids = fd.ops.topk_ids(logits, 0, k=k, scoring=scoring, **groups)
    weights = fd.ops.topk_weights(logits, ids, scoring=scoring, renormalize=renormalize)
    for v in (weights, ids, *fd.ops.route(ids, groups=fd.define_groups("g", experts))):
        fd.add_output(v)
    return fd.fusion()


def in_torch(
    logits: torch.Tensor,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    n_group: int = 1,
    topk_group: int = 1,
    best_of_group: int = 1,
) -> tuple[torch.Tensor, ...]:
    """What transformers' routers do, and the sort of grouped products."""
    scores = (
        logits.softmax(-1, dtype=torch.float32)
        if scoring == "softmax"
        else logits.float().sigmoid()
    )
    choice = scores
    if n_group > 1:
        of_groups = scores.view(len(scores), n_group, -1)
        best = (
            of_groups.topk(best_of_group, dim=-1)
            .values.sum(-1)
            .topk(topk_group, dim=-1, sorted=False)
            .indices
        )
        kept = torch.zeros_like(of_groups[..., 0]).scatter_(1, best, 1).bool()
        choice = scores.masked_fill(
            ~kept[..., None].expand_as(of_groups).reshape_as(scores), -torch.inf
        )
    ids = choice.topk(k, dim=-1).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    order = ids.flatten().argsort(stable=True)
    ends = torch.histc(ids.float(), logits.shape[1], 0, logits.shape[1] - 1).cumsum(
        0, dtype=torch.int32
    )
    return weights, ids, ends, order // k, order


def median_us(call: Callable[[], object], calls: int = 20, replays: int = 200) -> float:
    """The median time of a call in a CUDA graph of several."""
    for _ in range(2):
        call()  # Dynamo may compile again at the second one
    return medians({"": capture([call] * calls)}, replays)[""]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 17, 64, 256, 4096])
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    options = parser.parse_args(arguments)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us a call")
    print(f"{'model':16}{'tokens':>8}{'ours':>10}{'torch':>10}{'compiled':>10}")
    for name, (experts, k, how) in MODELS.items():
        fusion, compiled = program(experts, k, **how), torch.compile(in_torch, dynamic=False)
        for tokens in options.tokens:
            logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
            ours = median_us(lambda logits=logits, fusion=fusion: fusion_moe.run(fusion, [logits]))
            eager = median_us(lambda logits=logits, how=how, k=k: in_torch(logits, k, **how))
            inductor = (
                median_us(lambda logits=logits, how=how, k=k, f=compiled: f(logits, k, **how))
                if options.compile
                else float("nan")
            )
            print(f"{name:16}{tokens:8}{ours:10.2f}{eager:10.2f}{inductor:10.2f}", flush=True)


if __name__ == "__main__":
    main()
