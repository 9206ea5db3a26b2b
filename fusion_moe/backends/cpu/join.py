"""All kernels of a program in one library, with one call for all of them: no Python in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir import Fusion, Value
from ...runtime.kernel import Kernel
from ...runtime.launch_plan import LaunchPlan
from ...schedule.segment import Segment
from .launch import Arrays, Function, Launch, Library, Sizes
from .segment import Source
from .unit import Step


def join(fusion: Fusion, kernels: Sequence[Kernel]) -> tuple[tuple[Kernel, ...], Joined | None]:
    """The kernels, with those in C++ as parts of one library, and the call for all of them if all
    are in C++.
    """
    ours = {i: k.launch for i, k in enumerate(kernels) if isinstance(k.launch, Launch)}
    if not ours:
        return tuple(kernels), None
    sources = [launch.source for launch in ours.values()]
    whole = None
    if len(ours) == len(kernels):
        program = _Program(fusion, [k.segment for k in kernels], sources)
        whole = program if program.fits else None
    isa_level = next(iter(ours.values())).library.isa_level
    library = Library(sources, isa_level, whole.steps() if whole else ())
    part = {i: Launch(library, n) for n, i in enumerate(ours)}
    joined = tuple(replace(k, launch=part[i]) if i in part else k for i, k in enumerate(kernels))
    return joined, Joined(library, whole) if whole else None


class Joined(Function):
    """All kernels of a program in one call of C++."""

    def __init__(self, library: Library, program: _Program):
        arrays = Arrays(program.fusion, program.lifetimes, program.transposed)
        super().__init__(library, "run", arrays)

    def number(self, v: Value) -> int:
        """Which of a plan's arrays a value is."""
        return self._arrays.numbered.index(v)

    def plan_in(self, sizes: Sizes) -> LaunchPlan:
        """The plan of such a call in the parallel region of a thread pool (unit.py)."""
        return self._arrays.plan(self.library.entry("run_in"), sizes)


class _Program:
    """The arrays of a program, numbered: its inputs, then those that it makes, each with the first
    and last segment that needs it.
    """

    def __init__(self, fusion: Fusion, segments: Sequence[Segment], sources: Sequence[Source]):
        self.fusion, self._sources = fusion, sources
        self._names = [_names(s, source) for s, source in zip(segments, sources, strict=True)]
        self.lifetimes: dict[Value, tuple[int, int]] = {}
        for i, names in enumerate(self._names):
            results = (v for v in names.values() if v not in fusion.inputs)
            self.lifetimes |= {v: (self.lifetimes.get(v, (i, i))[0], i) for v in results}
        last = len(self._names) - 1  # who records a run reads the ends of groups after it
        self.lifetimes |= {v: (i, last) for v, (i, _) in self.lifetimes.items() if v.type.ends}
        self._place = {v: i for i, v in enumerate((*fusion.inputs, *self.lifetimes))}

    @property
    def transposed(self) -> set[Value]:
        """The values that some segment takes with their last two dimensions swapped."""
        return {
            names[s.transposed]
            for s, names in zip(self._sources, self._names, strict=True)
            if s.transposed
        }

    @property
    def fits(self) -> bool:
        """Whether the outputs are separate arrays, and all segments take each array in the order of
        dimensions in which it is passed.
        """
        if not set(self.fusion.outputs).isdisjoint(self.fusion.inputs) or len(
            set(self.fusion.outputs)
        ) < len(self.fusion.outputs):
            return False
        plainly = {
            names[v]
            for s, names in zip(self._sources, self._names, strict=True)
            for v in s.fusion.inputs
            if v is not s.transposed
        }
        return self.transposed.issubset(self.fusion.inputs) and self.transposed.isdisjoint(
            (*plainly, *self.fusion.outputs)
        )

    def steps(self) -> list[Step]:
        """The array and size numbers of each segment."""
        return [self._step(s, names) for s, names in zip(self._sources, self._names, strict=True)]

    def _step(self, source: Source, names: Mapping[Value, Value]) -> Step:
        arrays = [self._place[names[v]] for v in (*source.fusion.inputs, *source.memory)]
        return Step(arrays, [self.fusion.symbols.index(s) for s in source.fusion.symbols])


def _names(segment: Segment, source: Source) -> dict[Value, Value]:
    """The program's values for those in a segment's memory: contracting may have made new inputs
    and outputs.
    """
    mine = (*source.fusion.inputs, *source.fusion.outputs)
    whole = (*segment.fusion.inputs, *segment.fusion.outputs)
    return dict(zip(mine, whole, strict=True)) | {v: v for v in source.memory if v not in mine}
