"""What kernels report, told by program and stream: here a host writes the words as kernels do."""

from __future__ import annotations

import ctypes

import pytest

from fusion_moe import synchronize
from fusion_moe.errors import GroupsError
from fusion_moe.runtime import cuda, faults
from fusion_moe.runtime.faults import Faults

BAD_END, BAD_ID = 1, 2


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_words", faults._Words())
    monkeypatch.setattr(cuda, "capturing", lambda: False)


def report(address: int, fault: int, place: int, value: int) -> None:
    """As `report` of ragged.cuh."""
    ctypes.c_ulonglong.from_address(address).value = fault << 56 | place << 32 | value & 0xFFFFFFFF


def test_a_call_raises_what_its_program_found_on_its_stream() -> None:
    one, other = Faults("`one`"), Faults("`other`")
    word = one.word(0, 0)
    assert len({word, one.word(0, 7), one.word(1, 0), other.word(0, 0)}) == 4
    assert one.word(0, 0) == word
    report(word, BAD_ID, 5, -2)
    for faultless in (one.word(0, 7), one.word(1, 0), other.word(0, 0)):
        assert faultless
    with pytest.raises(GroupsError) as caught:
        one.word(0, 0)
    assert str(caught.value).startswith(
        "cuda: ids.flatten()[5] = -2 is out of range, in an earlier call of `one` on cuda:0, "
        "stream 0x0, first called at test_faults.py:"
    )
    assert one.word(0, 0) == word  # said once


def test_graphs_have_a_word_of_their_own_which_any_stream_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = Faults("`one`"), Faults("`other`")
    eager = one.word(0, 0)
    monkeypatch.setattr(cuda, "capturing", lambda: True)
    captured = one.word(0, 9)
    assert captured == one.word(0, 3) != eager
    report(captured, BAD_END, 1, 400)
    assert one.word(0, 9) == captured  # nothing is raised inside of a capture
    monkeypatch.setattr(cuda, "capturing", lambda: False)
    assert other.word(0, 0) != one.word(1, 0)
    with pytest.raises(
        GroupsError,
        match=r"offs\[1\] = 400, in an earlier call of `one` on "
        r"cuda:0, in a CUDA graph",
    ):
        one.word(0, 7)


def test_synchronize_raises_what_all_programs_found() -> None:
    synchronize()
    for number, title in enumerate(("`one`", "`two`", "`three`")):
        report(Faults(title).word(0, number), BAD_ID, number, 99)
    with pytest.raises(GroupsError) as caught:
        synchronize()
    assert [
        f"ids.flatten()[{n}] = 99 is out of range, in an earlier call of {t}" in str(caught.value)
        for n, t in enumerate(("`one`", "`two`", "`three`"))
    ] == [True] * 3
    synchronize()


def test_more_words_than_are_pinned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_WORDS", 2)
    found = [Faults("`one`").word(0, 0) for _ in range(5)]
    assert len(set(found)) == 5
    report(found[0], BAD_ID, 0, 9)
    with pytest.raises(GroupsError, match="= 9"):
        synchronize()


def test_the_table_of_a_device() -> None:
    one = Faults("`one`")
    first = one.word(0, 0)
    table = (ctypes.c_ulonglong * 8).from_address(one.table(0))
    assert list(table[1:4]) == [1, 0, first]
    second = one.word(0, 7)
    one.word(1, 9)
    assert list(table[1:6]) == [2, 0, first, 7, second]
    assert table[0] not in (0, first, second)
    assert one.table(0) == ctypes.addressof(table)
