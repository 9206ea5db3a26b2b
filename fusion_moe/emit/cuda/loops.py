"""The CUDA C++ of a segment without a product: kernels that make elements of results, a thread for each.

What needs more than one element of something (routing, a combine) is made first, in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...arch import Arch
from ...ir.core import Fusion, Value
from ...ir.kinds.shape import elements
from ...ir.sizes import AnySize
from ...ir.types import plain
from ..cxx.indices import Variable, unflat
from ..cxx.plan import MADE_FIRST
from ..inexpressible import Inexpressible, naming
from .choice import Chosen
from .source import KernelSource, Sizes, Source

_I = Variable("i")
_SUMS = ("sum", "index_put_accumulate", "decode_scale", "quantize", "grouped_swizzle")


class Loops(Source):
    """The source of a segment. UnsupportedError with the sentence why there is none."""

    def __init__(self, fusion: Fusion):
        if other := next((op for op in fusion.ops if op.kind.name in _SUMS), None):
            raise Inexpressible(other, f"{other.kind.name} has no kernel here yet")
        self.combines = [op for op in fusion.ops if op.kind.name == "combine"]
        whole = [v for op in fusion.ops if op.kind.name in MADE_FIRST or op in self.combines for v in op.outputs]
        super().__init__(fusion, tuple(dict.fromkeys((*whole, *(v for v in fusion.outputs if v not in fusion.inputs)))))

    def functions(self) -> list[str]:
        """None: its kernels have all."""
        return []

    def launches(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """Routing; sums of slots; then the results, those of as many elements in one kernel."""
        found = self.made_first(sizes)
        ready = [v for op in self.fusion.ops if op.kind.name in MADE_FIRST for v in op.outputs]
        left = [v for v in self.memory if v not in ready]
        for op in self.combines:
            with naming(op):
                found.append(self.sum_of_slots(op, op.outputs, left, sizes))
            left = [v for v in left if v not in op.outputs]
        counts = dict.fromkeys(elements(v.type.shape) for v in left)
        of_count = [(n, [v for v in left if elements(v.type.shape) == n]) for n in counts]
        return found + [self._elementwise(i, values, n, left, sizes) for i, (n, values) in enumerate(of_count)]

    def _elementwise(self, i: int, values: Sequence[Value], count: AnySize, left: Sequence[Value], sizes: Sizes) -> KernelSource:
        made = self.elements(without=left)
        stores = []
        for v in values:
            at = unflat(_I, [plain(d) for d in v.type.shape])
            stores.append(self.store(v, _I, made.of(v, at)))
        return self.for_all(f"elements_{i}", count, [*made.lines, *stores], sizes)
