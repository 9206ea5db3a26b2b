"""From a Fusion's symbols to numbers: solved from the shapes of its inputs, put into types and
attributes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..encodings import Quantized
from ..errors import DtypeError, ShapeError
from ..layouts import LAYOUTS
from .sizes import Size, exact_div, value
from .types import DTYPES, MOST_ELEMENTS, Rows, TensorType, dim_value, plain

if TYPE_CHECKING:
    from .core import Fusion, Value


def bind(fusion: Fusion, tensors: Sequence[Any], sizes: Mapping[str, int] | None) -> dict[str, int]:
    """The values of a Fusion's symbols for inputs: `Fusion.bind`."""
    fusion.need_inputs(tensors)
    env: dict[str, int] = dict(sizes or {})
    for v, tensor in zip(fusion.inputs, tensors, strict=True):
        _solve(v.type, elements_of(tensor), env)
    if missing := [s for s in fusion.symbols if s not in env]:
        raise ShapeError(
            f"no input has the size {', '.join(missing)}", todo="pass it in sizes", where="fusion"
        )
    if wrong := [f"{name} = {n}" for name, n in env.items() if not 0 <= n <= MOST_ELEMENTS]:
        raise ShapeError(
            ", ".join(wrong), expected="sizes of 0 or more, of 63 bits", where="fusion"
        )
    for v, tensor in zip(fusion.inputs, tensors, strict=True):
        _check(v, elements_of(tensor), env)
    for size, why in fusion.needs:
        if value(size, env) < 0:
            bound = ", ".join(
                f"{name} = {n}" for name, n in env.items() if name in re.findall(r"\w+", why)
            )
            raise ShapeError(
                f"{why}: {bound}" if bound else why,
                expected="sizes that the program was written for",
                where="fusion",
            )
    return env


def elements_of(tensor: Any) -> torch.Tensor:
    """The tensor that says the sizes of an input: of a quantized one, its elements."""
    return tensor.elements if isinstance(tensor, Quantized) else tensor


def _solve(type: TensorType, tensor: torch.Tensor, env: dict[str, int]) -> None:
    """Computes symbols from dimensions that are a multiple of one symbol."""
    for dim, n in zip(type.shape, tensor.shape, strict=False):
        if not isinstance(dim, Size) and not (isinstance(dim, Rows) and dim.align == 1):
            continue
        size = plain(dim)
        if isinstance(size, Size) and len(size.terms) == 1:
            ((atoms, coefficient),) = size.terms
            solved = exact_div(n, coefficient)
            if len(atoms) == 1 and isinstance(atoms[0], str) and isinstance(solved, int):
                env.setdefault(atoms[0], solved)


def _check(v: Value, tensor: torch.Tensor, env: Mapping[str, int]) -> None:
    want, dtype = storage(v.type, env)
    if tuple(tensor.shape) != want:
        raise ShapeError(
            f"{v.name} has shape {list(tensor.shape)}",
            expected=f"{list(want)} for {v.type}",
            where="fusion",
        )
    if tensor.dtype != dtype:
        raise DtypeError(
            f"{v.name} is {tensor.dtype}", expected=f"{dtype} for {v.type}", where="fusion"
        )


def storage_shape(type: TensorType, env: Mapping[str, Any]) -> tuple[Any, ...]:
    """The shape of the torch tensor that holds a value of this type (for a quantized value, its
    codes).
    """
    if type.quantized:
        return (
            *(dim_value(d, env) for d in type.shape[:-1]),
            type.encoding.packed(dim_value(type.shape[-1], env)),
        )
    rows = next((d for d in type.shape if isinstance(d, Rows) and d.align > 1), None)
    shape = tuple(value(plain(d), env) for d in type.shape)
    return LAYOUTS[type.layout].storage_shape(
        shape, None if rows is None else value(rows.groups.count, env)
    )


def storage(type: TensorType, env: Mapping[str, Any]) -> tuple[tuple[Any, ...], torch.dtype]:
    """The shape and dtype of that tensor."""
    dtype = type.encoding.element.dtype if type.quantized else DTYPES[type.dtype]
    return storage_shape(type, env), dtype


def nbytes(type: TensorType, env: Mapping[str, Any]) -> Any:
    """The bytes of a tensor of a type, for known sizes."""
    shape, dtype = storage(type, env)
    return prod(shape) * dtype.itemsize


def resolve(attrs: Mapping[str, Any], env: Mapping[str, int]) -> dict[str, Any]:
    """The attributes of an operation with every size replaced by its number."""
    return {name: _resolve(v, env) for name, v in attrs.items()}


def _resolve(attr: Any, env: Mapping[str, int]) -> Any:
    if isinstance(attr, tuple):
        return tuple(_resolve(a, env) for a in attr)
    return dim_value(attr, env) if isinstance(attr, (Size, Rows)) else attr
