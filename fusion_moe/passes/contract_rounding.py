"""Keeps float32 where a kernel would round to a narrower type and back: the one pass that changes bits.

It runs on each segment by itself: a value that is stored between two kernels is rounded as the program says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.builder import FusionDefinition
from ..ir.core import Fusion, Op, Value
from .rewrite import rewrite


def dropped_roundings(fusion: Fusion) -> tuple[Op, ...]:
    """The casts of the Fusion that `contract_rounding` drops a reader of: narrowing, read back at the wider type, not an output."""
    return tuple(op for op in fusion.ops if any(_contracts(fusion, op, reader) for v in op.outputs for reader in fusion.readers.get(v, ())))


def contract_rounding(fusion: Fusion) -> Fusion:
    """The Fusion where cast(cast(x: f32, bf16), f32) is x, unless the narrow value is an output."""
    skipped = {reader.outputs[0] for op in fusion.ops for v in op.outputs for reader in fusion.readers.get(v, ()) if _contracts(fusion, op, reader)}

    def rule(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
        if op.outputs[0] not in skipped:
            return None
        narrow = fd.producer(inputs[0])
        assert narrow is not None
        return narrow.values[:1]

    return rewrite(fusion, rule) if skipped else fusion


def _contracts(fusion: Fusion, narrow: Op, wide: Op) -> bool:
    if narrow.kind.name != "cast" or wide.kind.name != "cast" or narrow.outputs[0] in fusion.outputs:
        return False
    x, between, back = narrow.values[0].type.dtype, narrow.attrs["dtype"], wide.attrs["dtype"]
    return x == back == "f32" and between in ("bf16", "f16")
