"""What a run does, noted by its launches: `fusion_moe.record` sets a recorder, for all threads.

A program that Python launches tells the recorder the ends of its groups, which lie in the memory of
the call; what C++ launches is counted there (counts.py). Compilers say how long they took.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .. import options

if TYPE_CHECKING:
    from torch import Tensor


class Recorder(Protocol):
    """Who is told of launches and compilations while a run is recorded."""

    def launched(
        self,
        program: Any,
        tensors: Sequence[Tensor],
        sizes: Mapping[str, int],
        ends: Tensor | None,
    ) -> None:
        """Called after Python has launched a `program.Program` on these inputs. ends: i32[G], of
        the rows of its first product, valid until the next call; None if they are not in memory.
        """

    def compiled(self, name: str, start: float, seconds: float) -> None:
        """Called after a compilation. start: by time.time(); seconds: how long it took."""


active: Recorder | None = None


def compiled(name: str, to: str, seconds: float) -> None:
    """Called after a compiler has made something, for an ISA level or an architecture."""
    options.log("compile", "%s %s: %.1f s", name, to, seconds)
    if active is not None:
        active.compiled(name, time.time() - seconds, seconds)
