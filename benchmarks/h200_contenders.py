"""Who computes the cells of h200_moe.py: this library, and its peers in the same process.

Each contender takes the same weights and gives, for a cell, calls to be captured in a CUDA graph. Products begin with rows that are sorted
by expert already, but for Humming's indexed mode, which gathers them. The MLP begins with the ids of experts and ends with tokens.

    fusion_moe        operations of this library, weights in the layout that its kernels read
    humming indexed, humming grouped
                      kernels of the package humming-kernels, as its own tables of schedules choose them: both its kinds of products for
                      mixtures of experts. It has no kernels that sort ids or sum a token's experts: in the MLP these are this library's
                      `route` and `combine` and, for indexed, one more below.
    torch             torch's grouped product in bf16, and eager operations around it
    dense             torch's dense products in bf16 of as many rows: no mixture of experts, what the card can do
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from h200_cells import Cell, Layer, Model, Routed, expert
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu

from fusion_moe.formats import Quantized
from fusion_moe.layouts import W16X64

_AT_ONCE = 2**28  # elements of a weight that change their form at once
_MOST_BF16 = 24e9  # bytes of weights in bf16


class Call(NamedTuple):
    """run() -> bf16 [M, N] or, for the MLP, [T, H]. slots: whether its rows are in the order of slots, and not sorted by expert."""

    run: Callable[[], Tensor]
    layer: int
    to: Routed
    slots: bool = False

    def rows(self, found: Tensor) -> Tensor:
        """What it returned, rows sorted by expert."""
        return found[self.to.order] if self.slots else found


class Contender:
    """One way to compute. `exact`: whether its result is to be checked."""

    exact = True

    def __init__(self, model: Model, layers: Sequence[Layer]):
        self.model, self.layers = model, layers

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        """The call for one layer and one routing."""
        raise NotImplementedError

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Whatever takes long and need not be repeated for each cell."""


def panels(weight: Quantized) -> list[slice]:
    """Experts, a few at a time."""
    experts, n, k = weight.shape
    step = max(1, _AT_ONCE // (n * k))
    return [slice(start, start + step) for start in range(0, experts, step)]


# This library ---------------------------------------------------------------------------------------------------------


def tiled(weight: Quantized) -> Quantized:
    """The weight in the layout w16x64."""
    codes, scales = torch.empty_like(weight.codes), torch.empty_like(weight.block_scale)
    for some in panels(weight):
        codes[some], scales[some] = W16X64.pack(weight.codes[some], weight.block_scale[some])
    return Quantized(codes, scales, weight.decode_scale)


class Ours(Contender):
    """fusion_moe's operations."""

    @cached_property
    def weights(self) -> list[Layer]:
        return [Layer(tiled(layer.gate_up), tiled(layer.down)) for layer in self.layers]

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        ops, w = torch.ops.fusion_moe, self.weights[layer]
        if cell.part == "mlp":
            run = partial(ops.expert_mlp, to.x, to.ids, to.w, *w.gate_up, *w.down, weight_layout=W16X64.name)
        else:
            run = partial(ops.nvfp4_grouped_mm, to.rows(cell.part), *w.of(cell.part), to.ends, weight_layout=W16X64.name)
        return Call(run, layer, to)


# torch ----------------------------------------------------------------------------------------------------------------


class Torch(Contender):
    """torch's grouped product."""

    @cached_property
    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """bf16 [E, 2I, H], [E, H, I] of some layers: of all if they fit."""
        size = 2 * sum(n * k for n, k in self.model.products("mlp")) * self.model.experts
        return [(_bf16(layer.gate_up), _bf16(layer.down)) for layer in self.layers[: max(1, int(_MOST_BF16 // size))]]

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        layer %= len(self.weights)
        both = self.weights[layer]
        if cell.part == "mlp":
            return Call(partial(_mlp, to.x, to.ids, to.w, *both), layer, to)
        return Call(partial(grouped_mm, to.rows(cell.part), both[cell.part == "gemm2"].mT, offs=to.ends), layer, to)


def _bf16(weight: Quantized) -> Tensor:
    made = torch.empty(weight.shape, dtype=torch.bfloat16, device="cuda")
    for e in range(len(made)):
        made[e] = expert(weight, e)
    return made


def _mlp(x: Tensor, ids: Tensor, w: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(len(gate_up), dtype=ids.dtype, device=ids.device), right=True, out_int32=True)
    gate, up = grouped_mm(x[order // ids.shape[1]], gate_up.mT, offs=ends).chunk(2, -1)
    y = grouped_mm(silu(gate) * up, down.mT, offs=ends)
    y = torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1)
    return torch.bmm(w[:, None], y).squeeze(1)


class Dense(Contender):
    """torch's dense products of the same M, N and K."""

    exact = False

    @cached_property
    def weights(self) -> dict[tuple[int, int], Tensor]:
        return {nk: torch.randn(nk, device="cuda").bfloat16() for nk in self.model.products("mlp")}

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        inputs = {self.model.hidden: to.sorted_x, self.model.intermediate: to.sorted_h}
        sizes = self.model.products(cell.part)
        return Call(lambda: [linear(inputs[k], self.weights[n, k]) for n, k in sizes][-1], layer, to)


# Humming --------------------------------------------------------------------------------------------------------------

HUMMING_PADS = {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}  # as serving engines call it
_SWIGLU = "a / (1.0f + __expf(-a)) * b"


class Humming(Contender):
    """Both of its kinds of grouped products."""

    gemm_type = ""

    @cached_property
    def weights(self) -> list[dict[str, HummingWeight]]:
        return [{part: HummingWeight(layer.of(part), self.gemm_type) for part in ("gemm1", "gemm2")} for layer in self.layers]

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Compiles all kernels at once."""
        needed = list(itertools.product(self.weights[0].values(), sorted({cell.rows for cell in cells})))
        with ThreadPoolExecutor(len(needed)) as pool:
            list(pool.map(lambda one: one[0].compile(one[1]), needed))


class HummingWeight:
    """A weight as Humming stores it, and the products with it."""

    def __init__(self, weight: Quantized, gemm_type: str):
        from humming import dtypes
        from humming.config import WeightScale2Type, WeightScaleType
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors
        from humming.tune import get_heuristics_config

        experts, n, k = weight.shape
        schema = HummingWeightSchema(
            b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e4m3, weight_scale_group_size=16,
            weight_scale_type=WeightScaleType.GROUP, weight_scale_2_type=WeightScale2Type.TENSOR,
        )  # fmt: skip
        self.config = prepare_layer_config(n, k, schema, num_experts=experts, torch_dtype=torch.bfloat16, **HUMMING_PADS)
        given = {"weight": weight.codes.view(torch.int32), "weight_scale": weight.block_scale, "weight_scale_2": weight.decode_scale}
        self.tensors = transform_humming_tensors(self.config, given)
        self.tensors["locks"] = torch.zeros(2048, dtype=torch.int32, device="cuda")
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

    def __call__(self, x: Tensor, rows: int, **kwargs: Any) -> Tensor:
        """x bf16 [.., K] -> bf16 [rows, N]"""
        from humming.forward import humming_forward

        return humming_forward(self.config, x, **self.tensors, compute_config=self.compute, tuning_config=self._told(rows), **kwargs)

    def process(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Its kernel for what is done to activations on their way."""
        from humming.forward import may_process_input

        return may_process_input(self.config, x, **kwargs)[0]


class HummingGrouped(Humming):
    """Rows sorted by expert."""

    gemm_type = "grouped_contiguous"

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        weight = self.weights[layer]
        if cell.part == "mlp":
            return Call(partial(self._mlp, to, weight["gemm1"], weight["gemm2"]), layer, to)
        starts = torch.nn.functional.pad(to.ends, (1, 0))
        return Call(partial(weight[cell.part], to.rows(cell.part), cell.rows, expert_layout=starts), layer, to)

    def _mlp(self, to: Routed, gate_up: HummingWeight, down: HummingWeight) -> Tensor:
        ops, rows = torch.ops.fusion_moe, to.ids.numel()
        ends, _, slot_of = ops.route(to.ids, self.model.experts)
        starts = torch.nn.functional.pad(ends, (1, 0))
        a = gate_up.process(to.x, layout="scatter", scatter_idx=slot_of)
        y = down.process(gate_up(a, rows, expert_layout=starts), activation_type="binary_split", activation_impl=_SWIGLU)
        return ops.combine(down(y, rows, expert_layout=starts), slot_of, to.w)


class HummingIndexed(Humming):
    """Rows gathered by the kernel, results in the order of slots."""

    gemm_type = "indexed"

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        weight = self.weights[layer]
        if cell.part == "mlp":
            in_place = torch.arange(cell.rows, dtype=torch.int32, device="cuda").view(to.ids.shape)
            return Call(partial(self._mlp, to, weight["gemm1"], weight["gemm2"], in_place), layer, to)
        product = weight[cell.part]
        blocks = aligned(to.ids, to.ends, to.slot_of, product.schedule(cell.rows)["block_shape"][0])
        x, top_k = (to.x, self.model.slots) if cell.part == "gemm1" else (to.sorted_h[to.slot_of.flatten()], 1)
        return Call(partial(product, x, cell.rows, top_k=top_k, **blocks), layer, to, slots=True)

    def _mlp(self, to: Routed, gate_up: HummingWeight, down: HummingWeight, in_place: Tensor) -> Tensor:
        ops, rows, slots = torch.ops.fusion_moe, to.ids.numel(), self.model.slots
        ends, _, slot_of = ops.route(to.ids, self.model.experts)
        heights = [weight.schedule(rows)["block_shape"][0] for weight in (gate_up, down)]
        first = aligned(to.ids, ends, slot_of, heights[0])
        second = first if heights[0] == heights[1] else aligned(to.ids, ends, slot_of, heights[1])
        y = down.process(gate_up(to.x, rows, top_k=slots, **first), activation_type="binary_split", activation_impl=_SWIGLU)
        return ops.combine(down(y, rows, top_k=1, **second), in_place, to.w)


def aligned(ids: Tensor, ends: Tensor, slot_of: Tensor, height: int) -> dict[str, Tensor]:
    """ids i32 [T, k], ends i32 [E], slot_of i32 [T, k] -> what Humming's indexed products read.

    Slots sorted by expert, each expert's in whole blocks of `height`, filled up with T k; the expert of each block; how many slots in all.
    """
    rows, experts = ids.numel(), len(ends)
    blocks = min(rows, experts) + rows // height
    sorted_ids = torch.full((blocks * height,), rows, dtype=torch.int32, device=ids.device)
    expert_ids = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    count = torch.empty((), dtype=torch.int32, device=ids.device)
    _align_kernel()[(-(-max(rows, blocks) // 128),)](
        ids, ends, slot_of, sorted_ids, expert_ids, count, rows, blocks, experts, height, _power_of_two(experts), 128
    )
    return {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": count}


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _align_kernel() -> Any:
    from h200_align import align  # at first use: Triton

    return align


# All of them ----------------------------------------------------------------------------------------------------------

CONTENDERS: dict[str, type[Contender]] = {
    "fusion_moe": Ours, "humming indexed": HummingIndexed, "humming grouped": HummingGrouped, "torch": Torch, "dense": Dense,
}  # fmt: skip


def versions() -> dict[str, str]:
    """Of the packages of the contenders, as far as they are there."""
    found = {}
    for name in ("torch", "triton", "humming-kernels"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            found[name] = "missing"
    return found
