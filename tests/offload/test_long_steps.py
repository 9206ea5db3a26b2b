"""The turns of long steps: which experts they copy, and which rows they have."""

from __future__ import annotations

import pytest
import torch

from fusion_moe.offload.long_steps import Turn, turns_of


@pytest.mark.parametrize("there", [0, 3, 17, 24])
def test_each_expert_has_one_turn_and_a_slot_then(there):
    generator = torch.Generator().manual_seed(there)
    named = torch.randint(0, 50, (24,), generator=generator)
    expert_map = torch.full((24,), -1, dtype=torch.int32)
    expert_map[torch.randperm(24, generator=generator)[:there]] = torch.arange(there).int()
    turns, table = turns_of(named, expert_map, 4, there)
    missed = ((named > 0) & (expert_map < 0)).nonzero().flatten().tolist()
    assert [e for turn in turns for e in turn.copied] == missed
    assert not turns[0].copied
    assert all(len(turn.copied) <= 4 for turn in turns)
    first = 0
    for number, turn in enumerate(turns):
        of_turn = (table[0, :24] == number) & (named > 0)
        assert (turn.first, turn.rows) == (first, int(named[of_turn].sum()))
        first += turn.rows
        copied = [e for e in of_turn.nonzero().flatten().tolist() if expert_map[e] < 0]
        assert copied == turn.copied
        assert table[1, copied].tolist() == list(range(there, there + len(copied)))
    assert first == int(named.sum())
    assert torch.equal(table[1, :24][expert_map >= 0], expert_map[expert_map >= 0].long())
    assert table[:, 24].tolist() == [len(turns), -1]


def test_hits_are_spread_over_all_turns_but_the_last():
    expert_map = torch.arange(32).where(torch.arange(32) < 20, -1)
    turns, _ = turns_of(torch.full((32,), 10), expert_map, 4, 20)
    assert [len(turn.copied) for turn in turns] == [0, 4, 4, 4]
    assert [turn.rows for turn in turns] == [70, 110, 100, 40]


def test_few_sizes():
    sizes = {Turn([], 0, rows).size for rows in range(1, 70_000)}
    assert len(sizes) < 110
    for rows in range(1, 70_000):
        assert rows <= Turn([], 0, rows).size <= max(rows + 31, 1.13 * rows)
