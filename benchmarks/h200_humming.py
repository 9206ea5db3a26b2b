"""Humming (package humming-kernels) as a contender of h200_moe.py: both of its grouped products, of
rows in 16 bits by NVFP4 weights, and of rows in FP8, with a scale for 128 columns, by MXFP4 ones,
since it has no kernels for groups of 16 beside rows in 8 bits.

Its own schedule tables choose the kernels. It has none that sort ids or sum over a token's experts:
in the MLP these are this library's `route` and `combine` and, for the indexed kind, h200_align.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import torch
from h200_cells import Cell, Routed
from h200_contenders import Call, Contender, in_panels
from torch import Tensor

from fusion_moe.encodings import MXFP4, Quantized, dequantize
from fusion_moe.nn.frozen.weight import rounded

_PADS = {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}  # as serving engines call it
_SWIGLU = "a / (1.0f + __expf(-a)) * b"


class Humming(Contender):
    """Both of its kinds of grouped products. eight_bits: whether rows are rounded to FP8."""

    gemm_type = ""
    eight_bits = False

    @cached_property
    def weights(self) -> list[dict[str, Product]]:
        stored = self.layers.each(
            f"humming {self.eight_bits}", partial(Weight, eight_bits=self.eight_bits)
        )
        return [
            {part: Product(layer.of(part), self.gemm_type) for part in ("gemm1", "gemm2")}
            for layer in stored
        ]

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Compiles all kernels at once."""
        needed = list(
            itertools.product(self.weights[0].values(), sorted({cell.rows for cell in cells}))
        )
        with ThreadPoolExecutor(len(needed)) as pool:
            list(pool.map(lambda one: one[0].compile(one[1]), needed))


class Weight:
    """A weight as Humming stores it."""

    def __init__(self, weight: Quantized, eight_bits: bool):
        from humming import dtypes
        from humming.config import WeightScale2Type, WeightScaleType
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors

        experts, n, k = weight.shape
        group, scales, outer, rows = 16, dtypes.float8e4m3, WeightScale2Type.TENSOR, None
        if eight_bits:
            weight = in_panels(weight, lambda q: rounded(dequantize(q).bfloat16(), MXFP4))
            group, scales, outer = 32, dtypes.float8e8m0, WeightScale2Type.NONE
            rows = HummingInputSchema(a_dtype=dtypes.float8e4m3, input_scale_group_size=128)
        schema = HummingWeightSchema(
            b_dtype=dtypes.float4e2m1,
            bs_dtype=scales,
            weight_scale_group_size=group,
            weight_scale_type=WeightScaleType.GROUP,
            weight_scale_2_type=outer,
        )
        self.config = prepare_layer_config(
            n, k, schema, rows, num_experts=experts, torch_dtype=torch.bfloat16, **_PADS
        )
        codes, *factors = weight
        names = ("weight_scale", "weight_scale_2")
        given = {"weight": codes.view(torch.int32), **dict(zip(names, factors, strict=False))}
        self.tensors = transform_humming_tensors(self.config, given)
        self.tensors["locks"] = torch.zeros(2048, dtype=torch.int32, device="cuda")


class Product:
    """The products with a weight."""

    def __init__(self, weight: Weight, gemm_type: str):
        from humming.tune import get_heuristics_config

        self.config, self.tensors = weight.config, weight.tensors
        self.compute = json.dumps({"gemm_type": gemm_type})
        self.schedules = get_heuristics_config(self.config, gemm_type=gemm_type)

    def schedule(self, rows: int) -> dict[str, Any]:
        """What its table has for so many rows."""
        return next(told for low, high, told in self.schedules if low < rows <= high)

    def _told(self, rows: int) -> str:
        return json.dumps([(0, 1 << 30, self.schedule(rows))])

    def compile(self, rows: int) -> None:
        """Its kernel for so many rows."""
        from humming.kernel.humming import HummingKernel

        HummingKernel.prepare_kernels(self.config.to_str(), self.compute, self._told(rows), 0)

    def __call__(self, x: Tensor | tuple[Tensor, Any], rows: int, **kwargs: Any) -> Tensor:
        """x bf16 [.., K], or what `process` returns -> bf16 [rows, N]"""
        from humming.forward import humming_forward

        x, scales = x if isinstance(x, tuple) else (x, None)
        return humming_forward(
            self.config,
            x,
            **self.tensors,
            input_scale=scales,
            compute_config=self.compute,
            tuning_config=self._told(rows),
            **kwargs,
        )

    def process(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        """Its kernel for what is done to activations on their way; scales: of rows in FP8."""
        from humming.forward import may_process_input

        return may_process_input(self.config, x, **kwargs)[:2]


class Grouped(Humming):
    """Rows sorted by expert."""

    gemm_type = "grouped_contiguous"

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        weight = self.weights[layer]
        if cell.part == "mlp":
            return Call(partial(self._mlp, to, weight["gemm1"], weight["gemm2"]), layer, to)
        starts = torch.nn.functional.pad(to.ends, (1, 0))
        return Call(
            partial(weight[cell.part], to.rows(cell.part), cell.rows, expert_layout=starts),
            layer,
            to,
        )

    def _mlp(self, to: Routed, gate_up: Product, down: Product) -> Tensor:
        ops, rows = torch.ops.fusion_moe, to.ids.numel()
        ends, _, slot_of = ops.route(to.ids, self.model.experts)
        starts = torch.nn.functional.pad(ends, (1, 0))
        a = gate_up.process(to.x, layout="scatter", scatter_idx=slot_of)
        y = down.process(
            gate_up(a, rows, expert_layout=starts),
            activation_type="binary_split",
            activation_impl=_SWIGLU,
        )
        return ops.combine(down(y, rows, expert_layout=starts), slot_of, to.w)


class Indexed(Humming):
    """Rows gathered by the kernel, results in the order of slots."""

    gemm_type = "indexed"

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        weight = self.weights[layer]
        if cell.part == "mlp":
            in_place = torch.arange(cell.rows, dtype=torch.int32, device="cuda").view(to.ids.shape)
            return Call(
                partial(self._mlp, to, weight["gemm1"], weight["gemm2"], in_place), layer, to
            )
        product = weight[cell.part]
        blocks = aligned(to.ids, to.ends, to.slot_of, product.schedule(cell.rows)["block_shape"][0])
        x, top_k = (
            (to.x, self.model.slots)
            if cell.part == "gemm1"
            else (to.sorted_h[to.slot_of.flatten()], 1)
        )
        return Call(partial(product, x, cell.rows, top_k=top_k, **blocks), layer, to, slots=True)

    def _mlp(self, to: Routed, gate_up: Product, down: Product, in_place: Tensor) -> Tensor:
        ops, rows, slots = torch.ops.fusion_moe, to.ids.numel(), self.model.slots
        ends, _, slot_of = ops.route(to.ids, self.model.experts)
        heights = [weight.schedule(rows)["block_shape"][0] for weight in (gate_up, down)]
        first = aligned(to.ids, ends, slot_of, heights[0])
        second = first if heights[0] == heights[1] else aligned(to.ids, ends, slot_of, heights[1])
        y = down.process(
            gate_up(to.x, rows, top_k=slots, **first),
            activation_type="binary_split",
            activation_impl=_SWIGLU,
        )
        return ops.combine(down(y, rows, top_k=1, **second), in_place, to.w)


class GroupedFp8(Grouped):
    """Rows in FP8."""

    eight_bits = True


class IndexedFp8(Indexed):
    """Rows in FP8."""

    eight_bits = True


def aligned(ids: Tensor, ends: Tensor, slot_of: Tensor, height: int) -> dict[str, Tensor]:
    """ids i32 [T, k], ends i32 [E], slot_of i32 [T, k] -> what Humming's indexed products read.

    Slots sorted by expert, each expert's in whole blocks of `height`, filled up with T k; the
    expert of each block; how many slots in all.
    """
    rows, experts = ids.numel(), len(ends)
    blocks = min(rows, experts) + rows // height
    sorted_ids = torch.empty(blocks * height, dtype=torch.int32, device=ids.device)
    expert_ids = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    count = torch.empty((), dtype=torch.int32, device=ids.device)
    _align_kernel()[(-(-blocks * height // 128),)](
        ids,
        ends,
        slot_of,
        sorted_ids,
        expert_ids,
        count,
        rows,
        blocks,
        experts,
        height,
        _power_of_two(experts),
        128,
    )
    return {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": count}


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _align_kernel() -> Any:
    from h200_align import align  # at first use: Triton

    return align
