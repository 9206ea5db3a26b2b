"""The activation between an expert's two products: the text of a Fusion of the product's rows, and
optionally of parameters, with one output.

    def fusion(fd): m = fd.define_size('m'); n = fd.define_size('n');
        i0 = fd.define_tensor(shape=[m, 2*n], dtype='f32'); ...

First the columns of the rows are divided into parts, gate and up: by `columns`, one after the other
or in alternating blocks. Each further input f32[m, n] has, in each row, a parameter of that row's
expert. All other operations are pointwise. So no row depends on another,
and columns can be padded and divided between devices. "f32" is the dtype in which products are
summed, float64 for rows in float64; the result is rounded once to the dtype of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..encodings import real_tensors
from ..errors import OptionError, ShapeError
from .builder import FusionDefinition
from .core import Fusion, Op, Value
from .kinds.grouped import bias_rows
from .sizes import Size, exact_div
from .text import one_line, op_text, parse, value_names
from .types import accumulated, plain

_WIDE = "f32"


@dataclass(frozen=True)
class Activation:
    """An activation that was read.

    parts: 2: gate and up; 1: up alone. interleave: 0: one part after the other; n: blocks of n
    columns of each part alternate. inputs: the parts in the Fusion, then the parameters; body: what
    is computed of them.
    """

    fusion: Fusion
    parts: int
    interleave: int
    inputs: tuple[Value, ...]
    body: tuple[Op, ...]

    @property
    def parameters(self) -> int:
        """How many parameters of each expert it reads."""
        return len(self.inputs) - self.parts

    @cached_property
    def formula(self) -> str:
        """The operations of the body in one line, for print(model)."""
        names = {**value_names(self.fusion), **dict(zip(self.inputs, self._names, strict=True))}
        lines = (op_text(op, names).split("  # ")[0] for op in self.body)
        return "; ".join(line.replace("fd.ops.", "") for line in lines)

    @property
    def _names(self) -> tuple[str, ...]:
        parts = ("gate", "up") if self.parts == 2 else ("up",)
        return (*parts, *(f"parameter{i}" for i in range(self.parameters)))


def written(
    function: Callable[..., Value], parts: int, interleave: int = 0, parameters: int = 0
) -> str:
    """The text of an activation. function(fd, *parts, *parameters) -> the result; all are f32[m,
    n].
    """
    fd = FusionDefinition()
    rows, features = fd.define_size("m"), fd.define_size("n")
    width = (interleave or 1) * features if parts == 2 else features
    x, *more = (
        fd.define_tensor(shape=(rows, size), dtype=_WIDE)
        for size in (parts * width, *[width] * parameters)
    )
    fd.add_output(function(fd, *columns(fd, x, parts, interleave), *more))
    return one_line(fd.fusion())


@lru_cache
def swiglu(
    interleave: int = 0, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0
) -> str:
    """The text of gate * sigmoid(alpha * gate) * (up + up_offset), as `fused_experts` takes it.

    interleave: 0: columns of gate before columns of up; n: blocks of n columns alternate. limit:
    gate is clamped to at most limit, up to -limit .. limit; None: no clamping.
    """
    if interleave < 0:
        raise OptionError(
            f"interleave = {interleave}",
            expected="0 for gate before up, or the size of the blocks that take turns",
        )
    if limit is not None and not limit > 0:
        raise OptionError(f"limit = {limit}", expected="a number above 0, or None for no clamping")

    def function(fd: FusionDefinition, gate: Value, up: Value) -> Value:
        if limit is not None:
            gate = fd.ops.minimum(gate, float(limit))
            up = fd.ops.maximum(fd.ops.minimum(up, float(limit)), -float(limit))
        active = fd.ops.silu(gate) if alpha == 1.0 else gate * fd.ops.sigmoid(gate * float(alpha))
        return active * (up + float(up_offset) if up_offset else up)

    return written(function, 2, interleave)


def columns(fd: FusionDefinition, x: Value, parts: int, interleave: int) -> tuple[Value, ...]:
    """x [M, parts * N] -> its parts [M, N]. ShapeError for a width that has no such parts."""
    if parts == 1:
        return (x,)
    rows, width = x.type.shape[0], plain(x.type.shape[1])
    blocks = exact_div(width, parts * (interleave or 1))
    if blocks is None:
        raise ShapeError(
            f"{width} columns before the activation",
            expected=f"a multiple of {parts * (interleave or 1)}",
        )
    if interleave == 0:
        return tuple(
            fd.ops.slice(x, start_indices=(0, p * blocks), end_indices=(rows, (p + 1) * blocks))
            for p in range(parts)
        )
    divided = fd.ops.reshape(x, new_shape=(rows, blocks, parts, interleave))
    split = []
    for p in range(parts):
        part = fd.ops.slice(
            divided, start_indices=(0, 0, p, 0), end_indices=(rows, blocks, p + 1, interleave)
        )
        split.append(fd.ops.reshape(part, new_shape=(rows, blocks * interleave)))
    return tuple(split)


@lru_cache(maxsize=256)
def read(text: str | None) -> Activation:
    """The activation of a text; None: `swiglu()`. ParseError for text that is no Fusion,
    OptionError for another Fusion than this page describes.
    """
    fusion = parse(swiglu() if text is None else text)
    if not fusion.inputs or len(fusion.outputs) != 1:
        raise _refused(
            f"{len(fusion.inputs)} inputs and {len(fusion.outputs)} outputs",
            "an input or more, and 1 output",
        )
    (x, *parameters), (y,) = fusion.inputs, fusion.outputs
    wide = all(v.type.dtype == _WIDE and len(v.type.shape) == 2 for v in (x, y))
    if not wide or not all(isinstance(d, Size) for d in x.type.shape):
        raise _refused(f"{x.type} -> {y.type}", "f32[m, 2*n] -> f32[m, n], or f32[m, n] -> itself")
    for p in parameters:
        if p.type != y.type:
            raise _refused(f"a parameter {p.type}", f"{y.type}, as the result")
    parts = exact_div(plain(x.type.shape[1]), plain(y.type.shape[1]))
    if parts not in (1, 2):
        raise _refused(f"{x.type} -> {y.type}", "gate and up beside each other, or up alone")
    return _checked(_divided(fusion, parts))


def _divided(fusion: Fusion, parts: int) -> Activation:
    """The activation whose first operations are those of `columns`."""
    first = fusion.ops[0] if fusion.ops else None
    blocks = parts == 2 and first is not None and first.kind.name == "reshape"
    interleave = first.attrs["new_shape"][-1] if first is not None and blocks else 0
    if not isinstance(interleave, int):
        raise _refused(f"blocks of {interleave} columns", "a number of columns")
    fd = FusionDefinition()
    names = [v.name for v in columns(fd, fd.define_like(fusion.inputs[0].type), parts, interleave)]
    wanted, count = fd.ops_from(0), fd.count
    if _lines(wanted) != _lines(fusion.ops[:count]):
        raise _refused(
            _lines(fusion.ops[:count])[0] if fusion.ops else "no operations",
            f"first {'; '.join(_lines(wanted))}",
        )
    by_name = {v.name: v for v in fusion.values}
    inputs = (*(by_name[name] for name in names), *fusion.inputs[1:])
    return Activation(fusion, parts, interleave, inputs, fusion.ops[count:])


def _lines(ops: tuple[Op, ...]) -> list[str]:
    return [op_text(op, {}).split("  # ")[0] for op in ops]


def _checked(activation: Activation) -> Activation:
    """The activation, if its body is pointwise and finite for zeros, which padded columns and their
    parameters have.
    """
    shape = activation.fusion.outputs[0].type.shape
    known = {*activation.inputs, *(v for op in activation.body for v in op.outputs)}
    for op in activation.body:
        alike = all(v in known and v.type.shape == shape for v in (*op.values, *op.outputs))
        if op.kind.role != "pointwise" or not alike:
            raise _refused(f"{op.kind.name} of {', '.join(map(str, op.types()))}", "pointwise")
    _check_clamps(activation)
    width = activation.interleave or 1
    widths = activation.parts * width, *[width] * activation.parameters
    with real_tensors():
        (y,) = activation.fusion.evaluate(
            *(torch.zeros(1, columns, dtype=torch.float32) for columns in widths)
        )
        finite = bool(y.isfinite().all())
    if not finite:
        raise _refused("NaN or infinity for columns of zeros", "a finite number")
    return activation


_BOUNDS = {"minimum": "maximum", "maximum": "minimum"}


def _check_clamps(activation: Activation) -> None:
    """OptionError for a bound that is NaN, and for a clamp to a range that has no two numbers."""
    for op in activation.body:
        inner = activation.fusion.producer(op.inputs[0]) if op.inputs else None
        bounds = {op.kind.name: _number(op)}
        if inner is not None and _BOUNDS.get(op.kind.name) == inner.kind.name:
            bounds[inner.kind.name] = _number(inner)
        low, high = bounds.get("maximum"), bounds.get("minimum")
        if low is not None and high is not None and not low < high:
            raise _refused(f"numbers from {low} to {high}", "the lower bound of a clamp first")
        if any(n is not None and n != n for n in (low, high)):
            raise _refused("a bound of nan", "a number")


def _number(op: Op) -> float | None:
    """The number beside the only operand that is a value, if there is one."""
    numbers = [n for n in op.inputs if not isinstance(n, Value)]
    return float(numbers[0]) if len(op.inputs) == 2 and len(numbers) == 1 else None


def _refused(text: str, expected: str) -> OptionError:
    return OptionError(
        text,
        expected=expected,
        todo="fusion_moe.nn.activation(function) writes the text of a function",
        where="activation",
    )


def activated(
    fd: FusionDefinition,
    x: Value,
    activation: Activation,
    parameters: Value | None = None,
    ends: Value | None = None,
) -> Value:
    """x [M/g, parts * N] -> the result [M/g, N], not yet rounded to the dtype of x.

    parameters: float [G, P, N] or [G, P, 1], each group's; ends i32[G]: of the groups.
    """
    wide = accumulated(x.type.dtype)
    arguments = [*columns(fd, x, activation.parts, activation.interleave)]
    if parameters is not None and ends is not None:
        groups, _, features = map(plain, parameters.type.shape)
        count = activation.parameters
        of_groups = fd.ops.reshape(parameters, new_shape=(groups, count * features))
        of_rows = bias_rows(fd, of_groups, ends, x.type.with_(dtype=wide))
        arguments += columns(fd, of_rows, count, 0)
    values = dict(
        zip(activation.inputs, [fd.ops.cast(v, dtype=wide) for v in arguments], strict=True)
    )
    for op in activation.body:
        attrs = {name: wide if attr == _WIDE else attr for name, attr in op.attrs.items()}
        inputs = [values[v] if isinstance(v, Value) else v for v in op.inputs]
        values.update(zip(op.outputs, fd.append(op.kind, inputs, attrs), strict=True))
    return values[activation.fusion.outputs[0]]
