"""Many programs in one library, so that the compiler is called once. The programs are what the
pipeline makes of each; only who has their functions changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

from fusion_moe.backends.cpu.launch import Entry, Launch, Library
from fusion_moe.backends.cpu.readers import KERNELS
from fusion_moe.backends.cpu.unit import _call, _entry, text
from fusion_moe.runtime import build
from fusion_moe.runtime.program import Program

FLAGS = ("-O0", "-w")


class Batch(Library):
    """The library of several programs for one tier, whose own libraries are never built."""

    def __init__(self, programs: Sequence[Program], tier: str, flags: Sequence[str] = FLAGS):
        self.flags, self._wholes = tuple(flags), list[tuple[int, Library]]()
        sources = []
        for library in filter(None, map(_library_of, programs)):
            library.entry = _Entries(self, len(self._wholes), len(sources))  # type: ignore[method-assign]
            self._wholes.append((len(sources), library))
            sources += library.sources
        super().__init__(sources, tier)

    @cached_property
    def text(self) -> str:
        """Its C++: all segments, and for each program that has it the call of all of its own."""
        wholes = [
            _whole(i, first, library)
            for i, (first, library) in enumerate(self._wholes)
            if library._steps
        ]
        return "\n".join([text(self.sources), *wholes])

    @cached_property
    def _loaded(self) -> ctypes.CDLL:
        return build.load(
            self.text, name="fuzzed", isa_level=self.isa_level, include=[KERNELS], flags=self.flags
        )


class _Entries:
    """The functions of one program of a batch, by the names that they would have in a library of
    its own.
    """

    def __init__(self, batch: Batch, program: int, first: int):
        self.batch, self.program, self.first = batch, program, first

    def __call__(self, name: str) -> Entry:
        return self.batch.entry(
            f"program_{self.program}"
            if name == "run"
            else f"run_{self.first + int(name.removeprefix('run_'))}"
        )


def _library_of(program: Program) -> Library | None:
    """The library that all kernels of a program in C++ have in common."""
    return next((k.launch.library for k in program.kernels if isinstance(k.launch, Launch)), None)


def _whole(i: int, first: int, library: Library) -> str:
    calls = [line for n, step in enumerate(library._steps) for line in _call(first + n, step)]
    return _entry(f"program_{i}", [*calls, "return GOOD;"])
