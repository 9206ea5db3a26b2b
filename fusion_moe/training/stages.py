"""Layers over groups of rows as stages of one program: what each layer adds to a Fusion, and the
call that runs them.

A stage is plain data except for its operands, so that torch.compile treats the text of the program
as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..definitions.tensor_lists import Input, flat
from ..ir import FusionDefinition, TensorType, Value, dtype_name, one_line, plain, symbol
from ..ir.activation import activated, read
from ..ir.builder import rows_like
from ..ir.kinds import eight_bits
from ..ir.kinds.grouped import bias_rows

ROWS = -1  # in the shape of an input: as many rows as x
Type = tuple[torch.dtype, tuple[int, ...]]


class Operand(NamedTuple):
    """An operand of a stage besides the rows: a tensor, or G tensors as one; shape: the shape of
    the program's input that it becomes.
    """

    tensor: Input
    shape: tuple[int, ...]


class Stage(NamedTuple):
    """kind: in BUILDERS; width: how many columns it takes; operands: None for an absent one;
    attributes: as text.

    Numbers in attributes would not be constants to a tracer of dynamic shapes.
    """

    kind: str
    width: int
    operands: tuple[Operand | None, ...]
    attributes: tuple[str, ...]


class Call(NamedTuple):
    """A program and what it runs on: x [M, K], then the distinct operands of its stages."""

    text: str
    inputs: list[Input]
    rows: Any

    def run(self) -> Tensor:
        """[M, N], differentiable."""
        tensors, parts = flat(self.inputs)
        return torch.ops.fusion_moe.run(self.text, tensors, [self.rows], None, parts)[0]

    def place(self, tensor: Input) -> int:
        """The position of an operand among the inputs."""
        return next(i for i, t in enumerate(self.inputs) if _same(t, tensor))


def call(x: Tensor, stages: Sequence[Stage]) -> Call:
    """The call that passes x [M, K] through the stages, as one program."""
    inputs: list[Input] = [x]
    width = len(range(stages[0].width))  # a constant to a tracer of dynamic shapes
    types: list[Type] = [(x.dtype, (ROWS, width))]
    plan = []
    for stage in stages:
        places = tuple(
            [
                None if operand is None else _place(operand, inputs, types)
                for operand in stage.operands
            ]
        )
        plan.append((stage.kind, places, stage.attributes))
    return Call(program(tuple(types), tuple(plan)), inputs, x.shape[0])


def _place(operand: Operand, inputs: list[Input], types: list[Type]) -> int:
    """The position of an operand among the inputs; a new operand is added. A module that is called
    twice is one operand.
    """
    for i, t in enumerate(inputs):
        if i and _same(t, operand.tensor):
            return i
    inputs.append(operand.tensor)
    first = operand.tensor[0] if isinstance(operand.tensor, tuple) else operand.tensor
    types.append((first.dtype, operand.shape))
    return len(inputs) - 1


def _same(a: Input, b: Input) -> bool:
    """Whether two operands are the same tensors."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(p is q for p, q in zip(a, b, strict=True))
    return a is b


def program(
    types: tuple[Type, ...], plan: tuple[tuple[str, tuple[int | None, ...], tuple[str, ...]], ...]
) -> str:
    """The text of the program of these stages, whose inputs have these dtypes and shapes."""
    return _program(types, plan)


program._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, which imports the tracer


@lru_cache(maxsize=256)
def _program(
    types: tuple[Type, ...], plan: tuple[tuple[str, tuple[int | None, ...], tuple[str, ...]], ...]
) -> str:
    fd, rows = FusionDefinition(), symbol("s0")
    shapes = (tuple(rows if n == ROWS else n for n in shape) for _, shape in types)
    inputs = [
        fd.define_like(TensorType(shape, dtype_name(t)))
        for (t, _), shape in zip(types, shapes, strict=True)
    ]
    x = inputs[0]
    for kind, places, attributes in plan:
        x = BUILDERS[kind](fd, x, *attributes, *(None if i is None else inputs[i] for i in places))
    fd.add_output(x)
    return one_line(fd.fusion())


def _linear(
    fd: FusionDefinition,
    x: Value,
    dtype: str,
    activation_format: str,
    weight: Value,
    offs: Value,
    bias: Value | None,
    scales: Value | None,
    *held: Value,
) -> Value:
    """x [M, K], weight [G, N, K], offs i32[G], bias [G, N], scales [M] -> dtype[M/g, N]: the
    product, plus the bias times the scales. held: the parts of the weight's copy, if it was made
    before.

    activation_format: that of a recipe; "bf16" without one.
    """
    fd.mark_weight(weight, bias)
    total = plain(x.type.shape[0])
    ends = fd.groups_of(offs, total)
    x, weight = fd.ops.cast(fd.partition_by(x, ends), dtype=dtype), fd.ops.cast(weight, dtype=dtype)
    y = (
        eight_bits.product(fd, x, weight, ends, activation_format, held=held)
        if activation_format in eight_bits.BY_FORMAT
        else fd.ops.grouped_mm(x, weight, ends)
    )
    if bias is None:
        return fd.ops.cast(y, dtype=dtype)
    bias = fd.ops.cast(bias, dtype=dtype)
    if scales is None:
        return fd.ops.group_add(fd.ops.cast(y, dtype=dtype), bias, ends)
    wide = y.type.dtype
    column = fd.ops.partition(
        fd.ops.cast(fd.ops.reshape(scales, new_shape=(total, 1)), dtype=wide), ends
    )
    each = bias_rows(fd, bias, ends, y.type)
    return fd.ops.cast(fd.ops.add(y, fd.ops.mul(each, fd.ops.zero_rest(column, ends))), dtype=dtype)


def _activation(fd: FusionDefinition, x: Value, text: str, scales: Value | None) -> Value:
    """x [M, parts * N], scales [M] -> [M, N]: the activation of this text, times the scales"""
    y = activated(fd, x, read(text))
    if scales is not None:
        rows = rows_like(y.type.shape[0], plain(scales.type.shape[0]))
        column = fd.ops.reshape(scales, new_shape=(rows, 1))
        y = fd.ops.mul(y, fd.ops.cast(column, dtype=y.type.dtype))
    return fd.ops.cast(y, dtype=x.type.dtype)


BUILDERS: dict[str, Callable[..., Value]] = {"linear": _linear, "activation": _activation}
