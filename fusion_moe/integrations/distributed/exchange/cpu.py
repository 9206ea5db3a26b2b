"""The C++ of what ranks of one host exchange: a call of a function in kernels/exchange.h, before
all else.
"""

from __future__ import annotations

from dataclasses import replace

from ....backends.cpu import loops
from ....backends.cpu.segment import Source
from ....backends.cxx import size
from ....backends.inexpressible import Inexpressible
from ....ir import Fusion, Groups, Op, Value
from . import KERNELS


def source(fusion: Fusion) -> Source:
    """The source of a piece. UnsupportedError with the reason if there is none."""
    written = loops.source(fusion, _Writer)
    return replace(written, more_headers=("exchange.h",), folders=(KERNELS,))


class _Writer(loops.LoopsWriter):
    def _first_dispatch(self, op: Op) -> list[str]:
        if len(op.values) > 4:
            raise Inexpressible(op, "rows in codes have no kernel here")
        return self._call(op, op.values[0], op.values[1], op.attrs["groups"])

    def _first_combine_from(self, op: Op) -> list[str]:
        y, _, ids, ends, _ = op.values
        assert ends.type.ends is not None
        return self._call(op, y, ids, ends.type.ends)

    def _call(self, op: Op, x: Value, ids: Value, ranks: Groups) -> list[str]:
        assert ranks.stride is not None
        (tokens, slots), width = map(size, ids.type.shape), size(x.type.shape[1])
        among = [size(ranks.count), size(ranks.stride), op.attrs["experts"]]
        inputs = [*map(self.array, op.values), *among, tokens, slots, width]
        inputs += [self.names[v] for v in op.outputs]
        return [f"if (!{op.kind.name}({', '.join(map(str, inputs))})) return false;"]
