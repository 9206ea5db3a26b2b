"""Where the arrays of a call lie in one piece of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import torch
from hypothesis import given, strategies as st

from fusion_moe.runtime.memory import ALIGNMENT, Array, allocate, plan

CPU = torch.device("cpu")


@st.composite
def arrays(draw: st.DrawFn) -> list[Array]:
    found = []
    for i in range(draw(st.integers(0, 12))):
        first = draw(st.integers(0, 6))
        found.append(
            Array(f"v{i}", draw(st.integers(0, 2000)), first, first + draw(st.integers(0, 4)))
        )
    return found


@given(arrays())
def test_no_two_arrays_of_one_step_overlap(arrays):
    memory = plan(arrays)
    placed = list(zip(memory.arrays, memory.offsets, strict=True))
    for (a, start), (b, other) in combinations(placed, 2):
        steps = set(range(a.first, a.last + 1)) & set(range(b.first, b.last + 1))
        assert (
            not steps
            or start + a.nbytes <= other
            or other + b.nbytes <= start
            or not a.nbytes
            or not b.nbytes
        )
    for array, start in placed:
        assert start >= 0
        assert start % ALIGNMENT == 0
        assert start + array.nbytes <= memory.nbytes


@given(arrays())
def test_it_takes_no_more_than_arrays_by_themselves_and_no_less_than_a_step_needs(arrays):
    whole = [-(-a.nbytes // ALIGNMENT) * ALIGNMENT for a in arrays]
    steps = (
        [n for n, a in zip(whole, arrays, strict=True) if a.first <= step <= a.last]
        for step in range(12)
    )
    assert max(map(sum, steps)) <= plan(arrays).nbytes <= sum(whole)


def test_memory_is_used_again_after_the_last_reader():
    found = plan([Array("x", 1000, 0, 1), Array("y", 500, 1, 2), Array("z", 1000, 2, 2)])
    assert (found.offsets, found.nbytes) == ((0, 1024, 0), 1536)


def test_the_smallest_gap_is_taken():
    """Between a and b is room for 1,792 bytes in step 1, between b and c for 1,280."""
    taken = [
        Array("a", 2048, 0, 2),
        Array("gap", 1792, 0, 0),
        Array("b", 1536, 0, 2),
        Array("other", 1280, 0, 0),
        Array("c", 1024, 0, 2),
    ]
    found = plan([*taken, Array("x", 1000, 1, 1)])
    assert found.offsets[-1] == found.offsets[3]
    assert found.nbytes == plan(taken).nbytes


def test_addresses():
    memory = plan([Array("x", 10, 0, 0), Array("none", 0, 0, 0), Array("y", 300, 0, 0)])
    held, addresses = allocate(memory, CPU)
    assert isinstance(held, torch.Tensor)
    assert held.nbytes >= memory.nbytes == 768
    assert [a - held.data_ptr() for a in addresses] == list(memory.offsets)
    assert allocate(plan([]), CPU)[1] == []


def test_a_thread_keeps_memory_for_small_calls():
    small, large = (plan([Array("x", nbytes, 0, 0)]) for nbytes in (1000, 2**21))
    held, first = allocate(small, CPU)
    assert allocate(small, CPU) == (held, first)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(allocate, small, CPU).result()[1] != first
    assert allocate(large, CPU)[0].nbytes == large.nbytes
