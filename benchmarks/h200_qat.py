"""Quantization-aware training and refit at the size of a layer of Qwen3-30B-A3B on one H100 or
H200.

    python benchmarks/h200_qat.py [--tokens 8192] [--repeats 10] [--rows bf16 step ...]
                                  [--scales mse]
    python benchmarks/h200_qat.py --device cpu --tiny

Milliseconds of the fastest of so many repeats, and GB at the peak beside weights and inputs:

    bf16              forward and backward of the experts with bf16 weights
    saved, exact, float   the same with weights in NVFP4 and their bf16 masters, already rounded
    rounding          what each forward of `qat_` does before: both weights to NVFP4, reordered
    step              what `qat_` takes: rounding, forward and backward, "saved"
    refit             `update_weights_` of a layer's numbers; 48 layers are Qwen3-30B-A3B
    modelopt          a step of nvidia-modelopt's, one expert after the other (if --rows names it)

The first line says whether the training forward has the bits of the frozen experts'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

import fusion_moe

LAYERS = 48
ROWS = ("bf16", "saved", "exact", "float", "rounding", "step", "refit")


def milliseconds(run: Callable[[], Any], repeats: int, device: str) -> tuple[float, float]:
    """Of the fastest run, after two more, and GB at the peak."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        run()
    wait()
    held, found = 0, []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else 0
    return 1e3 * min(found), peak / 1e9


def by_modelopt(module: Qwen3MoeExperts, *given: Tensor) -> nn.Module:
    """The same experts with ModelOpt's rounding of weights to NVFP4."""
    import modelopt.torch.quantization as mtq

    module.config._experts_implementation = "eager"  # the one that it rounds in
    model = nn.Sequential(module)
    mtq.quantize(model, deepcopy(mtq.W4A16_NVFP4_CFG), lambda m: m[0](*given))
    rounded: nn.Module = model[0]
    return rounded


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--scales", default="max", help="the rule for scales of blocks")
    args = parser.parse_args()
    experts, hidden, inner, slots = (8, 128, 64, 2) if args.tiny else (128, 2048, 768, 8)
    tokens = 64 if args.tiny else args.tokens
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=slots,
    )
    with torch.device(args.device):
        module = Qwen3MoeExperts(config).bfloat16()
        with torch.no_grad():
            for p in module.parameters():
                p.normal_(std=0.02)
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        w, ids = torch.randn(tokens, experts).softmax(-1).topk(slots)
        seed = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    w = w.bfloat16().requires_grad_()
    theirs = (
        by_modelopt(deepcopy(module), x.detach(), ids, w.detach())
        if "modelopt" in args.rows
        else None
    )
    model = nn.Sequential(module)
    fusion_moe.nn.qat_(model, scales=args.scales)
    how, masters = module.qat, [module.gate_up_proj, module.down_proj]
    given = how.tensors(module)

    def step(run: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(run(), [x, w, *masters], seed)

    def with_rounded(kind: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            how.template.straight_through = kind
            y: Tensor = torch.func.functional_call(how.template, given, (x, ids, w))
            return y

        return run

    def floats() -> Tensor:
        up, down = masters
        y: Tensor = torch.ops.fusion_moe.fused_experts(
            x, ids, w, [up], [down], weight_format="bf16"
        )
        return y

    frozen = how.quantized(module, fusion_moe.NVFP4Config())
    frozen.order()
    with torch.no_grad():
        same = torch.equal(module(x, ids, w), frozen(x, ids, w))
    same = same and torch.equal(module(x, ids, w), frozen(x.detach(), ids, w.detach()))
    print(f"bits of the frozen experts: {same}, layout {frozen.weight_layout}")
    numbers = dict(zip(("gate_up_proj", "down_proj"), (m.detach() for m in masters), strict=True))
    rows: dict[str, Callable[[], Any]] = {
        "bf16": step(floats),
        **{kind: step(with_rounded(kind)) for kind in ("saved", "exact", "float")},
        "rounding": lambda: how.tensors(module),
        "step": step(lambda: module(x, ids, w)),
        "refit": lambda: fusion_moe.update_weights_(frozen, numbers),
    }
    if theirs is not None:
        own = [theirs.gate_up_proj, theirs.down_proj]
        rows["modelopt"] = lambda: torch.autograd.grad(theirs(x, ids, w), [x, w, *own], seed)
    for name, run in ((name, rows[name]) for name in args.rows):
        if name == "step":
            how.template.straight_through = "saved"
        took, peak = milliseconds(run, args.repeats, args.device)
        more = f", {LAYERS} layers {LAYERS * took / 1e3:.2f} s" if name == "refit" else ""
        print(f"{name:10s} {took:8.2f} ms {peak:7.2f} GB{more}", flush=True)


if __name__ == "__main__":
    main()
