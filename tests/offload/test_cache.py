"""Which experts are in slots: what is used comes, what is not goes, and no slot is overwritten that
a table in use names.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from fusion_moe.offload.cache import Cache

pytestmark = pytest.mark.once


@given(st.integers(1, 12), st.integers(0, 14), st.integers(1, 3), st.data())
def test_slots_are_never_shared(experts, slots, turning, data):
    cache = Cache(experts, slots, turning)
    used = set(cache.expert_map.tolist()) - {-1}
    for _ in range(6):
        uses = data.draw(st.lists(st.integers(0, 9), min_size=experts, max_size=experts))
        before = cache.expert_map.clone()
        moves = cache.learn(uses)
        for move in moves:  # into slots that the table before does not name
            assert move.slot not in before.tolist()
            assert before[move.expert] == -1
            assert before[move.evicts] >= 0
            assert int(cache.expert_map[move.expert]) == move.slot
            assert int(cache.expert_map[move.evicts]) == -1
        now = [p for p in cache.expert_map.tolist() if p >= 0]
        assert len(set(now)) == len(now) == len(used)
        assert all(p < slots for p in now)
        assert not set(now) & set(cache.free)


def test_all_experts_in_slots():
    assert Cache(4, 9).expert_map.tolist() == Cache(4, 4).expert_map.tolist() == [0, 1, 2, 3]
    assert Cache(4, 4).learn([9, 0, 0, 0]) == []
    assert Cache(4, 0).expert_map.tolist() == [-1] * 4


def test_it_follows_use_and_forgets():
    cache = Cache(6, 3, half_life=1)
    for used, want in (((4, 5), [4, 5]), ((1, 2), [1, 2])):
        uses = torch.zeros(6)
        uses[list(used)] = 50
        for _ in range(6):
            cache.learn(uses)
        assert (cache.expert_map >= 0).nonzero().flatten().tolist() == want
    assert cache.learn(uses) == []  # nothing moves for nothing


def test_small_differences_move_nothing():
    cache = Cache(4, 3)
    for uses in ([10, 10, 11, 11], [0, 0, 1, 1]):
        assert cache.learn(uses) == []
