"""Calling built kernels: pointers in, new tensors out, one call for a kernel or for all kernels of
a program.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ...ir.binding import nbytes, storage
from ...ir.core import Fusion, Value
from ...ir.kinds.collectives import PEERS, peers_of
from ...runtime import build, memory, native
from ...runtime.faults import rank_error
from ...runtime.memory import Memory
from ...runtime.precompile import Build
from ...runtime.remembered import Remembered
from .prebuilt import product_of
from .readers import KERNELS
from .segment import Source
from .unit import Step, text

_REMEMBERED = 256  # how many sizes of calls are kept
Sizes = Mapping[str, int]
Entry = Callable[[bytes, bytes], int]  # (pointers, sizes) -> whether it found bad input


class Library:
    """The library of segments, with the grouped products of a tier. Built, or found in the cache,
    at the first call.

    steps: how a program runs all of them, if its entry "run" is needed.
    """

    def __init__(self, sources: Sequence[Source], tier: str, steps: Sequence[Step] = ()):
        self.sources, self.tier, self._steps = tuple(sources), tier, steps

    @cached_property
    def text(self) -> str:
        """The library's C++."""
        return text(self.sources, self._steps)

    @cached_property
    def _loaded(self) -> ctypes.CDLL:
        return build.load(self.text, name="segments", tier=self.tier, include=[KERNELS])

    @cached_property
    def _products(self) -> Any:
        """The function of each segment's grouped product; null for a segment without one."""
        products = [
            product_of(self.tier, *s.product).product if s.product else ctypes.c_void_p()
            for s in self.sources
        ]
        return (ctypes.c_void_p * len(products))(
            *[ctypes.cast(product, ctypes.c_void_p) for product in products]
        )

    def builds(self) -> Iterator[Build]:
        """What is compiled before the first call: this library, and the products that did not come
        with the package.
        """
        yield (self.tier, self.text), lambda: self._loaded
        for product in {s.product for s in self.sources if s.product}:
            yield (self.tier, *product), partial(product_of, self.tier, *product)

    def entry(self, name: str) -> Entry:
        """A function of the library."""
        function, products = getattr(self._loaded, name), self._products
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        return lambda pointers, sizes: function(pointers, sizes, products, torch.get_num_threads())

    def addresses(self, name: str) -> list[int]:
        """The addresses of a function of the library and of the products that are passed to it."""
        return [
            native.address(getattr(self._loaded, name)),
            *native.counted([product or 0 for product in self._products]),
        ]


class Function:
    """A function of a library, compiled before the first call, for all sizes."""

    def __init__(self, library: Library, name: str):
        self.library, self._name = library, name

    @cached_property
    def _entry(self) -> Entry:
        return self.library.entry(self._name)

    def builds(self, device: torch.device, sizes: Sizes) -> Iterator[Build]:
        """What is compiled before a call."""
        return self.library.builds()

    def is_loaded(self, device: torch.device, sizes: Sizes) -> bool:
        """Whether `load` has nothing to do."""
        return "_entry" in self.__dict__

    def load(self, device: torch.device, sizes: Sizes) -> None:
        """Looks the function up."""
        self._entry  # noqa: B018


class Launch(Function):
    """launch(*inputs, sizes=...) -> outputs: one segment of a library."""

    def __init__(self, library: Library, i: int):
        super().__init__(library, f"run_{i}")
        self.source = library.sources[i]
        self._arrays = Arrays(
            self.source.fusion, dict.fromkeys(self.source.memory, (0, 0)), {self.source.transposed}
        )

    def __call__(self, *inputs: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        """The outputs of the segment. Raises the reference's error for bad input, RankError if a
        rank of a collective operation did not answer.
        """
        made = self._arrays.call(self._entry, inputs, sizes)
        if made is None:
            need_ranks(self.source.fusion, inputs)
            return self.source.fusion.evaluate(*inputs, sizes=sizes)  # raises
        return made


def need_ranks(fusion: Fusion, inputs: Sequence[torch.Tensor]) -> None:
    """Raises the error of a call of `dispatch` or `combine_from` that waited in vain; ranks without
    shared memory go through the process group.
    """
    for op in (op for op in fusion.ops if op.kind.role == "collective"):
        peers = inputs[fusion.inputs.index(peers_of(op))].tolist()
        if not peers[2]:
            continue
        header = (ctypes.c_ulonglong * 3).from_address(peers[PEERS + peers[0]])
        if header[2]:
            raise rank_error(header[2] >> 32, header[2] % 2**32 - 1, header[1] / 1e9, op.kind.name)


@dataclass(frozen=True)
class _Resolved:
    """What a call with known sizes needs: the sizes for C, shapes and dtypes of results, and memory
    for everything else that it makes.
    """

    numbers: bytes
    results: tuple[tuple[Any, torch.dtype], ...]
    workspace: Memory


class Arrays:
    """The arrays of a call: its inputs, then those that it makes; its outputs are separate tensors.

    lifetimes: for the arrays that it makes, in the order in which the entry takes them, the first
    and the last step that need them. transposed: the inputs that are passed with their last two
    dimensions swapped.
    """

    def __init__(
        self,
        fusion: Fusion,
        lifetimes: Mapping[Value, tuple[int, int]],
        transposed: Collection[Value | None],
    ):
        self._symbols, self._lifetimes = fusion.symbols, lifetimes
        self._made = [v for v in lifetimes if v in fusion.outputs]
        tensors = [*fusion.inputs, *self._made]
        self._outputs = [tensors.index(v) for v in fusion.outputs]
        self._swapped = [i for i, v in enumerate(fusion.inputs) if v in transposed]
        self._inner = [v for v in lifetimes if v not in self._made]
        self.numbered = [*tensors, *self._inner]
        self._order = [self.numbered.index(v) for v in (*fusion.inputs, *lifetimes)]
        self._pack = struct.Struct(f"{len(self.numbered)}P").pack
        self._remembered = Remembered[tuple[int, ...], _Resolved](_REMEMBERED)

    def call(
        self, entry: Entry, inputs: Sequence[torch.Tensor], sizes: Sizes, also: Sequence[Value] = ()
    ) -> tuple[torch.Tensor, ...] | None:
        """The outputs; None if the kernels found input for which the reference raises an error.
        also: arrays that lie in memory which the next call reuses, to be returned after them.
        """
        resolved = self._resolved(sizes)
        given = list(inputs)
        for i in self._swapped:
            given[i] = given[i].mT
        tensors = [t.contiguous() for t in given] + [
            torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in resolved.results
        ]
        held, others = memory.allocate(resolved.workspace)
        addresses = [t.data_ptr() for t in tensors] + others
        if entry(self._pack(*[addresses[i] for i in self._order]), resolved.numbers):
            return None
        made = [tensors[i] for i in self._outputs]
        for v in also:
            offset = resolved.workspace.offsets[self._inner.index(v)]
            made.append(memory.view(held, offset, *storage(v.type, sizes)))
        return tuple(made)

    def described(
        self, inputs: Sequence[torch.Tensor], sizes: Sizes
    ) -> tuple[list[int], list[int]] | None:
        """The arrays in a descriptor's format: the parts before and after its function. None if
        `call` would copy inputs.
        """
        if not native.as_stored(inputs, self._swapped):
            return None
        made = [self._outputs.index(len(inputs) + i) for i in range(len(self._made))]
        numbers = [sizes[s] for s in self._symbols]
        return native.arrays(len(inputs), made, self._resolved(sizes).workspace), [
            *native.counted(self._order),
            *native.counted(numbers),
        ]

    def workspace(self, sizes: Sizes) -> Memory:
        """The placement of the arrays that are made in addition to the outputs."""
        return memory.plan(
            [
                memory.Array(v.name, nbytes(v.type, sizes), *span)
                for v, span in ((v, self._lifetimes[v]) for v in self._inner)
            ]
        )

    def _resolved(self, sizes: Sizes) -> _Resolved:
        """Cached for as many sizes as are likely to come again soon."""
        key = tuple([sizes[s] for s in self._symbols])
        found = self._remembered.get(key)
        if found is None:
            results = (storage(v.type, sizes) for v in self._made)
            numbers = struct.pack(f"{len(key)}q", *key)
            found = self._remembered[key] = _Resolved(
                numbers, tuple(results), self.workspace(sizes)
            )
        return found
