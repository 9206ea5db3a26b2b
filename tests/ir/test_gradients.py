"""Gradients of slices that together are a value: one `cat`, whatever else reads the value."""

from __future__ import annotations

import pytest
import torch
from fusions import evaluate

from fusion_moe import FusionDefinition
from fusion_moe.ir.derivative import differentiate

X = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))


def columns(fd, v, first, last):
    rows = v.type.shape[0]
    return fd.ops.slice(v, start_indices=(0, first), end_indices=(rows, last))


def weighted(fd, parts):
    """Something of each part that gives each another gradient: its columns times numbers,
    summed.
    """
    total = None
    for i, part in enumerate(parts):
        one = fd.ops.sum(fd.ops.mul(fd.ops.exp(part), float(i + 1)), dims=(1,), keepdim=True)
        total = one if total is None else fd.ops.add(total, one)
    return total


CASES = {  # columns -> how the gradient is put together
    ((0, 6), (6, 12)): ["cat"],
    ((6, 12), (0, 6)): ["cat"],
    ((0, 2), (5, 12), (2, 3), (3, 5)): ["cat"],
    ((0, 12),): [],
    ((0, 6), (6, 12), (0, 6)): ["add", "cat"],
    ((0, 6), (7, 12)): ["pad", "pad", "add"],
    ((0, 6), (5, 12)): ["pad", "pad", "add"],
    ((2, 6), (6, 12)): ["pad", "pad", "add"],
}


@pytest.mark.parametrize("ranges", CASES, ids=str)
def test_columns(ranges):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 12], dtype="f32")
    fd.add_output(weighted(fd, [columns(fd, x, *r) for r in ranges]))
    fusion = fd.fusion()
    derivative = differentiate(fusion, (0,))
    assert [
        op.kind.name for op in derivative.backward.ops if op.kind.name in ("cat", "pad", "add")
    ] == CASES[ranges]
    dy = torch.randn(5, 1, generator=torch.Generator().manual_seed(1))
    (found,) = evaluate(
        derivative.backward, *derivative.read([X], evaluate(derivative.forward, X)), dy
    )
    wide = X.double().requires_grad_()
    total = sum(
        (i + 1) * wide[:, a:b].exp().sum(1, keepdim=True) for i, (a, b) in enumerate(ranges)
    )
    (want,) = torch.autograd.grad(total, wide, dy.double())
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-6)


def test_what_else_reads_the_value_is_added():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 12], dtype="f32")
    left, right = columns(fd, x, 0, 6), columns(fd, x, 6, 12)
    fd.add_output(fd.ops.add(fd.ops.mul(left, right), columns(fd, fd.ops.exp(x), 0, 6)))
    derivative = differentiate(fd.fusion(), (0,))
    assert [
        op.kind.name for op in derivative.backward.ops if op.kind.name in ("cat", "pad", "add")
    ] == ["pad", "cat", "add"]
    (found,) = evaluate(
        derivative.backward,
        *derivative.read([X], evaluate(derivative.forward, X)),
        torch.ones(5, 6),
    )
    want = torch.cat([X[:, 6:] + X[:, :6].exp(), X[:, :6]], 1)
    torch.testing.assert_close(found, want)


def test_interleaved_blocks():
    """Blocks of columns in turn: the same through reshapes."""
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 12], dtype="f32")
    rows = x.type.shape[0]
    blocks = fd.ops.reshape(x, new_shape=(rows, 2, 2, 3))
    gate, up = (
        fd.ops.slice(blocks, start_indices=(0, 0, i, 0), end_indices=(rows, 2, i + 1, 3))
        for i in (0, 1)
    )
    fd.add_output(fd.ops.mul(gate, fd.ops.exp(up)))
    derivative = differentiate(fd.fusion(), (0,))
    assert [
        op.kind.name for op in derivative.backward.ops if op.kind.name in ("cat", "pad", "add")
    ] == ["cat"]
    (found,) = evaluate(
        derivative.backward,
        *derivative.read([X], evaluate(derivative.forward, X)),
        torch.ones(5, 2, 1, 3),
    )
    gate, up = X.view(5, 2, 2, 3).unbind(2)
    torch.testing.assert_close(found, torch.stack([up.exp(), gate * up.exp()], 2).view(5, 12))


def test_rows_of_groups_stay_so():
    """The halves of rows of groups are rows of those groups, and so is their `cat`: it needs no
    reshape.
    """
    fd = FusionDefinition()
    x, w = (
        fd.define_tensor(shape=[-1, 4], dtype="f32"),
        fd.define_tensor(shape=[2, 12, 4], dtype="f32"),
    )
    ends = fd.groups_of(fd.define_tensor(shape=[2], dtype="i32"), x.type.shape[0])
    y = fd.ops.grouped_mm(fd.ops.partition(x, ends), w, ends)
    fd.add_output(fd.ops.mul(columns(fd, y, 0, 6), columns(fd, y, 6, 12)))
    backward = differentiate(fd.fusion(), (0,)).backward
    (product,) = (op for op in backward.ops if op.kind.role == "grouped")
    assert backward.producers[product.values[0]].kind.name == "cat"
