"""The four products of an expert layer's training in bf16, each with what is fused to it, beside
torch's `grouped_mm` on gathered rows.

    python benchmarks/training_products.py [--tokens 32768] [--models qwen3 mixtral gpt-oss]
        [--zipf] [--repeats 10]

On one H100 or H200. gate_up: gather, product, SwiGLU, pre-activation and activation stored.
dgrad_down: gather, product, the activation's gradient, the activation again, the router's gradient.
wgrad_*: one operand gathered. Times are medians between two CUDA events.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from training_cells import SIZES

import fusion_moe
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion, Value


class Product:
    """A program around one product: rows m in groups, tokens t that rows are gathered from."""

    def __init__(self, groups: int):
        self.fd = FusionDefinition()
        self.tokens, self.rows = self.fd.define_size("t"), self.fd.define_size("m")
        offs, self.index = (
            self.fd.define_tensor(shape=(n,), dtype="i32") for n in (groups, self.rows)
        )
        self.ends = self.fd.groups_of(offs, self.rows)

    def operand(self, columns: int, *, gathered: bool = False, dtype: str = "bf16") -> Value:
        """Rows of groups, in memory or gathered."""
        x = self.fd.define_tensor(
            shape=(self.tokens if gathered else self.rows, columns), dtype=dtype
        )
        return self.fd.ops.partition(
            self.fd.ops.index_select(x, self.index, dim=0) if gathered else x, self.ends
        )

    def weight(self, *shape: int) -> Value:
        """bf16[G, N, K]"""
        return self.fd.define_tensor(shape=shape, dtype="bf16")

    def fusion(self, *outputs: Value) -> Fusion:
        """With these outputs."""
        for v in outputs:
            self.fd.add_output(v)
        return self.fd.fusion()


def gate_up(groups: int, hidden: int, inner: int) -> Fusion:
    """x [t, H], W1 [G, 2I, H] -> z [m, 2I], silu(gate) * up [m, I]"""
    p = Product(groups)
    z = p.fd.ops.cast(
        p.fd.ops.grouped_mm(
            p.operand(hidden, gathered=True), p.weight(groups, 2 * inner, hidden), p.ends
        ),
        dtype="bf16",
    )
    gate, up = halves(p.fd, z, inner)
    return p.fusion(z, p.fd.ops.cast(p.fd.ops.mul(p.fd.ops.silu(gate), up), dtype="bf16"))


def dgrad_down(groups: int, hidden: int, inner: int) -> Fusion:
    """dout [t, H], W2 [G, H, I], z [m, 2I], w [m, 1] -> dz [m, 2I], w * silu(gate) * up [m, I], the
    gradient of w [m]
    """
    p = Product(groups)
    o = p.fd.ops
    u = o.grouped_mm_t(p.operand(hidden, gathered=True), p.weight(groups, hidden, inner), p.ends)
    gate, up = halves(p.fd, p.operand(2 * inner), inner)
    w = p.operand(1, dtype="f32")
    sigmoid = o.sigmoid(gate)
    silu = o.mul(gate, sigmoid)
    h, du = o.mul(silu, up), o.mul(u, w)
    slope = o.mul(sigmoid, o.add(o.mul(o.sub(1.0, sigmoid), gate), 1.0))
    dz = o.cat(o.mul(o.mul(du, up), slope), o.mul(du, silu), dim=1)
    return p.fusion(
        o.cast(dz, dtype="bf16"),
        o.cast(o.mul(h, w), dtype="bf16"),
        o.sum(o.mul(u, h), dims=(1,), keepdim=False),
    )


def dgrad_gate_up(groups: int, hidden: int, inner: int) -> Fusion:
    """dz [m, 2I], W1 [G, 2I, H] -> [m, H]"""
    p = Product(groups)
    made = p.fd.ops.grouped_mm_t(p.operand(2 * inner), p.weight(groups, 2 * inner, hidden), p.ends)
    return p.fusion(p.fd.ops.cast(made, dtype="bf16"))


def wgrad_gate_up(groups: int, hidden: int, inner: int) -> Fusion:
    """dz [m, 2I], x [t, H] -> [G, 2I, H]"""
    p = Product(groups)
    made = p.fd.ops.grouped_outer(p.operand(2 * inner), p.operand(hidden, gathered=True), p.ends)
    return p.fusion(p.fd.ops.cast(made, dtype="bf16"))


def wgrad_down(groups: int, hidden: int, inner: int) -> Fusion:
    """dout [t, H], a [m, I] -> [G, H, I]"""
    p = Product(groups)
    made = p.fd.ops.grouped_outer(p.operand(hidden, gathered=True), p.operand(inner), p.ends)
    return p.fusion(p.fd.ops.cast(made, dtype="bf16"))


def halves(fd: FusionDefinition, z: Value, inner: int) -> Iterator[Value]:
    """Gate and up in float32."""
    for first in (0, inner):
        part = fd.ops.slice(
            z, start_indices=(0, first), end_indices=(z.type.shape[0], first + inner)
        )
        yield fd.ops.cast(part, dtype="f32")


def torchs(
    name: str, groups: int, hidden: int, inner: int, rows: int, offs: Tensor
) -> Callable[[], Tensor]:
    """torch's grouped_mm of the same size, on rows in memory, with nothing around it."""
    wide, narrow, out = (
        torch.randn(rows, n, device="cuda").bfloat16() for n in (2 * inner, inner, hidden)
    )
    first, second = (
        torch.randn(groups, 2 * inner, hidden, device="cuda").bfloat16(),
        torch.randn(groups, hidden, inner, device="cuda").bfloat16(),
    )
    operands = {
        "gate_up": (out, first.mT),
        "dgrad_down": (out, second),
        "dgrad_gate_up": (wide, first),
        "wgrad_gate_up": (wide.T, out),
        "wgrad_down": (out.T, narrow),
    }
    return lambda: torch._grouped_mm(*operands[name], offs=offs)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of some calls, after two."""
    for _ in range(2):
        call()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def given(fusion: Fusion, sizes: dict[str, int], offs: Tensor, index: Tensor) -> Sequence[Tensor]:
    """Random inputs; ends and the index come first."""
    dtypes = {"bf16": torch.bfloat16, "f32": torch.float32}
    shapes = [
        ([sizes.get(str(d), d) for d in v.type.shape], v.type.dtype) for v in fusion.inputs[2:]
    ]
    return [
        offs,
        index,
        *(torch.randn(shape, device="cuda").to(dtypes[dtype]) for shape, dtype in shapes),
    ]


def main() -> None:
    """Prints TFLOP/s."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument(
        "--models", nargs="+", default=["qwen3", "mixtral", "gpt-oss"], choices=list(SIZES)
    )
    parser.add_argument("--zipf", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    told = parser.parse_args()
    for model in told.models:
        sizes = SIZES[model]
        groups, slots, hidden, inner = sizes.experts, sizes.slots, sizes.hidden, sizes.intermediate
        weights = 1 / torch.arange(1, groups + 1) if told.zipf else torch.ones(groups)
        ids = torch.multinomial(weights.expand(told.tokens, groups), slots).flatten()
        index = (ids.argsort(stable=True) // slots).int().cuda()
        offs = torch.bincount(ids, minlength=groups).cumsum(0).int().cuda()
        for make in (gate_up, dgrad_down, dgrad_gate_up, wgrad_gate_up, wgrad_down):
            fusion, factor = (
                make(groups, hidden, inner),
                1 if make in (dgrad_down, wgrad_down) else 2,
            )
            tensors = given(fusion, {"t": told.tokens, "m": len(ids)}, offs, index)
            flops = 2 * len(ids) * hidden * inner * factor
            ours = flops / seconds(lambda f=fusion, t=tensors: fusion_moe.run(f, t), told.repeats)
            theirs = flops / seconds(
                torchs(make.__name__, groups, hidden, inner, len(ids), offs), told.repeats
            )
            print(
                f"{model:10s} {make.__name__:14s} {ours / 1e12:5.0f} TFLOP/s, torch's "
                f"grouped_mm {theirs / 1e12:5.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
