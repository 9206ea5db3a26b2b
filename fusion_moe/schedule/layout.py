"""Layout segments: quantize and swizzle in one pass over the activations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..ir.core import Fusion, Value
from ..target import Target
from . import pointwise

NAME = "layout"
CONTRACTS_ROUNDING = True
ROLES = (*pointwise.ROLES, "quantize", "layout")


@dataclass(frozen=True)
class Layout:
    """The layouts that are written."""

    layouts: tuple[str, ...]


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None if rows are quantized, swizzled, or both."""
    other = next((op for op in fusion.ops if op.kind.role not in ROLES), None)
    return f"{other.kind.name} is not a change of format or layout" if other else None


def describe(fusion: Fusion) -> Layout:
    """One pass over the rows."""
    return Layout(tuple(dict.fromkeys(str(op.attrs["layout"]) for op in fusion.ops if "layout" in op.attrs)))
