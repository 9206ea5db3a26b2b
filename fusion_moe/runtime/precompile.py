"""Compiling before serving: calls are recorded instead of run, and then all kernels that they need
are compiled at once.

    with preparing():
        model(tokens)          # launches none of our kernels; programs return zeros
    model(tokens)              # compiles nothing
    with preparing("all"):
        model(tokens)          # the same for these and all other counts of tokens

A call is recorded with its sizes, from which a backend knows the kernels. The kernels of all
recorded calls are compiled in parallel, each once, and loaded. Calls during a CUDA graph capture
are not recorded: they must be captured as they run.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch

from .. import options
from ..errors import need_one_of
from ..messages.progress import progress
from .host_memory.bandwidth import cpus

Sizes = Mapping[str, int]
# up to the first, all counts are tried; the second is the highest one
_EACH, _MOST_UNITS = 64, 2**17
_Sizes = tuple[tuple[str, int], ...]  # sizes in a comparable form
# a key, equal for equal work, and a function that does the work in any thread
Build = tuple[Hashable, Callable[[], object]]


@runtime_checkable
class Compiled(Hashable, Protocol):
    """A launch that is compiled before it runs."""

    def builds(self, device: torch.device, sizes: Sizes) -> Iterable[Build]:
        """What a call with these sizes has to compile."""

    def is_loaded(self, device: torch.device, sizes: Sizes) -> bool:
        """Whether nothing is left to do for such a call."""

    def load(self, device: torch.device, sizes: Sizes) -> None:
        """Everything that such a call does before it launches, after everything is compiled."""


@dataclass(frozen=True)
class Noted:
    """A recorded call of launches."""

    launches: tuple[Compiled, ...]
    device: torch.device
    sizes: _Sizes


NOTED: contextvars.ContextVar[dict[Noted, None] | None] = contextvars.ContextVar(
    "fusion_moe_noted", default=None
)


@contextlib.contextmanager
def preparing(sizes: str = "called") -> Iterator[Collection[Noted]]:
    """Compiles the kernels that the calls inside the block need: at its end, in parallel, with
    progress on stderr. Yields the calls.

    Inside, programs launch nothing and return zeros, so results are meaningless. A backward runs in
    the thread that calls it, so its kernels are compiled too. If the block raises, nothing is
    compiled.

    Args:
        sizes: "called": the sizes of the calls; "all": these, and all others in the same
            proportions, up to 131,072 times as large, as far as a bisection finds other kernels.

    Raises:
        OptionError: for any other value of `sizes`.
        BuildError: for a kernel that does not compile.
    """
    need_one_of("sizes", sizes, ("called", "all"), where="preparing")
    noted: dict[Noted, None] = {}
    # autograd's threads do not see what is noted
    with options.during(NOTED, noted), torch.autograd.set_multithreading_enabled(False):
        yield noted
    compile_all(_of_all_sizes(noted) if sizes == "all" else noted)


def note(launches: tuple[Compiled, ...], device: torch.device, sizes: Sizes) -> bool:
    """Records a call if calls are being recorded; returns whether they are."""
    noted = NOTED.get()
    if noted is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    noted[Noted(launches, device, tuple(sizes.items()))] = None
    return True


def compile_all(calls: Iterable[Noted]) -> None:
    """Compiles and loads the kernels that calls need, and this process has not loaded yet."""
    new = [
        (launch, c.device, dict(c.sizes))
        for c in calls
        for launch in c.launches
        if not launch.is_loaded(c.device, dict(c.sizes))
    ]
    run_builds(build for launch, device, sizes in new for build in launch.builds(device, sizes))
    for launch, device, sizes in new:
        launch.load(device, sizes)


def builds_of_other_sizes(launch: Compiled, device: torch.device, sizes: Sizes) -> list[Build]:
    """What calls of any sizes in these proportions have to compile beyond what these sizes need,
    each once: of few tokens first, which take little and usually follow; then of the most, which
    take longest.
    """
    units = _units(tuple(sizes.items()))
    counts = _counts(launch, device, units, options.current()) if units else []
    few = [n for n in counts if n <= _EACH]
    ordered = [*few, *reversed(counts[len(few) :])]
    builds = dict(b for n in ordered for b in launch.builds(device, dict(_scaled(units, n))))
    own = {key for key, _ in launch.builds(device, sizes)} if units else ()
    return [(key, build) for key, build in builds.items() if key not in own]


def _of_all_sizes(calls: Iterable[Noted]) -> list[Noted]:
    """The calls, and calls of other sizes: one for each set of kernels that such calls need."""
    results = list(calls)
    for launches, device, units in dict.fromkeys(
        (c.launches, c.device, _units(c.sizes)) for c in results
    ):
        for launch in launches if units else ():
            results += [
                Noted((launch,), device, _scaled(units, n))
                for n in _counts(launch, device, units, options.current())
            ]
    return results


@lru_cache(maxsize=1024)
def _counts(
    launch: Compiled, device: torch.device, units: _Sizes, under: options.Options
) -> list[int]:
    """Multiples of `units`, one for each set of kernels. Layers of equal sizes share a launch: they
    are asked about once.
    """

    def needed(n: int) -> Hashable:
        return frozenset(key for key, _ in launch.builds(device, dict(_scaled(units, n))))

    return _one_for_each(needed)


def _scaled(units: _Sizes, n: int) -> _Sizes:
    return tuple((symbol, n * unit) for symbol, unit in units)


def _units(sizes: _Sizes) -> _Sizes:
    """The smallest sizes in the same proportions; () if there are no sizes or all are zero."""
    unit = math.gcd(*(n for _, n in sizes))
    return tuple((symbol, n // unit) for symbol, n in sizes) if unit else ()


def _one_for_each(needed: Callable[[int], Hashable]) -> list[int]:
    """A count for each value of `needed` that is found: tries small counts, counts that grow by 2
    %, and bisects where two differ.
    """
    remembered = cache(needed)
    tried = [*range(1, _EACH + 1)]
    while tried[-1] < _MOST_UNITS:
        tried.append(min(tried[-1] * 51 // 50 + 1, _MOST_UNITS))
    waiting = list(pairwise(tried))
    results = {remembered(n): n for n in reversed(tried)}
    while waiting:
        low, high = waiting.pop()
        if high - low > 1 and remembered(low) != remembered(high):
            middle = (low + high) // 2
            results.setdefault(remembered(middle), middle)
            waiting += [(low, middle), (middle, high)]
    return sorted(results.values())


def run_builds(builds: Iterable[Build]) -> dict[Hashable, Any]:
    """The results of builds, by key: each build is run once, in parallel, under the options in
    force.

    Raises the first error and skips builds that have not started by then. The last builds start
    first: those of the highest token counts, whose kernels take longest to compile.
    """
    wanted = dict(reversed(dict(builds).items()))
    with ThreadPoolExecutor(max(1, min(len(wanted), cpus()))) as pool:
        results: dict[Future[Any], Hashable] = {
            pool.submit(contextvars.copy_context().run, build): key for key, build in wanted.items()
        }
        try:
            return {
                results[done]: done.result()
                for done in progress(as_completed(results), "compiling kernels", len(results))
            }
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
