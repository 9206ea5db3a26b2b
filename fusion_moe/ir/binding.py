"""From a Fusion's symbols to numbers: solved from the shapes of its inputs, put into types and
attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from ..encodings import Quantized
from ..errors import DtypeError, ShapeError
from ..layouts import LAYOUTS
from .sizes import Size, exact_div, value
from .types import DTYPES, Rows, TensorType, dim_value, plain


def elements_of(tensor: Any) -> torch.Tensor:
    """The tensor that says the sizes of an input: of a quantized one, its elements."""
    return tensor.elements if isinstance(tensor, Quantized) else tensor


def solve(type: TensorType, tensor: torch.Tensor, env: dict[str, int]) -> None:
    """Computes symbols from dimensions that are a multiple of one symbol."""
    for dim, n in zip(type.shape, tensor.shape, strict=False):
        size, padded = plain(dim), isinstance(dim, Rows) and dim.align > 1
        if isinstance(size, Size) and len(size.terms) == 1 and not padded:
            ((atoms, coefficient),) = size.terms
            solved = exact_div(n, coefficient)
            if len(atoms) == 1 and isinstance(atoms[0], str) and isinstance(solved, int):
                env.setdefault(atoms[0], solved)


def check_stored(
    name: str, type: TensorType, tensor: torch.Tensor, env: Mapping[str, Any], where: str
) -> None:
    """ShapeError or DtypeError unless a tensor, called `name`, is one that holds a value of this
    type.
    """
    want, dtype = storage(type, env)
    if tuple(tensor.shape) != want:
        raise ShapeError(
            f"{name} has shape {list(tensor.shape)}",
            expected=f"{list(want)} for {type}",
            where=where,
        )
    if tensor.dtype != dtype:
        raise DtypeError(f"{name} is {tensor.dtype}", expected=f"{dtype} for {type}", where=where)


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
