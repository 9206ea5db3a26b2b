"""What is said of a rank for which another one waited in vain."""

from __future__ import annotations

from typing import Any

from ....errors import Error, RankError
from ....runtime.faults import FAULTS, Fault

_NO_RANK = 6  # Fault of backends/cuda/kernels/ragged.cuh
# by the phase of the kernels
_LOST = {
    1: "sent no ids of experts",
    2: "sent no rows of tokens",
    3: "sent no sums",
    4: "is in another layer, or has another number of tokens, slots or features",
    5: "has more tokens, or longer rows, than there is room for",
}


def rank_error(phase: int, rank: int, seconds: float, where: str) -> Error:
    """The error of a call that kernels of the CPU end with such a fault."""
    text = _FAULT.found.format(place=rank, value=_lost(phase, seconds))
    return _FAULT.error(text, expected=_FAULT.expected, todo=_FAULT.todo, where=where)


def _lost(phase: int, seconds: float) -> str:
    return _LOST[phase] + (f" within {seconds:.3g} s" if phase < 4 else "")


def _words(rank: int, lost: int) -> tuple[Any, Any]:
    return rank, _lost(lost >> 24, (lost & 0xFFFFFF) / 1000)


_FAULT = FAULTS[_NO_RANK] = Fault(
    "rank {place} {value}",
    "all ranks in the same call, of numbers of tokens that fit",
    RankError,
    "that call's result lacks what ranks sent, and none is called after it: restart all "
    "processes; init_process_group(timeout=...) says how long ranks wait",
    _words,
)
