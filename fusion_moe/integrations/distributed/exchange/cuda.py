"""The CUDA C++ of what ranks of one host exchange by stores into each other's memory:
kernels/exchange.cuh. A kernel sends, and then waits for what others send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .... import options
from ....arch import Arch
from ....backends.cuda.heuristics import Chosen
from ....backends.cuda.source import KernelSource, Sizes, Source
from ....backends.cxx import inner, known, size, stored
from ....backends.inexpressible import Inexpressible
from ....ir import DTYPES, Fusion, Groups, Value, plain
from . import KERNELS
from .kinds import PIECE, peers_of
from .scheduler import combine_before

_K_BLOCK = 64  # columns: kernels/fragment_order.cuh
_HEADERS = ("exchange.cuh",)
_THREADS = 768  # more would have too few registers
_AT_ONCE = 4  # slots that a thread reads at once
_MOST_RANKS = 16


class Collective(Source):
    """The source of `dispatch` or `combine_from`, which all ranks run. UnsupportedError with the
    reason if there is none.
    """

    def __init__(self, fusion: Fusion):
        (op,) = (op for op in fusion.ops if op.kind.role == "collective")
        self.op, self.sends, self.sums = op, op.kind.name == "dispatch", combine_before(fusion)
        rows, *scales = op.values[0], *(op.values[4:] if self.sends else ())
        groups: Groups | None = op.attrs["groups"] if self.sends else op.values[3].type.ends
        assert groups is not None
        self.groups, self._ranks = groups, known(groups.count)
        self._parts = [_bytes(v) for v in (rows, *scales)]  # of a row
        for wrong, actual in (
            *((n % PIECE, f"rows of {n} bytes, no multiple of {PIECE}") for n in self._parts),
            (len(scales) > 1, f"{len(scales)} kinds of scales"),
            (self._ranks > _MOST_RANKS, f"{self._ranks} ranks"),
            (rows.type.dtype == "f64", "f64, whose words may be any bits"),
            (set(fusion.outputs) - set(op.outputs), "a view of what ranks exchange"),
        ):
            if wrong:
                raise Inexpressible(op, f"{actual}: has no kernel here")
        super().__init__(fusion, op.outputs)
        self.grouped = self.sums.values[0] if self.sums else None

    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """The one that sends, and waits."""
        blocks = _blocks(arch)
        if self.sends:
            return self.once(self._dispatch, blocks, chosen.writes_fragment_order)
        return self.once(self._combine_from, blocks)

    @property
    def in_any_order(self) -> tuple[Value, int] | None:
        """The rows that others sent, if these are 16-bit numbers in whole K blocks, and ranks have
        equally many experts: all choose the order that they send in as their own products read it.
        """
        rows = self.op.outputs[0]
        width, plain_rows = known(rows.type.shape[1]), len(self._parts) == 1
        fits = plain_rows and DTYPES[rows.type.dtype].itemsize == 2 and width % _K_BLOCK == 0
        equal = self.op.attrs["experts"] % self._ranks == 0
        return (rows, width) if self.sends and fits and equal else None

    def may_chain(self, chosen: Chosen) -> bool:
        """Ranks send in one order, but each has kernels for any size until its own are compiled."""
        return not options.current().background_compile

    def _call(self, blocks: int) -> tuple[str, str]:
        """The type of a call, and the call."""
        ids = self.op.values[1]
        numbers = self._ranks, known(ids.type.shape[1]), sum(self._parts)
        of = ", ".join(map(str, (*numbers, self.op.attrs["experts"], blocks, _senders(blocks))))
        assert self.groups.stride is not None
        return (
            f"Call<{of}>",
            f"{{{self.array(peers_of(self.op))}, i32({size(self.groups.stride)}), error}}",
        )

    def _kernel(self, name: str, body: Sequence[str], blocks: int) -> list[KernelSource]:
        kernel = self.kernel(name, body, blocks, headers=_HEADERS, threads=_THREADS)
        return [replace(kernel, folders=(KERNELS,))]

    def _dispatch(self, blocks: int, fragment_order: bool) -> list[KernelSource]:
        x, ids, w, _, *scales = self.op.values
        of, call = self._call(blocks)
        tokens, own = size(plain(ids.type.shape[0])), [self.array(v) for v in (ids, w, x)]
        rows, all_ids, all_w, ends, *all_scales = (self.names[v] for v in self.op.outputs)
        beside = *map(self.array, scales), *all_scales
        arguments = ", ".join([call, f"i32({tokens})", *own, all_ids, all_w, rows, ends, *beside])
        equal = str(self.groups.stride == plain(ids.type.shape[0])).lower()
        pieces, order = sum(self._parts[1:]) // PIECE, str(fragment_order).lower()
        dispatch = f"Dispatch<{of}, {stored(ids)}, {stored(w)}, {equal}, {pieces}, {order}>"
        return self._kernel("dispatch", [f"{dispatch}{{{arguments}}}.run();"], blocks)

    def _combine_from(self, blocks: int) -> list[KernelSource]:
        (y, all_ids, ids, ends, _), (total,) = self.op.values, self.op.outputs
        of, call = self._call(blocks)
        tokens, sent = size(plain(ids.type.shape[0])), [self.array(v) for v in (all_ids, ends)]
        arguments = ", ".join([call, *sent, f"i32({tokens})", self.array(ids), self.names[total]])
        combine = f"const CombineFrom<{of}, {stored(ids)}, {stored(y)}> combine{{{arguments}}};"
        sums = self._sums() if self.sums else [f"combine.copy({self.array(y)});"]
        return self._kernel("combine_from", [combine, *sums], blocks)

    def _sums(self) -> list[str]:
        """Sends what a combine makes: only slots whose experts are here are read."""
        assert self.sums is not None
        y, sent = self.sums.values[0], self.op.values[0]
        row, weight, result = self.of_slots(self.sums, self.memory)
        element, width = self.of_token(result, sent, self.sums), known(sent.type.shape[1])
        columns = PIECE // DTYPES[sent.type.dtype].itemsize
        slots, pieces = known(self.op.values[1].type.shape[1]), width // columns
        count = 2 if pieces % 2 == 0 else 1  # that a thread makes at once
        return [
            f"combine.run<{count}>([&](i32 t, u32 slots, i32 part, uint4(&x)[{count}]) {{",
            *inner(
                [
                    f"float totals[{count}][{columns}] = {{}};",
                    f"sum_slots<{count}, {columns}, {min(slots, _AT_ONCE)}>(",
                    f"    totals, {self.array(y)}, {width}, part * {columns}, {width // count},",
                    f"    slots, [&](i64 s) {row},",
                    f"    [&](i64 s) {weight});",
                    "#pragma unroll",
                    f"for (int n = 0; n < {count}; ++n) {{",
                    *inner(
                        [
                            "const auto& total = totals[n];",
                            f"Vector<{stored(sent)}, {columns}> sum;",
                            "#pragma unroll",
                            f"for (int v = 0; v < {columns}; ++v) {{",
                            *inner(
                                [
                                    f"const i64 j = {columns} * part + {width // count} * n + v;",
                                    *result.lines,
                                    f"sum.at[v] = stored<{stored(sent)}>({element});",
                                ]
                            ),
                            "}",
                            "x[n] = reinterpret_cast<const uint4&>(sum);",
                        ]
                    ),
                    "}",
                ]
            ),
            "});",
        ]


def _bytes(rows: Value) -> int:
    """Those of a row."""
    return known(rows.type.shape[1]) * DTYPES[rows.type.dtype].itemsize


def _blocks(arch: Arch) -> int:
    """All of a kernel run at once, and leave multiprocessors to kernels of other streams, which a
    rank that is waited for may wait for.
    """
    return 3 * arch.multiprocessors // 4


def _senders(blocks: int) -> int:
    """How many of a kernel's blocks send, while the others wait."""
    return 2 * blocks // 3
