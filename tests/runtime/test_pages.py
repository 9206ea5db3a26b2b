"""Tensors on large pages: what they are, when they are none, and how many pages were obtained."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_moe.runtime.host_memory import pages

PAGE = pages.PAGE
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
setting = _SETTING.read_text() if _SETTING.exists() else "[never]"
needs_advice = pytest.mark.skipif(
    "[madvise]" not in setting,
    reason=f"large pages are not given by advice alone: {setting.strip()}",
)


def is_advised(address: int) -> bool:
    """Whether memory with advice lies there. Without may be anybody's that was mapped since."""
    for mapping in re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.M):
        first, end = (int(x, 16) for x in (mapping.partition(" ")[0] or "0-0").split("-"))
        if first <= address < end:
            return re.search(r"^VmFlags:.* hg\b", mapping, re.M) is not None
    return False


def mapped_files(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


def skip_without_a_large_page() -> None:
    """Where advice is all that a mapping has, and memory is in pieces."""
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    if not pages.obtained(torch.frombuffer(memory, dtype=torch.uint8).fill_(1)):
        pytest.skip("the system has no large page left")


@pytest.mark.parametrize("shape", [(PAGE // 4,), (3, 7, PAGE // 8), (5, PAGE // 4 + 1)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16])
def test_empty_is_a_tensor_like_any_other(shape, dtype):
    t = pages.empty(shape, dtype)
    assert (t.shape, t.dtype, t.device.type, t.is_contiguous()) == (
        torch.Size(shape),
        dtype,
        "cpu",
        True,
    )
    assert t.untyped_storage().nbytes() == t.nbytes
    t.view(torch.uint8).fill_(3)
    assert torch.equal(t.clone().view(torch.uint8), torch.full_like(t.view(torch.uint8), 3))


@needs_advice
def test_what_is_advised_starts_at_a_page_and_gets_pages():
    t = pages.empty((8 * PAGE + 12345,), torch.uint8)
    assert t.data_ptr() % PAGE == 0
    assert pages.obtained(t) == 0  # before it is written
    t.fill_(1)
    skip_without_a_large_page()
    assert 0 < pages.obtained(t) <= 8 * PAGE  # the rest would take a page for a part of one


def on_small_pages(size: int) -> torch.Tensor:
    """u8[size], written. Memory of malloc may have large pages: NumPy gives advice for its arrays,
    and the next owner keeps it.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


@needs_advice
def test_pages_are_counted_for_the_tensors_that_lie_on_them():
    large, plain = pages.empty((4 * PAGE,), torch.uint8).fill_(1), on_small_pages(4 * PAGE)
    found = pages.obtained(large)
    skip_without_a_large_page()
    assert found > 0
    assert pages.obtained(plain) == 0
    assert pages.obtained(large, plain) == found
    assert pages.obtained(large[:PAGE]) == min(PAGE, found)


@needs_advice
def test_memory_goes_with_the_last_tensor_that_needs_it():
    t = pages.empty((2 * PAGE,), torch.uint8)
    address, part = t.data_ptr(), t[5:]
    del t
    part.fill_(1)
    assert is_advised(address)
    del part
    assert not is_advised(address)


def test_without_advice_it_is_torchs(monkeypatch):
    monkeypatch.setattr(pages, "_TAKES_ADVICE", False)
    monkeypatch.setattr(pages, "_mapped", None)  # is not called
    assert pages.empty((PAGE,), torch.uint8).fill_(1).sum() == PAGE


def test_without_memory_torch_says_so(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert pages.empty((PAGE,), torch.uint8).shape == (PAGE,)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        pages.empty((2**55,), torch.uint8)


@needs_advice
def test_a_tensor_is_copied_there_once():
    t = torch.randint(0, 256, (3, PAGE), dtype=torch.uint8)
    once = pages.on_large_pages(t)
    assert once.data_ptr() % PAGE == 0
    assert torch.equal(once, t)
    assert pages.on_large_pages(once).data_ptr() == once.data_ptr()
    turned = pages.on_large_pages(once.T)
    assert turned.is_contiguous()
    assert torch.equal(turned, t.T)


def test_files(tmp_path):
    """After so many bytes; they begin at a page too, and go with their tensors."""
    with pages.in_files(tmp_path, after=2 * PAGE):
        there, small = pages.empty((2, PAGE), torch.uint8), pages.empty((16,), torch.uint8)
        filed = pages.empty((3, PAGE // 2 + 4), torch.bfloat16)
        copied = pages.on_large_pages(torch.ones(PAGE + 1, dtype=torch.uint8)[1:])  # at no page
    assert [t.is_shared() for t in (there, small, filed, copied)] == [False, False, True, True]
    assert not list(tmp_path.iterdir())
    assert filed.data_ptr() % PAGE == 0
    assert pages.on_large_pages(filed) is filed
    assert torch.equal(filed.fill_(3).clone(), torch.full_like(filed, 3))
    assert copied.sum() == PAGE
    assert mapped_files(tmp_path) == 2
    del filed
    assert mapped_files(tmp_path) == 1
    assert not pages.empty((PAGE,), torch.uint8).is_shared()
    with pages.in_files(tmp_path / "none"), pytest.raises(OSError, match="none"):
        pages.empty((PAGE,), torch.uint8)


def test_small_tensors_and_those_without_memory_stay():
    with FakeTensorMode():
        fake = torch.empty(PAGE, dtype=torch.uint8)
    for t in (
        torch.ones(PAGE - 1, dtype=torch.uint8),
        torch.empty(PAGE, dtype=torch.uint8, device="meta"),
        fake,
    ):
        assert pages.on_large_pages(t) is t
    small = torch.ones(16, 4)
    assert pages.on_large_pages(small.T).is_contiguous()
