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

from ...ir import Fusion, Value, nbytes, storage
from ...runtime import build, memory, native
from ...runtime.handles import handles_of
from ...runtime.launch_plan import LaunchPlan, counted
from ...runtime.memory import Memory
from ...runtime.precompile import Build
from ...runtime.remembered import Remembered
from .prebuilt import product_of
from .readers import KERNELS
from .segment import Source
from .unit import Step, text

_REMEMBERED = 256  # how many sizes of calls are kept
Sizes = Mapping[str, int]
Entry = tuple[Any, Any]  # a function of a library, and the products that are passed to it


class Library:
    """The library of segments, with the grouped products of an ISA level. Built, or found in the
    cache, at the first call.

    steps: how a program runs all of them, if its entry "run" is needed.
    """

    def __init__(self, sources: Sequence[Source], isa_level: str, steps: Sequence[Step] = ()):
        self.sources, self.isa_level, self._steps = tuple(sources), isa_level, steps

    @cached_property
    def text(self) -> str:
        """The C++ source of the library."""
        return text(self.sources, self._steps)

    @cached_property
    def _loaded(self) -> ctypes.CDLL:
        folders = [KERNELS, *dict.fromkeys(f for s in self.sources for f in s.folders)]
        return build.load(self.text, name="segments", isa_level=self.isa_level, include=folders)

    @cached_property
    def _products(self) -> Any:
        """The function of each segment's grouped product; null for a segment without one."""
        products = [
            product_of(self.isa_level, *s.product).product if s.product else ctypes.c_void_p()
            for s in self.sources
        ]
        return (ctypes.c_void_p * len(products))(
            *[ctypes.cast(product, ctypes.c_void_p) for product in products]
        )

    def builds(self) -> Iterator[Build]:
        """What is compiled before the first call: this library, and the products that did not come
        with the package.
        """
        yield (self.isa_level, self.text), lambda: self._loaded
        for product in {s.product for s in self.sources if s.product}:
            yield (self.isa_level, *product), partial(product_of, self.isa_level, *product)

    def entry(self, name: str) -> Entry:
        """A function of the loaded library by its name, and the products that are passed to it."""
        function = getattr(self._loaded, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        return function, self._products


class Function:
    """A function of a library, compiled before the first call, for all sizes."""

    def __init__(self, library: Library, name: str, arrays: Arrays):
        self.library, self._name, self._arrays = library, name, arrays
        self._plans = Remembered[tuple[int, ...], LaunchPlan](_REMEMBERED)

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
        """Loads the library, and looks the function up in it."""
        self._entry  # noqa: B018

    def plan(self, device: torch.device, sizes: Sizes) -> LaunchPlan:
        """What a call launches. Cached for as many sizes as are likely to come again soon."""
        key = tuple([sizes[s] for s in self._arrays.symbols])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._arrays.plan(self._entry, sizes)
        return plan


class Launch(Function):
    """launch(*inputs, sizes=...) -> outputs: one segment of a library."""

    def __init__(self, library: Library, i: int):
        self.source = source = library.sources[i]
        inner = dict.fromkeys(source.memory, (0, 0))
        arrays = Arrays(source.fusion, inner, {source.transposed})
        super().__init__(library, f"run_{i}", arrays)

    def __call__(self, *inputs: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        """The outputs of the segment. Raises the error of bad input, which is the reference's if no
        operation has one of its own.
        """
        result = self.plan(torch.device("cpu"), sizes).run(inputs)
        if result is None:
            for handle in handles_of(self.source.fusion):
                handle.check(inputs[handle.input])
            return self.source.fusion.evaluate(*inputs, sizes=sizes)  # raises
        return tuple(result)


@dataclass(frozen=True)
class Launches:
    """A call of a library's function. order: its arrays among those of the plan; sizes: for C."""

    entry: Entry
    order: tuple[int, ...]
    sizes: tuple[int, ...]

    def readable(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors as the function reads them: contiguous."""
        return [t.contiguous() for t in tensors]

    def run(self, addresses: Sequence[int]) -> bool:
        """Whether it ran; if not, it found input for which the reference raises an error."""
        function, products = self.entry
        pack, sizes = self._packed
        pointers = pack(*[addresses[i] for i in self.order])
        return not function(pointers, sizes, products, torch.get_num_threads())

    @cached_property
    def _packed(self) -> tuple[Callable[..., bytes], bytes]:
        """What packs addresses, and the sizes."""
        sizes = struct.pack(f"{len(self.sizes)}q", *self.sizes)
        return struct.Struct(f"{len(self.order)}P").pack, sizes

    def numbers(self) -> list[int]:
        """The call in the numbers that native.cpp reads: function, products, order and sizes."""
        function, products = self.entry
        return [
            native.address(function),
            *counted([product or 0 for product in products]),
            *counted(self.order),
            *counted(self.sizes),
        ]


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
        self.symbols, self._lifetimes = fusion.symbols, lifetimes
        self._made = [v for v in lifetimes if v in fusion.outputs]
        tensors = [*fusion.inputs, *self._made]
        self._outputs = tuple([tensors.index(v) for v in fusion.outputs])
        self._swapped = tuple([i for i, v in enumerate(fusion.inputs) if v in transposed])
        self._inner = [v for v in lifetimes if v not in self._made]
        self.numbered = [*tensors, *self._inner]
        self._order = tuple([self.numbered.index(v) for v in (*fusion.inputs, *lifetimes)])

    def plan(self, entry: Entry, sizes: Sizes) -> LaunchPlan:
        """What a call of a function launches."""
        return LaunchPlan(
            torch.device("cpu"),
            self._swapped,
            tuple([storage(v.type, sizes) for v in self._made]),
            self._outputs,
            self._workspace(sizes),
            Launches(entry, self._order, tuple([sizes[s] for s in self.symbols])),
        )

    def _workspace(self, sizes: Sizes) -> Memory:
        """The placement of the arrays that are made in addition to the outputs."""
        return memory.plan(
            [
                memory.Array(v.name, nbytes(v.type, sizes), *span)
                for v, span in ((v, self._lifetimes[v]) for v in self._inner)
            ]
        )
