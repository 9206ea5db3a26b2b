"""The signature of an operation, from the annotations of its type rule: which arguments are
operands, and the type of each attribute.

    def rule(x: TensorType, dims: tuple[int, ...], keepdim: bool) -> Types: ...

has one operand and two attributes. An operand is annotated `TensorType`, or `Any` if it may be a
number; everything else is an attribute: plain data, from which texts, cache keys and kernels are
written, so it must have exactly the annotated type.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import torch

from ..errors import FusionError
from .sizes import Size, is_size
from .types import Groups, Rows, TensorType, called_here

_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Signature:
    """operands: how many; None for any number. attributes: the type of each, in order. required:
    those without a default.
    """

    operands: int | None
    attributes: Mapping[str, Any]
    required: frozenset[str]

    def bind(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Operands, and attributes by name in the order of the rule. Attributes may also follow the
        operands by position, as in nvFuser.

        inputs: the positional arguments. If there may be any number of operands, they are one list
        followed by attributes, or they end at the first string.
        """
        operands, more = list(inputs), list[Any]()
        if self.operands is not None:
            operands, more = operands[: self.operands], operands[self.operands :]
        elif operands and isinstance(operands[0], (list, tuple)):
            operands, more = list(operands[0]), operands[1:]
        else:
            end = next((i for i, v in enumerate(operands) if isinstance(v, str)), len(operands))
            operands, more = operands[:end], operands[end:]
        if len(operands) < (self.operands or 0) or len(more) > len(self.attributes):
            raise FusionError(f"{len(inputs)} arguments by position", expected=self._expected())
        named = dict(zip(self.attributes, more, strict=False))
        if twice := named.keys() & attrs.keys():
            raise FusionError(f"{', '.join(sorted(twice))} given twice", expected=self._expected())
        return tuple(operands), self.check({**named, **attrs})

    def check(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes in the order of the rule, lists as tuples. FusionError unless all are
        present and have their types.
        """
        if wrong := [name for name in attrs if name not in self.attributes]:
            raise FusionError(f"an attribute {wrong[0]!r}", expected=self._expected())
        if missing := [
            name for name in self.attributes if name in self.required and name not in attrs
        ]:
            raise FusionError(f"no {missing[0]}", expected=self._expected())
        return {
            name: _checked(name, attrs[name], hint)
            for name, hint in self.attributes.items()
            if name in attrs
        }

    def _expected(self) -> str:
        operands = (
            "operands"
            if self.operands is None
            else f"{self.operands} operand" + "s" * (self.operands != 1)
        )
        return ", ".join(
            [operands, *(f"{name}: {_described(hint)}" for name, hint in self.attributes.items())]
        )


@cache
def signature(rule: Callable[..., Any]) -> Signature:
    """The signature of a type rule."""
    hints, parameters = get_type_hints(rule), inspect.signature(rule).parameters
    operands = [p for name, p in parameters.items() if hints[name] in (TensorType, Any)]
    attributes = {name: hints[name] for name, p in parameters.items() if p not in operands}
    required = frozenset(
        name for name in attributes if parameters[name].default is inspect.Parameter.empty
    )
    variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in operands)
    return Signature(None if variadic else len(operands), attributes, required)


def checked_operand(v: Any) -> Any:
    """An operand that is a number: an int or float of 64 bits, or a bool. FusionError for anything
    else.
    """
    v = _as_pythons(v)
    if isinstance(v, bool) or type(v) is float:
        return v
    if isinstance(v, float):
        return float(v)  # a subclass may print differently
    if isinstance(v, int) and int(v) in _INT64:
        return int(v)
    actual, todo = _no_number(v)
    raise FusionError(
        actual, expected="a value of this Fusion, or an int, float or bool of 64 bits", todo=todo
    )


def _no_number(v: Any) -> tuple[str, str]:
    """A description of an operand that is not a number, and advice."""
    if isinstance(v, (Size, Rows)):
        return (
            f"the operand {v} is a size, which the call decides",
            "sizes are for attributes; one that is an int is a number too",
        )
    if isinstance(v, torch.Tensor):
        return (
            f"the operand is a tensor of torch, {v.dtype} {list(v.shape)}",
            "write a number, or make it an argument of the operation",
        )
    return f"the operand {v!r} of type {type(v).__name__}", ""


def _as_pythons(v: Any) -> Any:
    """A numpy scalar as the equal Python number, if there is one; anything else unchanged."""
    numpy = sys.modules.get("numpy")
    return v.item() if numpy is not None and isinstance(v, numpy.generic) else v


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value`, which must have the type of the hint."""
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        return tuple(_checked(name, v, get_args(hint)[0]) for v in value)
    value, options = _as_pythons(value), get_args(hint) or (hint,)
    if any(_is(value, option) for option in options):
        return value
    raise FusionError(f"{name} = {value!r}", expected=_described(hint), todo=called_here(value))


def _is(value: Any, hint: Any) -> bool:
    if hint is float:
        return type(value) is float or _is(value, int)
    if hint is int:
        return type(value) is int and value in _INT64
    if hint is Rows:
        whole = (
            isinstance(value, Rows) and is_size(value.total) and isinstance(value.groups, Groups)
        )
        return whole and type(value.align) is int and value.align > 0
    if hint is Size:
        return isinstance(value, Size) and is_size(value)
    return type(value) is hint


_WORDS = {
    int: "an int",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Size: "a size",
    Rows: "rows of groups",
    Groups: "groups",
    type(None): "None",
}


def _described(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a list, each {_described(get_args(hint)[0])}"
    return " or ".join(_WORDS[option] for option in get_args(hint) or (hint,))
