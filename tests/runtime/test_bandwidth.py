"""The read bandwidth of a machine: that all of the memory is read, measured once, and kept."""

from __future__ import annotations

import ctypes
import json
import platform
import time

import numpy as np
import pytest
import torch
from forgetting import forgetting

from fusion_moe import options
from fusion_moe.runtime import build
from fusion_moe.runtime.host_memory import bandwidth, pages

CACHES = (bandwidth.of, bandwidth._library, bandwidth._why_not_cpp)
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason=build.why_no_compiler())


@pytest.fixture
def anew():
    with forgetting(*CACHES):
        yield


@pytest.fixture
def quick(anew, monkeypatch, tmp_path):
    """Little is read, and kept in a folder of its own. -> how often it was measured"""
    measured, whole = [], bandwidth._measured
    monkeypatch.setattr(bandwidth, "pool", lambda: pages.empty((2**22,), torch.uint8).fill_(1))
    monkeypatch.setattr(
        bandwidth, "_measured", lambda threads: measured.append(threads) or whole(threads)
    )
    with options.override(cache_dir=str(tmp_path)):
        yield measured


def kept(folder):
    return sorted(folder.glob("bandwidth-*.json"))


@needs_compiler
@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (8,),
        (127,),
        (4096,),
        (2**16 + 24,),
        (2**20,),
        (128, 0, 384, 24),
        (4096, 2**16, 8, 640),
    ],
)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_word_is_read(sizes, threads):
    generator = torch.Generator().manual_seed(len(sizes))
    pieces = [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes
    ]
    words = np.concatenate(
        [
            np.zeros(1, np.uint64),
            *(piece[: len(piece) // 8 * 8].numpy().view(np.uint64) for piece in pieces),
        ]
    )
    addresses = (ctypes.c_void_p * len(pieces))(*[piece.data_ptr() for piece in pieces])
    lengths = (ctypes.c_longlong * len(pieces))(*sizes)
    for ahead in bandwidth._AHEAD:
        assert bandwidth._library().read_words(
            addresses, lengths, len(pieces), threads, ahead
        ) == np.bitwise_xor.reduce(words)


def test_it_is_measured_once_for_each_number_of_threads(quick, tmp_path):
    one, two = bandwidth.of(1), bandwidth.of(2)
    bandwidth.of.cache_clear()  # as another process
    assert (bandwidth.of(1), bandwidth.of(2)) == (one, two)
    assert quick == [1, 2]
    if one.ahead is not None:
        assert one.by.startswith(f"C++, prefetching {one.ahead} bytes ahead; 4 MiB, ")
    assert (one.threads, two.threads) == (1, 2)
    assert {json.loads(file.read_text())["bytes_per_second"] for file in kept(tmp_path)} == {
        one.bytes_per_second,
        two.bytes_per_second,
    }


def test_without_a_compiler_torch_reads(quick, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    found = bandwidth.of(2)
    assert found.ahead is None
    assert found.by.startswith("torch's amax: no C++ compiler: CXX='/nowhere/g++' does not run")
    before = torch.get_num_threads()
    found.reader(torch.ones(2**20, dtype=torch.uint8))()
    assert torch.get_num_threads() == before


def test_a_pool_is_larger_than_the_caches():
    assert bandwidth.pool().nbytes >= max(2**28, min(2**30, 4 * bandwidth._cache_bytes()))


@needs_compiler
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"),
    reason="programs cannot ask for it on this architecture",
)
def test_what_is_evicted_is_read_more_slowly_and_is_the_same():
    """A word of each cache line, in random order: in order, memory may be as fast as a cache."""
    memory = torch.arange(2**16)  # 512 KiB, what a core's own cache holds
    want, order = memory.clone(), torch.randperm(2**13) * 8

    def seconds(evict: bool) -> float:
        torch.take(memory, order)
        if evict:
            bandwidth.evict(memory)
        start = time.perf_counter()
        torch.take(memory, order)
        return time.perf_counter() - start

    def is_slower() -> bool:
        """What runs beside this empties caches too, for a while."""
        evicted, cached = zip(*((seconds(True), seconds(False)) for _ in range(50)), strict=True)
        return min(evicted) > 1.5 * min(cached)

    assert any(is_slower() for _ in range(50))
    assert torch.equal(memory, want)


def test_without_a_compiler_other_memory_is_read_instead(quick, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    bandwidth._kept_pool.cache_clear()
    bandwidth.evict(torch.ones(8))
    assert bandwidth._kept_pool.cache_info().currsize == 1
    bandwidth._kept_pool.cache_clear()
