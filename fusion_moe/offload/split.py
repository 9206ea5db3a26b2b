"""Which missed experts of a step are copied to the GPU, and which the CPU computes: a pure function
of how many rows each one has, and of constants of the machine.

All numbers are integers, times nanoseconds: a kernel that decides on the GPU decides the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GAIN = 20  # a mix must be better than both pure ways by one part in so many: its model errs more


@dataclass(frozen=True)
class Constants:
    """What a step's parts take for experts of one layer, in nanoseconds.

    cpu_start: to hand rows over to the CPU and to wait for them; cpu_expert: the CPU's products of
    an expert with a row; cpu_row: with each further row. copy_start: to begin copies, and products
    after them; copy_expert: an expert is copied; gpu_expert: the GPU's products of an expert, which
    wait for all copies of a step. beside: while both the CPU reads and copies run.
    """

    cpu_start: int
    cpu_expert: int
    cpu_expert_beside: int
    cpu_row: int
    copy_start: int
    copy_expert: int
    copy_expert_beside: int
    gpu_expert: int

    def computed(self, rows: int, beside: bool = False) -> int:
        """Nanoseconds that the CPU takes for one expert with this number of rows, at least 1.
        beside: while experts are copied to the GPU, when memory is slower.
        """
        return (self.cpu_expert_beside if beside else self.cpu_expert) + (rows - 1) * self.cpu_row


@dataclass(frozen=True)
class Split:
    """A decision: the experts that are copied, in this order, and those that the CPU computes.
    time: what it takes by the model, in nanoseconds, and what both pure ways would.
    """

    copied: tuple[int, ...]
    computed: tuple[int, ...]
    time: int
    all_computed: int
    all_copied: int

    def __str__(self) -> str:
        computed, copied = self.all_computed / 1000, self.all_copied / 1000
        return (
            f"{len(self.copied)} copied {list(self.copied)}, {len(self.computed)} computed "
            f"{list(self.computed)}: {self.time / 1000:.1f} us by the model (all on the CPU "
            f"{computed:.1f}, all copied {copied:.1f})"
        )


def split(
    rows: Mapping[int, int],
    constants: Constants,
    room: int,
    limit: int | None = None,
    there: int = 0,
) -> Split:
    """Divides missed experts. rows: how many rows each has, 1 or more; there: how many others the
    step names.

    room: how many copies fit on the GPU at once; more take several turns. limit: how many may be
    copied at all, at most; None: all. Experts with many rows are copied first, which cost the CPU
    most, and of equal ones those with small numbers.
    """
    order = sorted(rows, key=lambda expert: (-rows[expert], expert))
    most = min(len(order), len(order) if limit is None else limit, len(order) if room else 0)
    times = _times([rows[expert] for expert in order], constants, room, most, there)
    computed = times[0]
    copied = sum(_copied(len(order), constants, max(room, 1), there)) if order else 0
    best = len(order) if most == len(order) and copied < computed else 0
    pure = copied if best else computed
    mixed = range(1, min(most + 1, len(order)))
    if mixed and times[k := min(mixed, key=lambda k: (times[k], k))] + pure // _GAIN <= pure:
        best = k
    time = times[best]
    return Split((*order[:best],), (*order[best:],), time, computed, copied)


def _times(rows: list[int], constants: Constants, room: int, most: int, there: int) -> list[int]:
    """The time of copying the first k of experts with so many rows, for k = 0 .. most."""
    alone, beside = [0], [0]  # the CPU's, of the last ones
    for n in reversed(rows):
        alone.append(alone[-1] + constants.computed(n))
        beside.append(beside[-1] + constants.computed(n, beside=True))
    count = len(rows)
    results = [constants.cpu_start + alone[count] if rows else 0]
    for k in range(1, most + 1):
        gpu = _copied(k, constants, room, there)
        results.append(
            sum(gpu)
            if k == count
            else _both(k, alone[count - k], beside[count - k], gpu, constants)
        )
    return results


def _copied(count: int, constants: Constants, room: int, there: int) -> tuple[int, int]:
    """The times of copies and of the GPU's products."""
    copies = -(-count // room) * constants.copy_start + count * constants.copy_expert
    return copies, (there + count) * constants.gpu_expert


def _both(k: int, alone: int, beside: int, gpu: tuple[int, int], constants: Constants) -> int:
    """Two sides that start together slow each other down until the CPU or the copies end."""
    copies, products = gpu
    slow = copies + k * (constants.copy_expert_beside - constants.copy_expert)
    cpu = constants.cpu_start + beside
    if cpu <= slow:
        rest = (slow - cpu) * constants.copy_expert // max(constants.copy_expert_beside, 1)
        return cpu + rest + products
    return slow + max((cpu - slow) * alone // max(beside, 1), products)
