"""Runs the CUDA backend's kernels on small ragged inputs, in a process that compute-sanitizer
watches: see test_cuda_sanitized.py.

    python cuda_sanitized.py PART [--few]

--few: one variant of each kernel, on fewer inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fusions import copies, mxfp8_copies
from kernel_tables import MMA, TABLE, variants_of
from test_cuda_aux_loss import losses
from test_cuda_kernels import exact_weight, generator, program
from test_cuda_lora import Layer as AdaptedLayer, arguments, step
from test_cuda_router import CASES, inputs, router
from torch.utils._pytree import tree_map

import fusion_moe
from fusion_moe.arch import Arch
from fusion_moe.backends.cuda import heuristics, launch
from fusion_moe.backends.cuda.launch import build
from fusion_moe.backends.cuda.source import KernelSource
from fusion_moe.backends.cuda.table import ALWAYS, Regime
from fusion_moe.backends.cuda.variants import (
    M8,
    M32,
    M80,
    M160,
    Variant,
)
from fusion_moe.definitions.operations import SPECS, bind
from fusion_moe.encodings import (
    ENCODINGS,
    FP8_COLUMNS,
    FP8_E8M0,
    FP8_ROWS,
    MXFP4,
    NVFP4,
    Quantized,
    quantize,
)
from fusion_moe.errors import GroupsError
from fusion_moe.layouts import W16X64
from fusion_moe.nn import prepare_
from fusion_moe.nn.frozen.weight import rounded
from fusion_moe.runtime import cuda, memory

G, M = 5, 45  # groups; rows of one product
H, I, SLOTS = 128, 192, 3  # hidden and intermediate features of a layer, slots of a token
BIG = 2**31 - 1
FEW = False


class Call(NamedTuple):
    """A call of an operation. faulty: whether its ends, ids or slots are wrong."""

    name: str
    args: tuple[Any, ...]
    others: dict[str, Any]
    faulty: bool = False

    def compute(self) -> None:
        """On the GPU, compiled anew, with nothing left to the reference."""
        args = tree_map(lambda a: a.cuda() if isinstance(a, torch.Tensor) else a, list(self.args))
        program(self.name, args, self.others)(
            list(bind(SPECS[self.name], args, self.others).tensors.values())
        )

    def run(self) -> None:
        """Is found faulty if it is."""
        self.compute()
        assert is_faulty() == self.faulty


def is_faulty() -> bool:
    """Whether a kernel found something wrong."""
    try:
        fusion_moe.synchronize()
    except GroupsError:
        return True
    return False


def in_layout(weight: Quantized, layout: str) -> list[torch.Tensor]:
    """The parts."""
    packed = layout == "w16x64"
    return list(W16X64.pack(*weight, encoding=weight.encoding) if packed else weight)


def products(
    layout: str, fmt: str = "nvfp4", activations: torch.dtype = torch.bfloat16, k: int = 320
) -> Iterator[Call]:
    """Empty groups, rows of no group, one group with all rows; ends that decrease, are negative or
    past the rows. k: of tiles. Of other encodings than NVFP4, and of few, two calls.
    """
    k, n = (96, 33) if layout == "linear" else (k, 80)
    a = torch.randn(M, k, generator=generator()).to(activations)
    parts = in_layout(
        quantize(torch.randn(G, n, k, generator=generator()), encoding=ENCODINGS[fmt]), layout
    )
    right = ([0, 1, 1, 30, 41], [0, 0, M, M, M], [0] * G)
    wrong = ([9, 3, 4, 400, 20], [-5, 3, 3, 3, BIG], [BIG] * G)
    for ends in (*right, *wrong) if fmt == "nvfp4" and not FEW else (right[0], wrong[0]):
        yield Call(
            "grouped_mm",
            (a, parts, torch.tensor(ends, dtype=torch.int32)),
            {"weight_format": fmt, "weight_layout": layout},
            faulty=ends in wrong,
        )


def layers(layout: str, tokens: int) -> Iterator[Call]:
    """Gather, SwiGLU, combine: two experts without tokens; one with all; ids that name none."""
    g = generator()
    gate_up, down = exact_weight(NVFP4, G, 2 * I, H), exact_weight(NVFP4, G, H, I)
    gate_up = gate_up.with_(decode_scale=torch.ones(G, 2))
    weights = (*in_layout(gate_up, layout), *in_layout(down, layout))
    x, w = torch.randn(tokens, H, generator=g).bfloat16(), torch.rand(tokens, SLOTS, generator=g)
    few, one = (
        torch.randint(1, G - 1, (tokens, SLOTS), generator=g),
        torch.full((tokens, SLOTS), G - 1),
    )
    wrong = few.clone()
    wrong[0], wrong[-1] = torch.tensor([-1, G, BIG]), torch.tensor([-BIG, 0, 2**40])
    for ids in (few, one, wrong):
        yield Call(
            "expert_mlp", (x, ids, w, *weights), {"weight_layout": layout}, faulty=ids is wrong
        )


def without_product() -> Iterator[Call]:
    """Routing in one block, at once or in parts, and in several; a combine; loops. An id of -1 is a
    slot without an expert, -2 is wrong.
    """
    g = generator()
    for ids in (torch.randint(0, 37, (tokens, SLOTS), generator=g) for tokens in (300, 701, 1501)):
        yield Call("route", (ids, 37), {})
        yield Call("route", (ids.int() - 2, 37), {}, faulty=True)
    y, w = torch.randn(M, H, generator=g).bfloat16(), torch.rand(M // SLOTS, SLOTS, generator=g)
    slots = torch.randperm(M, generator=g).view(-1, SLOTS).int()
    yield Call("combine", (y, slots, w), {})
    yield Call("combine", (y, slots - 2, w), {}, faulty=True)
    yield Call(
        "group_add",
        (
            y,
            torch.randn(G, H, generator=g).bfloat16(),
            torch.tensor([0, 1, 1, 30, 41], dtype=torch.int32),
        ),
        {},
    )
    yield Call(
        "scaled_swiglu", (y[:, :70].contiguous(), torch.rand(M, generator=g)), {"interleave": 7}
    )


class Training(NamedTuple):
    """The forward and the backward of a layer with weights in bfloat16, with all gradients. faulty:
    whether its ids are wrong.
    """

    given: tuple[torch.Tensor, ...]
    others: dict[str, Any]
    faulty: bool

    def run(self) -> None:
        """On the GPU. What the forward found wrong may already be there when the backward is
        called, which then raises it.
        """
        assert self._raises() == self.faulty

    def _raises(self) -> bool:
        try:
            self.compute()
        except GroupsError:
            return True
        return is_faulty()

    def compute(self) -> None:
        """Forward and backward."""
        x, ids, w, gate_up, down, *biases = (
            t.cuda().requires_grad_(t.is_floating_point()) for t in self.given
        )
        y = torch.ops.fusion_moe.fused_experts(
            x, ids, w, [gate_up], [down], *biases, weight_format="bf16", **self.others
        )
        y.backward(torch.ones_like(y))


def training() -> Iterator[Training]:
    """Sizes that are multiples of 8 and others, groups of few rows, of many, of none; matrices of
    either order; by the MXFP8 recipe; ids that name none.
    """
    g = generator()
    for hidden, inner, tokens, others in (
        (136, 72, 300, {}),
        (100, 36, 70, {}),
        (128, 96, 130, {"transposed": True}),
        (160, 96, 130, {"activation_format": "mxfp8"}),
    ):
        transposed = "transposed" in others
        x, w = (
            torch.randn(tokens, hidden, generator=g).bfloat16(),
            torch.rand(tokens, SLOTS, generator=g),
        )
        shapes = (
            ((G, hidden, 2 * inner), (G, inner, hidden))
            if transposed
            else ((G, 2 * inner, hidden), (G, hidden, inner))
        )
        weights = [
            torch.randn(shape, generator=g).bfloat16()
            for shape in (*shapes, (G, 2 * inner), (G, hidden))
        ]
        ids = torch.randint(1, G - 1, (tokens, SLOTS), generator=g)
        wrong = ids.clone()
        wrong[0], wrong[-1] = torch.tensor([-1, G, BIG]), torch.tensor([-BIG, 0, 2**40])
        for picked in (ids, wrong):
            yield Training((x, picked, w, *weights), others, faulty=picked is wrong)


def allocate_apart(
    found: memory.Memory, device: torch.device | None = None
) -> tuple[object, list[int]]:
    """As memory.allocate, but each array is an allocation of its own, as large as it has to be."""
    held = [
        torch.empty(array.nbytes, dtype=torch.uint8, device=device or "cpu")
        for array in found.arrays
    ]
    return held, [t.data_ptr() for t in held]


def build_every_lane_arrives(kernel: KernelSource, arch: Arch) -> Path:
    """As launch.build, with barriers at which all lanes of a warp arrive: see
    kernels/pipeline.cuh.
    """
    return build(replace(kernel, text=f"#define EVERY_LANE_ARRIVES\n{kernel.text}"), arch)


def use_first(kind: str, regime: Regime) -> None:
    """One regime for all sizes, and others where its kernels do not fit."""
    print(kind, *(variant.name for variant in regime.variants), flush=True)
    changed = replace(TABLE, **{kind: (regime, *getattr(TABLE, kind))})
    heuristics.table_of = lambda arch: changed


def main(part: str, few: bool) -> None:
    """Products are run once with each variant of their kernel, and by concurrent kernels."""
    global FEW
    FEW = few
    memory.allocate, launch.build = allocate_apart, build_every_lane_arrives
    PARTS[part]()
    print("clean")


def run_all(calls: Iterable[Call | Training]) -> None:
    """One after the other, once the kernels of all are compiled, in parallel."""
    all_calls = list(calls)
    with fusion_moe.preparing():
        for call in all_calls:
            call.compute()
    for call in all_calls:
        call.run()


def on_this_gpu(kind: str) -> list[Variant]:
    """The variants for weights of a kind that it runs."""
    return [v for v in variants_of(kind) if not v.why_not_on(cuda.arch(0))]


def some(variants: Iterable[Variant]) -> list[Variant]:
    """All of them; of few one of each kernel: it may have clusters, or add up in row order."""
    if not FEW:
        return list(variants)
    return list({(type(v), v.cluster > 1, "_row" in v.name): v for v in variants}.values())


def products_by(layout: str) -> None:
    """Of each variant of the kernels for encoded weights."""
    kind = {"linear": "linear", "w16x64": "tiled"}[layout]
    variants = some(on_this_gpu(kind))
    several = [
        Regime(ALWAYS, M160, ((8, M32), (20, M80), (None, M160))),
        Regime(ALWAYS, M8, ((12, M8), (None, M80))),
    ]
    for variant in (v for v in variants if v.cluster > 1):
        use_first(kind, Regime(ALWAYS, (variant,)))
        run_all(products(layout, k=512))  # whole stages for each block of a cluster
    alone = [Regime(ALWAYS, (variant,)) for variant in variants if variant.cluster == 1]
    fit = {*M8, *M32, *M80, *M160} <= {*on_this_gpu(kind)}
    others = (("mxfp4", torch.bfloat16), ("int4", torch.bfloat16), ("nvfp4", torch.float16))
    for i, regime in enumerate((*alone, *(several if fit else []))):
        use_first(kind, regime)
        run_all(
            (
                *products(layout),
                *chain(*(layers(layout, tokens) for tokens in ((60,) if FEW else (7, 60)))),
                *chain(*(products(layout, *of) for of in others if not FEW or of is others[i % 3])),
            )
        )


def without_wgmma() -> None:
    """Of each variant that GPUs without it have for many rows, which are in no table of an H200."""
    for variant in some(v for v in MMA if not v.row_order):
        use_first("tiled", Regime(ALWAYS, (variant,)))
        run_all((*products("w16x64", k=512), *layers("w16x64", tokens=60)))


def wide_products() -> None:
    """Of each variant of the kernels for bf16 weights."""
    for layout, kind in (("linear", "wide_linear"), ("w16x64", "wide_tiled")):
        for variant in some(on_this_gpu(kind)):
            use_first(kind, Regime(ALWAYS, (variant,)))
            run_all(products(layout, "bf16"))


def fp8() -> None:
    """Quantized rows and products of codes: groups of few rows, of many, of none; wrong ends; a
    last block of K that is short. Training with both copies of everything, in whole blocks or not.
    """
    g = generator()
    for k, n in ((128, 64), (400, 320)):
        weight = quantize(torch.randn(G, n, k, generator=g), encoding=ENCODINGS["fp8_e8m0"])
        for ends in ([3, 3, 4, 20, 20], [300, 300, 301, 461, 622], [9, 3, 4, 400, 20]):
            Call(
                "grouped_mm",
                (
                    torch.randn(627, k, generator=g).bfloat16(),
                    list(weight),
                    torch.tensor(ends, dtype=torch.int32),
                ),
                {"weight_format": "fp8_e8m0", "activation_format": "fp8"},
                faulty=ends[0] == 9,
            ).run()
    for tokens in (7, 300):
        x, w = torch.randn(tokens, 256, generator=g).bfloat16(), torch.rand(tokens, SLOTS)
        ids = torch.randint(0, G, (tokens, SLOTS), generator=g)
        layer = [
            quantize(torch.randn(G, *shape, generator=g), encoding=ENCODINGS["fp8"])
            for shape in ((384, 256), (256, 192))
        ]
        Call(
            "fused_experts",
            (x, ids, w, *map(list, layer)),
            {"weight_format": "fp8", "activation_format": "fp8"},
        ).run()
    for h, i in ((128, 256), (320, 192)):
        weights = [torch.randn(G, *s, generator=g).bfloat16() for s in ((2 * i, h), (h, i))]
        x, w = torch.randn(300, h, generator=g).bfloat16(), torch.rand(300, SLOTS, generator=g)
        ids = torch.randint(1, G - 1, (300, SLOTS), generator=g)
        Training((x, ids, w, *weights), {"activation_format": "fp8_block"}, faulty=False).run()


def adapters() -> None:
    """A training step of adapters beside experts in 4 bits, in either layout."""
    for prepare in (False, True):
        torch.manual_seed(0)
        layer = AdaptedLayer().cuda()
        if prepare:
            prepare_(layer)
        step(layer, *arguments(1))
        assert not is_faulty()


def copies_of_codes() -> None:
    """Rows, columns and blocks in 8 bits, matrices in 4, of which some are no whole tiles; weights
    that a kernel reorders for many rows.
    """
    x = torch.randn(2, 128, 264, generator=generator()).bfloat16()
    ends = torch.tensor([5, 5, 38, 202], dtype=torch.int32)
    rows = x.flatten(0, 1)[:210].contiguous()
    for fusion, given in (
        (copies(x, [FP8_ROWS, FP8_COLUMNS]), (x,)),
        (copies(x, [FP8_E8M0]), (x,)),
        (copies(rows, [FP8_ROWS, FP8_COLUMNS], ends), (rows, ends)),
        (mxfp8_copies(x[..., :160], [-1, -2]), (x[..., :160].contiguous(),)),
        (mxfp8_copies(rows[:, :160], [-1, -2], ends), (rows[:, :160].contiguous(), ends)),
    ):
        fusion_moe.run(fusion, [t.cuda() for t in given])
    for encoding in (NVFP4, MXFP4):
        rounded(x[..., :256].cuda(), encoding, layout="w16x64")
        rounded(x[..., :224].float().cuda(), encoding)
    weight = quantize(torch.randn(2, 80, 320, generator=generator()), NVFP4)
    many = torch.randn(1300, 320, generator=generator()).bfloat16()
    how = {"weight_format": "nvfp4", "weight_layout": "linear"}
    Call("grouped_mm", (many, [*weight], torch.tensor([700, 1300], dtype=torch.int32)), how).run()


def routers() -> None:
    """Ids, weights, sorted rows; losses with their gradients."""
    for case in ("qwen3", "deepseek-v3", "gpt-oss"):
        for tokens in (3, 65):
            given = [t.cuda() for t in inputs(case, tokens)]
            fusion_moe.run(router(*CASES[case]), given)
    logits = torch.randn(65, 33, generator=generator()).cuda().requires_grad_()
    losses(logits, 4, "sigmoid", torch.full((), 65, device="cuda")).backward()
    assert not is_faulty()


PARTS = {
    "training": lambda: run_all(training()),
    "loops": lambda: run_all(without_product()),
    "linear": lambda: products_by("linear"),
    "tiled": lambda: products_by("w16x64"),
    "mma": without_wgmma,
    "wide": wide_products,
    "fp8": fp8,
    "adapters": adapters,
    "copies": copies_of_codes,
    "routers": routers,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--few", action="store_true")
    main(**vars(parser.parse_args()))
