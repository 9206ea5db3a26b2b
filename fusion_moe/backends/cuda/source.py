"""The common part of every segment's CUDA C++: a struct with the arrays and sizes that its kernels
read, passed to each of them by value.

A segment is a few kernels, launched in order. Each is a separate translation unit, with the struct
and one entry point, so that only launched kernels are compiled. Kernels make faulty ends, ids and
indices safe, and report the fault in the word `error`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any, TypeVar

from ...arch import Arch
from ...errors import UnsupportedError
from ...ir import AnySize, Dim, Fusion, Op, Value, ceildiv, elements, needed, plain, value
from ..cxx import (
    Call,
    Elements,
    Expression,
    Index,
    ProductPlan,
    Variable,
    Writer,
    below,
    indented,
    inner,
    is_index,
    is_made_first,
    reshaped,
    size,
    stored,
)
from .heuristics import AUTO, Chosen

T = TypeVar("T")
THREADS = 256
MAX_RESIDENT = 16  # blocks of an elementwise kernel
# of a combine: threads of a block, few so that one fits beside the blocks before it; slots that a
# thread reads at once, all of them if there are no more than these
_SUM_THREADS, _SLOTS, _ALL_SLOTS = 64, 8, 10
_J, _S, _T = map(Variable, "jst")
NO_ENDS = "static constexpr const i32* ends = nullptr;  // all rows are of one group"

_STRUCT = Template("""\
namespace {

struct Segment {
$members

$functions
};

}  // namespace
""")
_KERNEL = Template("""\
$includes
$struct
extern "C" __global__ void __launch_bounds__($bounds)$cluster $name($parameters) {
    $call
}
""")
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Boxes:
    """A tensor that a kernel copies in boxes: its array, its sizes with the fastest dimension
    first, and the C++ type of its elements.

    array: its number in the struct; box: the sizes of a box, the first one 128 bytes.
    """

    array: int
    type: str
    sizes: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class KernelSource:
    """One kernel: its text, and how it is launched.

    blocks: as many as there is work for, a number once sizes are known (`at`); max_resident: the
    most that a multiprocessor gets, which then loop over the work; 0: no limit; shared: bytes of
    dynamic shared memory; reads_before_wait, writes_before_wait: whether it reads, or writes,
    before it waits for the previous kernel.
    carveout_blocks: how many of its blocks a multiprocessor has, if the shared-memory carveout must
    hold just these: see runtime/cuda.py. title: a name for people. size_class, boxes: its
    parameters after the struct; the former: the numbers of a SizeClass (kernels/ragged.cuh) of a
    single launch. cluster: blocks of a cluster; `blocks` and the launched blocks are multiples of
    it. min_blocks: how many of its blocks a multiprocessor is to have. folders: where it has
    headers beside kernels/.
    """

    name: str
    text: str
    blocks: AnySize
    threads: int = THREADS
    shared: int = 0
    max_resident: int = 0
    reads_before_wait: bool = False
    carveout_blocks: int = 0
    title: str = ""
    writes_before_wait: bool = False
    boxes: tuple[Boxes, ...] = ()
    size_class: tuple[int, ...] | None = None
    cluster: int = 1
    min_blocks: int = 1
    folders: tuple[Path, ...] = ()

    def at(self, sizes: Sizes) -> KernelSource:
        """The same with a number of blocks."""
        blocks = value(self.blocks, sizes)
        return self if blocks is self.blocks else replace(self, blocks=blocks)

    def grid(self, arch: Arch) -> int:
        """The number of blocks to launch on a GPU."""
        assert isinstance(self.blocks, int)
        return (
            min(self.blocks, self.max_resident * arch.clustered(self.cluster))
            if self.max_resident
            else self.blocks
        )


@dataclass(frozen=True)
class Array:
    """Memory for one call that holds no value: `count` elements of a C++ type."""

    name: str
    type: str
    count: AnySize


class SafeElements(Elements):
    """Elements whose indices come from tensors: made safe, unless the operation that made them
    guarantees it.
    """

    def _picked(self, op: Op, i: Index) -> Index:
        x, index = op.values
        return safe(self._fusion, index, x.type.shape[op.attrs["dim"]], super()._picked(op, i))


def safe(fusion: Fusion, index: Value, limit: Dim, element: Index) -> Index:
    """An element of an index, clamped below a limit; unchanged if the operation that made it
    guarantees it.
    """
    return (
        element
        if below(fusion, index) == plain(limit)
        else Call("clamp_index", (element, size(limit), Variable("error")))
    )


class Source(Writer, ABC):
    """Writes the struct and the kernels of a segment. UnsupportedError with the reason if there are
    none.

    scratch: arrays that are allocated in addition to `memory`. transposed: the input, if any, that
    is passed with its last two dimensions swapped; grouped: the one of which it reads no rows of no
    group. unquantized: rows in memory, in bf16, whose codes it makes last. needs: the arch.FEATURES
    without which it has no kernels.
    """

    ELEMENTS = SafeElements
    # how a kernel begins that reads and writes nothing before the previous one has ended
    WAIT = ("griddepcontrol_wait();", "griddepcontrol_launch_dependents();")
    needs: tuple[str, ...] = ()
    transposed: Value | None = None
    grouped: Value | None = None
    unquantized: Value | Array | None = None

    def __init__(
        self, fusion: Fusion, memory: Sequence[Value], names: Mapping[Value, str] | None = None
    ):
        super().__init__(fusion, memory, names)
        self.scratch: list[Array] = []
        self._once: dict[Hashable, Any] = {}

    def choose(self, sizes: Sizes | None, arch: Arch, variant: str = AUTO) -> Chosen:
        """The choice for these sizes on a GPU, for a segment by itself; None: one that computes
        calls of any sizes, if not as fast. UnsupportedError if the variant does not fit.
        """
        return Chosen()

    def launches(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """The kernels, in order, for the choice for these sizes on a GPU."""
        return [kernel.at(sizes) for kernel in self.kernels(chosen, sizes, arch)]

    @abstractmethod
    def kernels(self, chosen: Chosen, sizes: Sizes, arch: Arch) -> list[KernelSource]:
        """The same, with numbers of blocks that may depend on symbols."""

    def count(self, array: Array, chosen: Chosen, sizes: Sizes) -> int:
        """The number of elements of a scratch array that the kernels use."""
        return value(array.count, sizes) if self.uses(array, chosen) else 0

    def uses(self, array: Array, chosen: Chosen) -> bool:
        """Whether the kernels of a choice use a scratch array."""
        return True

    def once(self, make: Callable[..., T], *of: Hashable) -> T:
        """What make(*of) returns; it is called once, so that a call of new sizes writes no text."""
        if (make, of) not in self._once:
            self._once[make, of] = make(*of)
        return self._once[make, of]

    def arrays_of(self, chosen: Chosen) -> Sequence[int]:
        """Which of the arrays (inputs, memory, scratch) the struct of a choice has, in order."""
        return range(len(self.fusion.inputs) + len(self.memory) + len(self.scratch))

    def may_chain(self, chosen: Chosen) -> bool:
        """Whether it may agree with another product, or with who sends rows, on fragment order."""
        return bool(chosen.size_classes) and chosen.activation_reader.reads_fragment_order

    def takes_few_ids(self, chosen: Chosen, sizes: Sizes) -> bool:
        """Whether its kernel can find its tiles in these sizes' ids, which no kernel has sorted."""
        return False

    def rounds(self, chosen: Chosen, arch: Arch) -> bool:
        """Whether its product can round rows itself to what their codes stand for."""
        return False

    @property
    def in_any_order(self) -> tuple[Value, int] | None:
        """The result, and its number of columns, that can be in fragment order, too."""
        return None

    @property
    def made_later(self) -> list[Value]:
        """The values that are not in memory when routing runs."""
        first = {v for op in self.fusion.ops if is_made_first(op) for v in op.outputs}
        return [v for v in self.memory if v not in first]

    def kernel(self, name: str, body: Sequence[str], blocks: AnySize, **more: Any) -> KernelSource:
        """A kernel with a struct whose function `run` is `body`. more: as of `calling`."""
        run = ["__device__ void run() const {", *inner(body), "}"]
        return self.calling("s.run();", name, run, blocks, **more)

    def calling(
        self,
        call: str,
        name: str,
        functions: Sequence[str],
        blocks: AnySize,
        *,
        headers: Sequence[str] = ("routing.cuh",),
        **launched: Any,
    ) -> KernelSource:
        """A kernel that makes a call, with additional functions in its struct. launched: further
        fields of KernelSource. The call's parameters: s, size_class, map0, map1, ...
        """
        kernel = KernelSource(name, "", blocks, title=name, **launched)
        declared = [
            "Segment s",
            *(["SizeClass size_class"] if kernel.size_class is not None else ()),
            *(f"TensorMap map{i}" for i in range(len(kernel.boxes))),
        ]
        text = _KERNEL.substitute(
            includes="\n".join(f'#include "{header}"' for header in headers),
            struct=self._struct(functions),
            name=name,
            call=call,
            bounds=f"{kernel.threads}, {kernel.min_blocks}",
            parameters=", ".join(f"const __grid_constant__ {what}" for what in declared),
            cluster=f" __cluster_dims__({kernel.cluster})" if kernel.cluster > 1 else "",
        )
        return replace(kernel, text=text)

    def array_number(self, array: Value | Array) -> int:
        """The number of an array in the struct."""
        return [*self.fusion.inputs, *self.memory, *self.scratch].index(array)

    def for_all(
        self,
        name: str,
        count: AnySize,
        body: Sequence[str],
        *,
        before_wait: Sequence[str] = (),
        headers: Sequence[str] = ("routing.cuh",),
    ) -> KernelSource:
        """A kernel that runs `body` for each i below a count, and `before_wait` while the previous
        kernel, which it does not need, runs.
        """
        blocks = ceildiv(count, THREADS)
        first, then = (
            [f"for_all({size(count)}, [&](i64 i) {{", *inner(lines), "});"] if lines else []
            for lines in (before_wait, body)
        )
        return self.kernel(
            name,
            [*first, *self.WAIT, *then],
            blocks,
            headers=headers,
            max_resident=MAX_RESIDENT,
            reads_before_wait=bool(before_wait),
        )

    def for_all_warps(
        self,
        name: str,
        count: AnySize,
        body: Sequence[str],
        *,
        index: str = "i",
        headers: Sequence[str] = ("routing.cuh",),
    ) -> KernelSource:
        """A kernel that runs `body` with a warp for each index below a count."""
        loop = f"for_all_warps({size(count)}, [&](i64 {index}) {{"
        return self.kernel(
            name,
            [*self.WAIT, loop, *inner(body), "});"],
            ceildiv(count, THREADS // 32),
            headers=headers,
            max_resident=MAX_RESIDENT,
        )

    def _struct(self, more: Sequence[str]) -> str:
        members, functions = self._of_all_kernels
        return _STRUCT.substitute(
            members=members,
            functions="\n".join([functions, indented(more)] if more else [functions]),
        )

    @cached_property
    def _of_all_kernels(self) -> tuple[str, str]:
        return indented(self.members()), indented(self.functions())

    def members(self) -> list[str]:
        """Sizes and arrays, scratch arrays, and the word for faults."""
        return [*super().members(), *(f"{a.type}* {a.name};" for a in self.scratch), "i64* error;"]

    # Sums -----------------------------------------------------------------------------------------

    def sum_of_slots(
        self,
        combine: Op,
        results: Sequence[Value],
        without: Sequence[Value],
        after: ProductPlan | None = None,
    ) -> KernelSource:
        """The kernel of a combine, and of the results computed only from it. without: values that
        are not in memory yet.

        after: the product whose kernel comes before. Slots and weights are read while that runs,
        unless it makes something that they are computed from.
        """
        (y, slot_of, w), (total,) = combine.values, combine.outputs
        reads_before_wait = after is not None and needed(self.fusion.ops, [slot_of, w]).isdisjoint(
            (*after.made, *after.rows, *after.summed)
        )
        slots, hidden = plain(slot_of.type.shape[1]), (*without, *results)
        row, weight, made = self.of_slots(combine, hidden)
        tokens, width = total.type.shape
        assert isinstance(width, int)
        columns = next(v for v in (8, 4, 2, 1) if width % v == 0)
        at_once = slots if isinstance(slots, int) and 0 < slots <= _ALL_SLOTS else _SLOTS
        kept = [
            f"result{i}.at[v] = stored<{stored(v)}>({self.of_token(made, v, combine)});"
            for i, v in enumerate(results)
        ]
        vectors = [f"Vector<{stored(v)}, {columns}> result{i};" for i, v in enumerate(results)]
        stores = [
            f"store_vector<{columns}>({self.names[v]} + t * {width} + j0, result{i});"
            for i, v in enumerate(results)
        ]
        before, end = str(reads_before_wait).lower(), "nullptr"
        if after is not None and after.sums_groups:
            end = f"{self.array(after.ends)} + {after.groups - 1}"
        body = [
            f"combine_slots<{columns}, {at_once}, {before}>({self.array(y, without)}, "
            f"{end}, {size(tokens)}, {width}, i32({size(slots)}),",
            *inner(
                [
                    f"[&](i64 t, i64 s) {row},",
                    f"[&](i64 t, i64 s) {weight},",
                    f"[&](i64 t, i64 j0, const float (&total)[{columns}]) {{",
                    *inner(vectors),
                    "    #pragma unroll",
                    f"    for (int v = 0; v < {columns}; ++v) {{",
                    *inner(inner(["const i64 j = j0 + v;", *made.lines, *kept])),
                    "    }",
                    *inner(stores),
                    "});",
                ]
            ),
        ]
        pieces = elements((plain(tokens), width // columns))
        return self.kernel(
            "combine",
            body,
            ceildiv(pieces, _SUM_THREADS),
            threads=_SUM_THREADS,
            max_resident=MAX_RESIDENT * THREADS // _SUM_THREADS,
            reads_before_wait=reads_before_wait,
        )

    def of_slots(self, combine: Op, hidden: Collection[Value]) -> tuple[str, str, Elements]:
        """What a combine reads for slot s of token t, as bodies of functions: the row, and its
        weight; and elements of what is computed of its sum, which is total[v] for column j. hidden:
        values that are not in memory yet.
        """
        (y, slot_of, w), (total,) = combine.values, combine.outputs
        tokens, width = total.type.shape
        if not isinstance(width, int):
            raise UnsupportedError(
                f"combine of {y.type} has no kernel here",
                expected="a number of columns known when compiling",
            )
        slot, weight = (self.elements(without=hidden) for _ in range(2))
        row = safe(self.fusion, slot_of, y.type.shape[0], slot.of(slot_of, [_T, _S]))
        factor = weight.of(w, [_T, _S])

        def of_thread(at: Sequence[Index]) -> Expression:
            if not is_index(at[0], _T, tokens) or not is_index(at[1], _J, width):
                raise UnsupportedError("a result reads another element of the sum than its own")
            return Expression("total[v]", frozenset("v"))

        return (
            f"{{ {' '.join(slot.lines)} return {row}; }}",
            f"{{ {' '.join(weight.lines)} return {factor}; }}",
            self.elements({total: of_thread}, without=hidden),
        )

    def of_token(self, made: Elements, v: Value, combine: Op) -> Variable:
        """Element (t, j) of a value, viewed as a matrix like the sum of a combine."""
        shape = combine.outputs[0].type.shape
        if elements(v.type.shape) != elements(shape):
            raise UnsupportedError(
                f"{v.name} {v.type} is not a matrix of {' x '.join(map(str, shape))}"
            )
        return made.of(v, reshaped([_T, _J], shape, v.type.shape))
