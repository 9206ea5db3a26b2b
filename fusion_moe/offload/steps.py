"""A layer whose experts lie in two memories, as a program of steps: the operation's own Fusion, cut
before the sum of a token's rows.

Each step but the last makes rows of one tensor. So the split changes no order of sums, and where
one kind of device does everything, no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..definitions.operations import SPECS, Call, bind, eager_types, fusion_of
from ..ir import Fusion, made_again, part
from ..ir.text import text

_NAME = "fused_experts"
_STEPS = (  # name, where it runs, what it makes
    ("route", "device", "ids, expert_map -> slots whose experts are there, and misses"),
    ("split", "device", "misses -> experts that are copied, and those that the host computes"),
    ("copy", "host -> device", "copied experts, into spare slots"),
    ("resident", "device", "rows of all experts that are there now"),
    ("gather", "device -> host", "the tokens of all other misses, a row for each slot"),
    ("host", "host", "their rows, by the operation itself"),
    ("wait", "host -> device", "these rows, among the others"),
    ("add", "device", "the rows of each token, in the order of its slots"),
)
STEPS = ", ".join(name for name, *_ in _STEPS)


@dataclass(frozen=True)
class Steps:
    """The two programs of the device, as texts, and which arguments of the operation `resident`
    takes, by name.

    resident: -> y [T*k, H], ends i32[S], row_of i32[T*k], slot_of i32[T, k]. Rows from ends[-1] on
    are those of misses, in the order of tokens and slots. add: y, slot_of, and w unless it has
    multiplied the input -> [T, H].
    """

    resident: str
    add: str
    takes: tuple[str, ...]
    weighs: bool

    def rows(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, ends, row_of and slot_of. tensors: the operation's tensors, those of a list as
        name[0], name[1], ...
        """
        tokens = len(tensors["ids"])
        y, ends, row_of, slot_of = torch.ops.fusion_moe.run(
            self.resident, [tensors[name] for name in self.takes], [tokens]
        )
        return y, ends, row_of, slot_of

    def sum(self, y: Tensor, slot_of: Tensor, w: Tensor) -> Tensor:
        """The rows of each token, in the order of its slots -> [T, H]."""
        inputs = [y, slot_of, w] if self.weighs else [y, slot_of]
        return torch.ops.fusion_moe.run(self.add, inputs, [len(slot_of)])[0]

    def __str__(self) -> str:
        rows = "\n".join(f"# {name:<10}{where:<16}{what}" for name, where, what in _STEPS)
        return f"{rows}\n\n# resident\n{self.resident}\n\n# add\n{self.add}"


def steps_of(arguments: Mapping[str, Any]) -> Steps:
    """Those of a call of `fused_experts` with an expert_map, whose tensors may be on the meta
    device.
    """
    call = bind(SPECS[_NAME], (), arguments)
    return _cut(call.spec.name, eager_types(call), call.others)


def fusion_of_call(call: Call) -> Fusion:
    """What the whole call computes, on one device."""
    return fusion_of(call.spec.name, eager_types(call), call.others)


@lru_cache(maxsize=1024)
def _cut(name: str, types: Any, others: Any) -> Steps:
    fusion = fusion_of(name, types, others)
    names = {v: arg for v, (arg, _) in zip(fusion.inputs, types, strict=True)}
    (combine,) = (op for op in fusion.ops if op.kind.name == "combine")
    (route,) = (op for op in fusion.ops if op.kind.name == "route")
    y, slot_of, w = combine.values
    ends, row_of, _ = route.outputs
    outputs = y, ends, row_of, slot_of
    before = made_again(fusion.ops, outputs)
    inputs = _read(fusion, before)
    resident = part(fusion, before, inputs, outputs)
    weighs = w in fusion.inputs
    passed = (y, slot_of, w) if weighs else (y, slot_of)
    add = part(fusion, made_again(fusion.ops, fusion.outputs, passed), passed, fusion.outputs)
    return Steps(text(resident), text(add), tuple(names[v] for v in inputs), weighs)


def _read(fusion: Fusion, ops: Sequence[Any]) -> tuple[Any, ...]:
    read = {v for op in ops for v in op.values}
    return tuple(v for v in fusion.inputs if v in read)
