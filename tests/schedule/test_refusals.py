"""Pieces that a backend refuses: what it cannot express is cut off, and the rest stays one
kernel.
"""

from __future__ import annotations

import pytest
import torch
from fusions import assert_same_bits, evaluate

import fusion_moe
from fusion_moe import FusionDefinition, options
from fusion_moe.backends import TARGETS, backend_of, emit
from fusion_moe.backends.cpu import readers
from fusion_moe.backends.inexpressible import Inexpressible
from fusion_moe.compile import compile_fusion, segments
from fusion_moe.ir.core import Fusion
from fusion_moe.schedule.plan import Plan, Refusal
from fusion_moe.schedule.segment import split

CPU, CUDA = TARGETS["cpu"], TARGETS["cuda"]
G, K, N, ROWS = 3, 64, 96, 7


def operands(fd, x_dtype: str = "bf16", w_dtype: str = "bf16", columns: int = K):
    """x [M/g, columns] and w [G, N, K], which are inputs, and the ends of the groups."""
    x = fd.define_tensor(shape=[ROWS, columns], dtype=x_dtype)
    w = fd.define_tensor(shape=[G, N, K], dtype=w_dtype)
    ends = fd.groups_of(fd.define_tensor(shape=[G], dtype="i32"), ROWS)
    return fd.ops.partition(x, ends), w, ends


def product(epilogue) -> Fusion:
    """x @ w^T by groups, and what `epilogue(fd, y)` makes of the result."""
    fd = FusionDefinition()
    for v in epilogue(fd, fd.ops.grouped_mm(*operands(fd))):
        fd.add_output(v)
    return fd.fusion()


def inputs():
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-2, 3, shape, generator=g).bfloat16() for shape in ((ROWS, K), (G, N, K)))
    return [x, w, torch.tensor([2, 2, 7], dtype=torch.int32)]


def thirds(fd, y):
    a, b, c = (
        fd.ops.slice(y, start_indices=[0, i * N // 3], end_indices=[ROWS, (i + 1) * N // 3])
        for i in range(3)
    )
    return [fd.ops.mul(fd.ops.mul(a, b), c)]


def to_f8(fd, y):
    return [fd.ops.cast(fd.ops.relu(y), dtype="f8e4m3")]


def fused(found) -> list[list[str]]:
    return [[op.kind.name for op in s.fusion.ops if not op.kind.view] for s in found]


def planned(fusion: Fusion, target=CUDA):
    return segments(fusion, target, options.current())


def test_a_gate_of_three_columns_is_cut_off_after_the_product():
    first, *others = planned(product(thirds))
    assert first.plan.backend == "cuda"
    assert first.fusion.ops[-1].kind.name in ("grouped_mm", "reshape")
    assert all(s.plan.backend == "cuda" for s in others)
    assert "3 columns of the product" in others[0].boundary


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda t: t.name)
def test_a_cast_without_a_kernel_is_alone(target):
    *kernels, last = planned(product(to_f8), target)
    assert fused([last]) == [["cast"]]
    assert last.plan.backend == "reference"
    assert "cast" in last.plan.why
    assert [s.plan.backend for s in kernels] == [target.name]
    assert fused(kernels) == [["grouped_mm", "relu"]]
    assert last.boundary == last.plan.why


@pytest.mark.parametrize("epilogue", [thirds, to_f8], ids=lambda f: f.__name__)
def test_results_are_those_of_the_whole(epilogue):
    fusion = product(epilogue)
    assert_same_bits(fusion_moe.run(fusion, inputs()), evaluate(fusion, *inputs()))


def test_no_fused_segment_is_on_the_reference():
    """Whatever is refused: products in float32, scales of matrices in FP8."""
    fd = FusionDefinition()
    x, w, ends = operands(fd, "f32", "f32", columns=N)
    dx = fd.ops.grouped_mm_t(fd.ops.relu(x), w, ends)
    fd.add_output(fd.ops.decode_scale(fd.ops.neg(dx), encoding="fp8_tensor"))
    found = planned(fd.fusion())
    for s, ops in zip(found, fused(found), strict=True):
        assert s.plan.backend == "cuda" or len(ops) == 1
    assert {"grouped_mm_t", "decode_scale"} == {
        ops[0] for s, ops in zip(found, fused(found), strict=True) if s.plan.backend == "reference"
    }


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda target: target.name)
def test_plans_and_sources_do_not_depend_on_what_is_installed(target, monkeypatch, tmp_path):
    """Tools to compile are only needed to run: plain torch stands in, and says why."""

    def emitted():
        kernels = [emit(s, target) for s in planned(product(thirds), target)]
        return [(str(k.segment.fusion), k.segment.boundary, k.backend, k.source) for k in kernels]

    before = emitted()
    monkeypatch.setattr("fusion_moe.runtime.nvrtc.why_missing", lambda: "NVRTC is missing")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(readers, "SHIPPED", tmp_path)
    assert emitted() == before
    program = compile_fusion(product(thirds), target, options.current())
    why = "NVRTC is missing" if target is CUDA else "no C++ compiler: CXX='/nowhere/g++'"
    for kernel in program.kernels:
        assert kernel.backend == "reference"
        assert why in kernel.why


def test_a_refusal_that_names_no_operation_halves_what_is_around_the_product():
    """A backend that takes up to three operations a piece."""

    def plan(piece: Fusion) -> Plan | Refusal:
        count = sum(not op.kind.view for op in piece.ops)
        return (
            Plan("cpu", "pointwise", piece, None) if count <= 3 else Refusal(f"{count} operations")
        )

    def chain(fd, y):
        for _ in range(9):
            y = fd.ops.neg(y)
        return [y]

    found = split(product(chain), CPU, plan)
    sizes = [len(ops) for ops in fused(found)]
    assert sum(sizes) == 10
    assert max(sizes) <= 3
    assert sizes[0] > 1  # some of it stays with the product
    assert all("operations" in s.boundary for s in found[1:])


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda t: t.name)
def test_what_is_also_read_outside_is_cut_out_of_the_prologue(target):
    """The epilogue stays."""
    fd = FusionDefinition()
    x, w, ends = operands(fd, "f32")
    read_twice = fd.ops.cast(x, dtype="bf16")
    y = fd.ops.grouped_mm(read_twice, w, ends)
    for made in (fd.ops.exp, fd.ops.abs, fd.ops.sigmoid, fd.ops.relu):
        y = made(y)
    for v in (read_twice, y):
        fd.add_output(v)
    found = planned(fd.fusion(), target)
    assert fused(found) == [["cast"], ["grouped_mm", "exp", "abs", "sigmoid", "relu"]]
    assert {s.plan.backend for s in found} == {target.name}
    assert "is computed in the prologue, and also read outside it" in found[1].boundary


@pytest.mark.parametrize("target", [CPU, CUDA], ids=["cpu", "cuda"])
def test_what_has_elements_is_not_stored_with_a_product_of_no_rows(target):
    """a kernel stores it row by row: nothing"""
    fd = FusionDefinition()
    ids, x, w = (
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (([0, 2], "i64"), ([0, K], "bf16"), ([G, N, K], "bf16"))
    )
    ends, *_ = fd.ops.route(ids, groups=fd.define_groups("g", G))
    fd.add_output(fd.ops.index_select(ends, ends, dim=0))
    fd.add_output(fd.ops.grouped_mm(fd.ops.partition(x, ends), w, ends))
    assert not any(
        {"index_select", "grouped_mm"} <= set(ops) for ops in fused(planned(fd.fusion(), target))
    )


def test_a_combine_is_cut_off_from_what_it_reads_as_a_whole():
    """CUDA sums rows that are in memory; what follows stays with the sums."""
    fd = FusionDefinition()
    y, slots = (
        fd.define_tensor(shape=[2 * ROWS, N], dtype="f32"),
        fd.define_tensor(shape=[ROWS, 2], dtype="i32"),
    )
    total = fd.ops.combine(
        fd.ops.exp(fd.ops.neg(y)), slots, fd.define_tensor(shape=[ROWS, 2], dtype="f32")
    )
    fd.add_output(fd.ops.relu(fd.ops.abs(total)))
    found = planned(fd.fusion())
    assert fused(found) == [["neg", "exp"], ["combine", "abs", "relu"]]
    assert "in the same segment that reads it as a whole" in found[1].boundary
    assert fused(planned(fd.fusion(), CPU)) == [["neg", "exp", "combine", "abs", "relu"]]


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda t: t.name)
def test_a_backend_names_the_operation_that_it_cannot_express(target):
    """The one that reads what has no C++, not those around it, and not a view."""
    fd = FusionDefinition()
    rows = fd.ops.reshape(operands(fd, "f8e4m3")[0], new_shape=[ROWS, K])
    fd.add_output(fd.ops.permute(rows, dims=[1, 0]))
    with pytest.raises(Inexpressible, match="f8e4m3") as caught:
        backend_of(target).plan(fd.fusion(), "pointwise")
    assert caught.value.op.kind.name == "reshape"


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda t: t.name)
def test_columns_that_a_tensor_picks_are_no_epilogue(target):
    def picked(fd, y):
        return [
            fd.ops.relu(fd.ops.index_select(y, fd.define_tensor(shape=[N], dtype="i64"), dim=1))
        ]

    with pytest.raises(Inexpressible, match="columns known when compiling") as caught:
        backend_of(target).plan(product(picked), "grouped_gemm")
    assert caught.value.op.kind.name == "index_select"


def test_the_prologue_is_cut_off_before_the_product():
    """Rows that are cast from a type without a kernel, and then picked."""
    fd = FusionDefinition()
    x, w, ends = operands(fd, "f8e5m2")
    rows = fd.ops.neg(fd.ops.cast(x, dtype="bf16"))
    fd.add_output(fd.ops.relu(fd.ops.grouped_mm(rows, w, ends)))
    cast, rest = planned(fd.fusion())
    assert (fused([cast]), cast.plan.backend) == ([["cast"]], "reference")
    assert (fused([rest]), rest.plan.backend) == ([["neg", "grouped_mm", "relu"]], "cuda")
