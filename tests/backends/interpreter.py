"""Runs printed nvFuser definitions in plain torch, on the CPU, without nvFuser.

    interpret(str(fd), inputs)   what the definition computes
    output_dtypes(...)           the dtypes of its outputs, by nvFuser's names
    round_trip(fd)               asserts that the text, executed with the real nvFuser, prints the
                                 same text

The text is read as data. It says less than the definition did: floats are printed with six digits,
and the result of cutlass_nvfp4_grouped_mm, whatever its dtype, as BFloat16. The interpreter
computes with what is printed.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from meaning import OPS
from meaning.values import (
    INTS,
    Refused,
    Scalar,
    Swizzled,
    Value,
    constant,
    from_torch,
    need,
    to_torch,
)


class UnknownOperation(Refused):
    """An operation without a meaning in OPS."""


def interpret(
    text: str,
    inputs: Sequence[torch.Tensor | int | float],
    *,
    cutlass_dtype: str = "BFloat16",
    simulated: bool = False,
) -> list[torch.Tensor]:
    """The outputs of a printed definition.

    `inputs` are CPU tensors and numbers in the order in which the text defines tensors and scalars
    without a value. e2m1 tensors are float4_e2m1fn_x2, or uint8, two codes in a byte, low nibble
    first; sizes, dtypes and strides must be what the definition says. Outputs: e2m1 as
    float4_e2m1fn_x2 packed along the last dimension, swizzled block scales as their memory, 1-d.
    Memory that nvFuser does not write is NaN, in integers -2^31 + 1. `cutlass_dtype` is the dtype
    that the text does not tell; simulated: 4-bit products by the arithmetic of Blackwell's
    instruction, not exactly. Refused (an AssertionError): what nvFuser refuses or leaves
    undefined, with the line of the text. UnknownOperation: what is not in OPS.
    """
    run = _Run(inputs, cutlass_dtype, simulated)
    return [to_torch(x) for x in run.run(text)]


def output_dtypes(
    text: str, inputs: Sequence[torch.Tensor | int | float], *, cutlass_dtype: str = "BFloat16"
) -> list[str]:
    """The dtypes of the outputs, as `[o.dtype().name for o in fd.fusion.outputs()]` has them."""
    return [x.dtype for x in evaluate(text, inputs, cutlass_dtype=cutlass_dtype)]


def evaluate(
    text: str, inputs: Sequence[torch.Tensor | int | float], *, cutlass_dtype: str = "BFloat16"
) -> list[Value | Swizzled]:
    """`interpret`, with the dtypes."""
    return _Run(inputs, cutlass_dtype).run(text)


class _Run:
    def __init__(
        self,
        inputs: Sequence[torch.Tensor | int | float],
        cutlass_dtype: str,
        simulated: bool = False,
    ):
        self.inputs: Iterator[torch.Tensor | int | float] = iter(inputs)
        self.names: dict[str, Any] = {"_": None}
        self.outputs: list[Value | Swizzled] = []
        self.calls: dict[str, Callable[..., Any]] = {
            "fd.define_tensor": self.define_tensor,
            "fd.define_scalar": self.define_scalar,
            "fd.add_output": self.add_output,
            "float": float,
            **{f"fd.ops.{name}": function for name, function in OPS.items()},
            "fd.ops.cutlass_nvfp4_grouped_mm": partial(
                OPS["cutlass_nvfp4_grouped_mm"], dtype=cutlass_dtype, simulated=simulated
            ),
        }

    def run(self, text: str) -> list[Value | Swizzled]:
        for statement in ast.parse(text).body[0].body:  # type: ignore[attr-defined]
            line = ast.get_source_segment(text, statement)
            try:
                self.statement(statement)
            except UnknownOperation:
                raise
            except (
                AssertionError,
                RuntimeError,
                TypeError,
                IndexError,
                ValueError,
                KeyError,
                ZeroDivisionError,
            ) as error:
                raise Refused(f"{error}\n    in: {line}") from error
        left = len(list(self.inputs))
        need(not left, f"the definition takes {left} inputs fewer than were given")
        return self.outputs

    def statement(self, statement: ast.stmt) -> None:
        if not isinstance(statement, ast.Assign):
            assert isinstance(statement, ast.Expr)
            self.value(statement.value)
            return
        (target,) = statement.targets
        result = self.value(statement.value)
        if isinstance(target, ast.Tuple):
            self.names.update(zip((name.id for name in target.elts), result, strict=True))  # type: ignore[attr-defined]
        else:
            self.names[target.id] = result  # type: ignore[attr-defined]

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.UnaryOp(ast.USub(), operand):
                return -self.value(operand)
            case ast.List(elements):
                return [self.value(e) for e in elements]
            case ast.Name(name):
                return self.names[name]
            case ast.Attribute(ast.Name("DataType"), name):
                return name
            case ast.Call(function, args, keywords):
                return self.function(function)(
                    *map(self.value, args), **{str(k.arg): self.value(k.value) for k in keywords}
                )
        raise Refused(f"{ast.unparse(node)} is not what nvFuser prints")

    def function(self, node: ast.expr) -> Callable[..., Any]:
        name = ast.unparse(node)
        if name not in self.calls:
            raise UnknownOperation(
                f"{name} has no meaning here: add it to a table in tests/backends/meaning/"
            )
        return self.calls[name]

    def define_tensor(
        self,
        *,
        shape: list[int],
        contiguity: list[bool | None],
        dtype: str,
        is_cpu: bool,
        stride_order: list[int] | None = None,
    ) -> Value:
        x = next(self.inputs, None)
        if not isinstance(x, torch.Tensor):
            raise Refused(f"the input is {x!r}, expected a tensor")
        need(
            x.dim() == len(shape), f"the input is {list(x.shape)}, expected {len(shape)} dimensions"
        )
        # 0: the fastest dimension in memory
        speed = stride_order or list(reversed(range(len(shape))))
        _check_strides(x, speed, contiguity)
        data = from_torch(x, dtype, speed.index(0) if shape else 0)
        need(
            all(want in (-1, n) for want, n in zip(shape, data.shape, strict=True)),
            f"the input is {list(data.shape)}, expected {shape}",
        )
        return Value(data, dtype)

    def define_scalar(self, value: bool | int | float | None, *, dtype: str) -> Scalar:
        if value is None:
            given = next(self.inputs, None)
            if not isinstance(given, (int, float)) or isinstance(given, float) == (
                dtype in INTS or dtype == "Bool"
            ):
                raise Refused(f"the input is {given!r}, expected a number of {dtype}")
            value = given
        rounded = type(value)(constant(value, dtype).item())
        need(rounded == value or isinstance(value, float), f"{value} does not fit into {dtype}")
        return Scalar(rounded, dtype)

    def add_output(self, x: Any, alias: Any = None) -> None:
        need(
            isinstance(x, (Value, Swizzled)) and alias is None,
            "an output that is no tensor, or that is written into an input",
        )
        self.outputs.append(x)


def _check_strides(x: torch.Tensor, speed: list[int], contiguity: list[bool | None]) -> None:
    """contiguity goes from the slowest dimension to the fastest: True, the stride is the extent in
    memory of all that is faster; None, the size is 1 or the dimension is repeated.
    """
    slowest_first = sorted(range(x.dim()), key=lambda dim: -speed[dim])
    stride = 1
    for dim, contiguous in reversed(list(zip(slowest_first, contiguity, strict=True))):
        if contiguous is None or x.shape[dim] == 1:
            continue
        fits = not contiguous or not x.numel() or x.stride(dim) == stride
        need(
            fits,
            f"the input {list(x.shape)} has strides {list(x.stride())}, expected {stride} "
            f"in dimension {dim}",
        )
        stride = x.stride(dim) * x.shape[dim]


# Against the real nvFuser -------------------------------------------------------------------------


def round_trip(fd: Any) -> list[str]:
    """Asserts that str(fd), executed with nvfuser_direct, prints the same text, but for the names;
    gives the dtypes of fd's outputs, for the caller to compare: the text does not tell them all.
    """
    text, again = canonical(str(fd)), canonical(str(rebuilt(str(fd))))
    assert again == text, f"the text\n{text}\nexecuted, prints\n{again}"
    return [output.dtype().name for output in fd.fusion.outputs()]


def rebuilt(text: str) -> Any:
    """The nvfuser_direct.FusionDefinition that the text defines."""
    from nvfuser_direct import DataType, FusionDefinition

    names: dict[str, Any] = {"FusionDefinition": FusionDefinition, "DataType": DataType}
    exec(text, names)  # printed by nvFuser, from a definition that a test made
    with FusionDefinition() as fd:
        names["nvfuser_fusion"](_Executable(fd, DataType))
    return fd


class _Executable:
    """A FusionDefinition that takes what nvFuser prints: literals also where its own operations ask
    for a constant of their own class.
    """

    def __init__(self, fd: Any, DataType: Any):
        self.fd, self.ops, self.DataType = fd, self, DataType
        self.define_tensor, self.define_scalar, self.add_output = (
            fd.define_tensor,
            fd.define_scalar,
            fd.add_output,
        )

    def __getattr__(self, name: str) -> Any:
        op, at = getattr(self.fd.ops, name), {"topk": 1, "select": 1, "scatter": 2}.get(name)

        def constant(i: int, x: Any) -> Any:
            if isinstance(x, bool):  # else nvFuser takes it for an Int
                return self.fd.define_scalar(x, dtype=self.DataType.Bool)
            return self.fd.define_scalar(x) if i == at and isinstance(x, (int, float)) else x

        def call(*args: Any, **kwargs: Any) -> Any:
            return op(*itertools.starmap(constant, enumerate(args)), **kwargs)

        return call


def canonical(text: str) -> str:
    """The text with names numbered in order, and without casts of scalars to Index, which nvFuser
    inserts for sizes that are Int.
    """
    lines: list[str] = []
    names: dict[str, str] = {}
    numbers = itertools.count()
    for line in text.splitlines():
        if cast := re.fullmatch(
            r"\s*(c\d+) = fd\.ops\.cast\((c\d+), dtype=DataType\.Index\)", line
        ):
            names[cast[1]] = names[cast[2]]
            continue
        for name in re.findall(r"\b(?:c|tv)\d+\b", line):
            if name not in names:
                names[name] = f"{name.rstrip('0123456789')}_{next(numbers)}"
        lines.append(re.sub(r"\b(?:c|tv)\d+\b", lambda found: names[found[0]], line))
    return "\n".join(lines)
