"""Refusals of calls that torch's operation allows but the IR's operation of that name does not."""

from __future__ import annotations

from typing import Any

from fusion_moe.errors import Error, Untranslatable
from fusion_moe.ir.builder import FusionDefinition


def build(fd: FusionDefinition, kind: str, *inputs: Any, **attrs: Any) -> Any:
    """`fd.ops.<kind>(...)`; refuses the call if the type rule does not accept it (integers in exp, booleans in sum)."""
    try:
        return getattr(fd.ops, kind)(*inputs, **attrs)
    except Error as error:
        raise Untranslatable(error.found, expected=error.expected, where=error.where) from None
