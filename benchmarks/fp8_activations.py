"""What fp8 activations would cost and gain on Hopper, whose tensor cores multiply e4m3 at twice the
rate of bf16.

    python benchmarks/fp8_activations.py [--text BYTES] [--tokens 8192]

Cost, on any machine: the perplexity of the small real Qwen3-MoE of examples/ on held-out text, with
experts computed in float32 from weights and activations that are rounded. Products in fp8 multiply
numbers in e4m3 over the whole of K, so dequantized NVFP4 weights must be rounded once more: a code
times its block scale has up to 6 significant bits, e4m3 has 4. Activations have one scale a row,
weights one for each row of their matrix.

Gain, on a Hopper GPU: torch's dense products in fp8 against bf16, of the sizes of real models'
experts. They dequantize nothing: it is the most that fp8 could gain.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from h200_cells import MODELS
from torch import Tensor
from torch.nn.functional import linear, silu

import fusion_moe
from fusion_moe.encodings import NVFP4, Quantized, dequantize

E4M3_MAX = 448.0
EXAMPLES = Path(__file__).parents[1] / "examples"


def as_is(x: Tensor) -> Tensor:
    """x"""
    return x


def to_e4m3(x: Tensor) -> Tensor:
    """x rounded to e4m3, its last dimension by one scale."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / E4M3_MAX
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def to_bf16(x: Tensor) -> Tensor:
    """x rounded to bf16."""
    return x.bfloat16().float()


class Rounded(torch.nn.Module):
    """NVFP4 experts in float32, with their activations and their decoded weights rounded."""

    def __init__(
        self,
        experts: fusion_moe.NVFP4Experts,
        activations: Callable[[Tensor], Tensor],
        weights: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        codes, scales = experts.gate_up_proj.chunk(2, 1), experts.gate_up_proj_scale.chunk(2, 1)
        gate, up = map(
            Quantized, codes, scales, (experts.gate_decode_scale, experts.up_decode_scale)
        )
        down = Quantized(
            experts.down_proj, experts.down_proj_scale, experts.down_decode_scale, encoding=NVFP4
        )
        self.gate, self.up, self.down = (weights(dequantize(w)) for w in (gate, up, down))
        self.activations = activations

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As NVFP4Experts."""
        x = self.activations(hidden_states.float().flatten(0, -2))
        total = torch.zeros_like(x)
        for e in top_k_index.unique().tolist():
            token, slot = (top_k_index == e).nonzero(as_tuple=True)
            h = silu(linear(x[token], self.gate[e])) * linear(x[token], self.up[e])
            y = linear(self.activations(h), self.down[e]) * top_k_weights[token, slot, None].float()
            total.index_add_(0, token, y)
        return total.to(hidden_states.dtype).view_as(hidden_states)


def perplexities(size: int) -> None:
    """Prints what each rounding costs."""
    sys.path.insert(0, str(EXAMPLES))
    from heldout import bits_per_byte_and_perplexity, load_heldout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = EXAMPLES / "tiny_qwen3_moe"
    texts, tokenizer = load_heldout(max_bytes=size), AutoTokenizer.from_pretrained(folder)
    rounded = {
        "NVFP4 weights, bf16 activations": (to_bf16, as_is),
        "fp8 activations": (to_e4m3, as_is),
        "fp8 activations and weights": (to_e4m3, to_e4m3),
    }
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    base = bits_per_byte_and_perplexity(model, tokenizer, texts)[1]
    print(f"{'bf16':32} perplexity {base:.4f}", flush=True)
    fusion_moe.quantize_(model)
    found = [
        m
        for m in model.modules()
        if isinstance(getattr(m, "experts", None), fusion_moe.NVFP4Experts)
    ]
    experts = [m.experts for m in found]
    for name, (activations, weights) in rounded.items():
        for module, original in zip(found, experts, strict=True):
            module.experts = Rounded(original, activations, weights)
        ppl = bits_per_byte_and_perplexity(model, tokenizer, texts)[1]
        print(f"{name:32} perplexity {ppl:.4f}  {ppl / base - 1:+.3%}", flush=True)


def microseconds(run: Callable[[], object], repeats: int = 7, calls: int = 10) -> float:
    """The median."""
    found = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(found[1:])


def dense(tokens: int) -> None:
    """Prints times of dense products with as many rows as the experts' have in all."""
    for name, model in MODELS.items():
        for n, k in model.products("mlp"):
            x, w = (
                torch.randn(rows, k, device="cuda").bfloat16() for rows in (tokens * model.slots, n)
            )
            x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
            scales = torch.ones(len(x), 1, device="cuda"), torch.ones(1, n, device="cuda")
            fp8 = microseconds(
                partial(
                    torch._scaled_mm,
                    x8,
                    w8.T,
                    *scales,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )
            )
            bf16 = microseconds(partial(linear, x, w))
            print(
                f"{name} {len(x)} x {n} x {k}: bf16 {bf16:.0f} us, fp8 {fp8:.0f} us: "
                f"{bf16 / fp8:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=int, default=60_000, help="bytes of held-out text; 0: skip perplexities"
    )
    parser.add_argument("--tokens", type=int, default=8192)
    told = parser.parse_args()
    with torch.inference_mode():
        if told.text:
            perplexities(told.text)
        if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
            dense(told.tokens)
