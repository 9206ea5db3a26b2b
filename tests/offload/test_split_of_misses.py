"""Which misses are copied and which computed: a pure function that is never much worse than the
better pure way, by its own model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fusion_moe.offload.split import Constants, Split, split

pytestmark = pytest.mark.once
US = 1000


@st.composite
def machines(draw) -> Constants:
    """Whatever is faster by how much; beside each other both are at most as fast as alone."""
    cpu, copy = draw(st.integers(1, 10**7)), draw(st.integers(1, 10**7))
    slower = st.integers(0, 10**6)
    return Constants(
        cpu_start=draw(st.integers(0, 10**6)),
        cpu_expert=cpu,
        cpu_expert_beside=cpu + draw(slower),
        cpu_row=draw(st.integers(0, 10**5)),
        copy_start=draw(st.integers(0, 10**6)),
        copy_expert=copy,
        copy_expert_beside=copy + draw(slower),
        gpu_expert=draw(st.integers(0, 10**5)),
    )


THERE = st.integers(0, 40)
MISSES = st.dictionaries(st.integers(0, 255), st.integers(1, 500), max_size=40)


def model(
    rows: dict[int, int], copied: tuple[int, ...], c: Constants, room: int, there: int
) -> float:
    """The same in other words: two jobs that are done at one speed while both run, at another
    afterwards, and products after the copies. A tenth of a nanosecond at a time would give the
    same.
    """
    computed = [n for e, n in rows.items() if e not in copied]
    starts = -(-len(copied) // room) * c.copy_start if copied else 0
    cpu = [c.cpu_expert + (n - 1) * c.cpu_row for n in computed]
    cpu_beside = [c.cpu_expert_beside + (n - 1) * c.cpu_row for n in computed]
    copy, products = len(copied) * c.copy_expert, (there + len(copied)) * c.gpu_expert
    if not copied:
        return c.cpu_start + sum(cpu) if computed else 0
    if not computed:
        return starts + copy + products
    a = c.cpu_start + sum(cpu_beside)
    b = starts + len(copied) * c.copy_expert_beside
    first = min(a, b)
    cpu_ends = first + (a - first) * sum(cpu) / sum(cpu_beside)
    return max(cpu_ends, first + (b - first) * (c.copy_expert / c.copy_expert_beside) + products)


@given(MISSES, machines(), st.integers(1, 8), st.none() | st.integers(0, 8), THERE)
def test_never_worse_than_a_pure_way(rows, constants, room, limit, there):
    found = split(rows, constants, room, limit, there)
    assert sorted((*found.copied, *found.computed)) == sorted(rows)
    most = len(rows) if limit is None else limit
    assert len(found.copied) <= most
    everything = tuple(rows)
    pure = [model(rows, (), constants, room, there)]
    if len(rows) <= most and rows:
        pure.append(model(rows, everything, constants, room, there))
        assert found.all_copied == pure[1]
    assert found.all_computed == pure[0]
    assert found.time <= min(pure)
    assert abs(model(rows, found.copied, constants, room, there) - found.time) <= 1
    if found.copied and found.computed:  # a mix, which must be worth it
        assert found.time <= min(pure) * 0.95 + 1


@given(MISSES, machines(), st.integers(1, 8))
def test_the_same_whatever_the_order_of_misses(rows, constants, room):
    backwards = dict(reversed(rows.items()))
    assert split(rows, constants, room) == split(backwards, constants, room)


@given(MISSES, machines(), st.integers(1, 8), THERE)
def test_the_best_number_of_copies(rows, constants, room, there):
    """No other number of copies is more than 5 % better."""
    found = split(rows, constants, room, there=there)
    order = sorted(rows, key=lambda e: (-rows[e], e))
    assert found.copied + found.computed == tuple(order)
    ways = (tuple(order[:k]) for k in range(len(order) + 1))
    best = min(model(rows, way, constants, room, there) for way in ways)
    assert found.time * 0.95 <= best + 1


LAYER = Constants(  # about DeepSeek-V3's experts on an H100's machine, in nanoseconds
    cpu_start=10 * US,
    cpu_expert=250 * US,
    cpu_expert_beside=330 * US,
    cpu_row=20 * US,
    copy_start=10 * US,
    copy_expert=450 * US,
    copy_expert_beside=450 * US,
    gpu_expert=9 * US,
)


def test_decisions_that_one_can_check():
    assert split({}, LAYER, 2) == Split((), (), 0, 0, 0)
    one = split({7: 1}, LAYER, 2)  # 260 us on the CPU, 460 copied
    assert (one.copied, one.computed, one.time) == ((), (7,), 260 * US)
    many_rows = split({7: 100}, LAYER, 2)  # 1,980 us of further rows
    assert (many_rows.copied, many_rows.time) == ((7,), 469 * US)
    mixed = split({1: 1, 2: 1, 3: 30, 4: 1}, LAYER, 4)  # that with many rows
    assert (mixed.copied, mixed.computed) == ((3,), (1, 2, 4))
    assert str(mixed).startswith("1 copied [3], 3 computed [1, 2, 4]: 869.1 us by the model")
    assert split({1: 1, 2: 1, 3: 30, 4: 1}, LAYER, 4, limit=0).copied == ()
    assert split({1: 1, 2: 1, 3: 30, 4: 1}, LAYER, 0).copied == ()  # no room for copies
    few = {1: 6, 2: 5, 3: 5}  # the GPU's products wait for a copy: of 60 experts, too long
    assert (split(few, LAYER, 4).copied, split(few, LAYER, 4, there=60).copied) == ((1,), ())
    slow = replace(LAYER, cpu_expert=10**7, cpu_expert_beside=10**7)
    assert split(dict.fromkeys(range(5), 1), slow, 2).time == 3 * 10 * US + 5 * 459 * US
