"""What stands around experts, on a GPU, in CUDA graphs; us a call, and how many times as fast as
the other way. Results are compared first.

    python benchmarks/h200_small.py matrix [--rows 1 8 16 ...]
        One NVFP4 matrix, as attention and shared experts have them, beside torch's bf16 product.
        Calls go round matrices that no cache holds together; the floor reads the matrix once.
    python benchmarks/h200_small.py router [--rows 1 8 65 ...]
        From logits to router weights, ids and sorted rows, beside torch's operations.
    python benchmarks/h200_small.py combine [--rows 1 8 64]
        The sum of each token's rows in float32, beside torch's operations.
    python benchmarks/h200_small.py layer [--rows 1 8 64]
        The experts of gpt-oss-20b in MXFP4, with biases: calls go round layers that no cache holds
        together.
    python benchmarks/h200_small.py block [--rows 1 8 32]
        A block of Qwen3-30B-A3B, norm to residual, with these experts: eager; under Inductor; under
        backend="fusion_moe" with torch's router; and with `topk_router`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from cuda_graphs import capture, medians
from h200_cells import MODELS
from torch import Tensor
from torch.nn.functional import linear, rms_norm

import fusion_moe
from fusion_moe import FusionDefinition
from fusion_moe.encodings import MXFP4, NVFP4, dequantize, quantize
from fusion_moe.layouts import W16X64
from fusion_moe.nn import NVFP4Experts, swiglu
from fusion_moe.ops import topk_router
from fusion_moe.runtime import cuda

SIZES = {  # [N, K]
    "Qwen3-30B-A3B k_proj": (512, 2048),
    "Qwen3-30B-A3B o_proj": (2048, 4096),
    "DeepSeek-V3 shared down": (7168, 2048),
    "DeepSeek-V3 shared gate, up": (4096, 7168),
    "Qwen3-8B down_proj": (4096, 12288),
    "Llama-3-70B down_proj": (8192, 28672),
    "Llama-3-70B gate, up": (57344, 8192),
}
ROUTERS: dict[str, tuple[int, int, str]] = {
    "Qwen3-30B-A3B": (128, 8, "softmax"),
    "gpt-oss-120b": (128, 4, "softmax"),
    "256 experts, by sigmoid": (256, 8, "sigmoid"),
}
SUMS = {"gpt-oss-20b": (2880, 4), "Qwen3-30B-A3B": (2048, 8), "DeepSeek-V3": (7168, 8)}  # H, k
GPT_OSS, LAYERS = (32, 4, 2880, 2880), 8  # experts, k, H, I
COPIES_BYTES, MOST_COPIES, REPEATS = 2e8, 64, 7
Ways = Mapping[str, Sequence[Callable[[], Any]]]  # calls that go round; the first way is ours


def matrices(counts: Sequence[int]) -> Iterator[tuple[str, Ways]]:
    """Of each size, and number of rows."""
    for name, (n, k) in SIZES.items():
        floor = n * k * 9 / 16 / cuda.arch(torch.cuda.current_device()).memory_bandwidth * 1e6
        copies = max(2, min(MOST_COPIES, math.ceil(COPIES_BYTES / (n * k * 9 / 16))))
        made = [
            quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), NVFP4)
            for _ in range(copies)
        ]
        packed = [
            (*W16X64.pack(w[0][None].clone(), w[1][None].clone(), encoding=NVFP4), w[2].reshape(1))
            for w in made
        ]
        plain = [dequantize(w).bfloat16() for w in made]
        ours = partial(torch.ops.fusion_moe.nvfp4_grouped_mm, weight_layout="w16x64")
        for rows in counts:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            offs = torch.tensor([rows], dtype=torch.int32, device="cuda")
            yield (
                f"{name} [{n}, {k}], floor {floor:.1f}, {rows} rows",
                {
                    "ours": [partial(ours, x, *w, offs) for w in packed],
                    "torch": [partial(linear, x, w) for w in plain],
                },
            )


def in_torch(logits: Tensor, k: int, scoring: str) -> tuple[Tensor, ...]:
    """logits [T, E] -> weights, ids, ends, rows and slots: transformers' router, and the sort of
    grouped products.
    """
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    weights, ids = scores.topk(k, dim=-1)
    order = ids.flatten().argsort(stable=True)
    ends = torch.histc(ids.float(), logits.shape[1], 0, logits.shape[1] - 1).cumsum(0)
    return weights / weights.sum(-1, keepdim=True), ids, ends.int(), order // k, order


def routers(counts: Sequence[int]) -> Iterator[tuple[str, Ways]]:
    """One program beside torch's operations."""
    for name, (experts, k, scoring) in ROUTERS.items():
        fd = FusionDefinition()
        logits = fd.define_tensor(shape=[fd.define_size("t"), experts], dtype="bf16")
        ids = fd.ops.topk_ids(logits, 0, k=k, scoring=scoring)
        weights = fd.ops.topk_weights(logits, ids, scoring=scoring, renormalize=True)
        for v in (weights, ids, *fd.ops.route(ids, groups=fd.define_groups("g", experts))):
            fd.add_output(v)
        fusion = fd.fusion()
        for rows in counts:
            given = torch.randn(rows, experts, device="cuda", dtype=torch.bfloat16)
            yield (
                f"{name}, {rows} tokens",
                {
                    "ours": [lambda f=fusion, x=given: fusion_moe.run(f, [x])[0]],  # type: ignore[misc]
                    "torch": [lambda x=given, how=(k, scoring): in_torch(x, *how)[0]],  # type: ignore[misc]
                },
            )


def combines(counts: Sequence[int]) -> Iterator[tuple[str, Ways]]:
    """Of several widths and numbers of slots."""
    for name, (width, k) in SUMS.items():
        fd = FusionDefinition()
        rows, t = fd.define_size("m"), fd.define_size("t")
        given = ([rows, width], "bf16"), ([t, k], "i32"), ([t, k], "f32")
        tensors = [fd.define_tensor(shape=shape, dtype=dtype) for shape, dtype in given]
        fd.add_output(fd.ops.combine(*tensors))
        fusion = fd.fusion()
        for tokens in counts:
            y = torch.randn(tokens * k, width, device="cuda", dtype=torch.bfloat16)
            slot_of = torch.randperm(tokens * k, device="cuda", dtype=torch.int32).view(tokens, k)
            w = torch.rand(tokens, k, device="cuda")
            yield (
                f"{name}, {tokens} tokens",
                {
                    "ours": [lambda f=fusion, x=(y, slot_of, w): fusion_moe.run(f, x)[0]],  # type: ignore[misc]
                    "torch": [lambda y=y, at=slot_of, w=w: (y[at] * w[..., None]).sum(1)],  # type: ignore[misc]
                },
            )


def layers(counts: Sequence[int]) -> Iterator[tuple[str, Ways]]:
    """Ours alone; each layer has weights and a routing of its own."""
    experts, k, h, i = GPT_OSS
    activation = swiglu(interleave=1, limit=7.0, alpha=1.702, up_offset=1.0)
    how = {"weight_format": "mxfp4", "weight_layout": "w16x64", "activation": activation}

    def weight(n: int, k: int) -> list[Tensor]:
        codes = torch.randint(0, 256, (experts, n, k // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(118, 122, (experts, n, k // 32), device="cuda", dtype=torch.uint8)
        return list(W16X64.pack(codes, scales.view(torch.float8_e8m0fnu), encoding=MXFP4))

    def bias(n: int) -> Tensor:
        return torch.randn(experts, n, device="cuda", dtype=torch.bfloat16)

    made = [(weight(2 * i, h), weight(h, i), bias(2 * i), bias(h)) for _ in range(LAYERS)]
    for tokens in counts:
        x = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16)
        calls = []
        for of_layer in made:
            w, ids = torch.rand(tokens, experts, device="cuda").topk(k)
            ours = torch.ops.fusion_moe.fused_experts
            calls.append(partial(ours, x, ids, w, *of_layer, **how))
        yield f"gpt-oss-20b's experts, MXFP4, {tokens} tokens", {"ours": calls}


class Block(torch.nn.Module):
    """x bf16[T, H] -> [T, H]: what a decoder layer does after attention."""

    def __init__(self, experts: NVFP4Experts, gate: Tensor, k: int, fused: bool):
        super().__init__()
        self.experts, self.gate, self.k, self.fused = experts, gate, k, fused
        self.norm = torch.ones_like(gate[0])

    def forward(self, x: Tensor) -> Tensor:
        rows = rms_norm(x, (x.shape[1],), self.norm, 1e-6)
        logits = linear(rows, self.gate)
        if self.fused:
            weights, ids = topk_router(logits, self.k, renormalize=True, out_dtype=x.dtype)
        else:
            weights, ids = logits.softmax(-1, dtype=torch.float32).topk(self.k, dim=-1)
            weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return x + self.experts(rows, ids, weights)


def blocks(counts: Sequence[int]) -> Iterator[tuple[str, Ways]]:
    """The block, each way."""
    m = MODELS["qwen3"]
    shapes = (
        (m.experts, 2 * m.intermediate, m.hidden),
        (m.experts, m.hidden, m.intermediate),
        (m.experts, m.hidden),
    )
    gate_up, down, gate = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5
        for shape in shapes
    )
    experts = NVFP4Experts.from_float(gate_up, down)
    fusion_moe.prepare_(experts)
    plain, fused = (Block(experts, gate, m.slots, way) for way in (False, True))
    for rows in counts:
        torch._dynamo.reset()  # all ways compile the same forward: Dynamo keeps few graphs of one
        x = torch.randn(rows, m.hidden, device="cuda", dtype=torch.bfloat16)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "ours": torch.compile(fused, dynamic=False, backend="fusion_moe"),
            "torch's router": torch.compile(plain, dynamic=False, backend="fusion_moe"),
            "inductor": torch.compile(plain, dynamic=False),
            "eager": plain,
        }
        yield f"{rows} tokens", {name: [partial(way, x)] for name, way in ways.items()}


WHAT = {
    "matrix": (matrices, (1, 8, 16, 32, 64, 128, 256, 512, 2048)),
    "router": (routers, (1, 8, 65, 256, 4096)),
    "combine": (combines, (1, 8, 64)),
    "layer": (layers, (1, 8, 64)),
    "block": (blocks, (1, 8, 32)),
}


@torch.no_grad()
def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--rows", type=int, nargs="+")
    told = parser.parse_args()
    cases, usual = WHAT[told.what]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, ways in cases(told.rows or usual):
        want = next(reversed(ways.values()))[0]().float()
        for way, (call, *_) in ways.items():
            error = float((call().float() - want).norm() / want.norm())
            if not error < 5e-2:
                raise SystemExit(f"{name}: {way} differs by {error:.1e}")
        graphs = {
            way: capture(list(calls) * max(1, 20 // len(calls))) for way, calls in ways.items()
        }
        times = medians(graphs, REPEATS)
        said = (f"{way} {us:.1f} ({us / times['ours']:.2f}x)" for way, us in times.items())
        print(f"{name}: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
