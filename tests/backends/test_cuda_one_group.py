"""The kernels of products of one group, by the model of their times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_moe.arch import A100, H100, H200
from fusion_moe.backends.cuda import one_group
from fusion_moe.backends.cuda.heuristics import choose_kernels
from fusion_moe.backends.cuda.one_group import (
    VARIANTS,
    constants,
    fastest,
    microseconds,
)
from fusion_moe.backends.cuda.variants import LargeM, Matrices, SmallM

MOST_ROWS = 8192
ROWS = sorted({*range(1, 130), *range(130, 1025, 16), *range(1025, MOST_ROWS + 1, 256), MOST_ROWS})
SIZES = [(512, 2048), (2048, 4096), (4096, 12288), (28672, 8192)]


def matrix(n: int, k: int, block: int = 1) -> Matrices:
    return Matrices(1, k, n // 16, block, 576, True)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_few_kernels_serve_all_rows(n, k):
    """Low M tiles for few rows, high ones for many, and no more kernels than a layer is to
    compile.
    """
    found = [fastest(rows, matrix(n, k), H200) for rows in ROWS]
    assert isinstance(found[0], SmallM)
    assert isinstance(found[-1], LargeM)
    assert len(set(found)) <= 12


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_time_jumps_only_where_another_eight_rows_begin(n, k):
    of = matrix(n, k)
    times = [
        microseconds(v, rows, of, H200, constants())
        for rows in range(1, 385)
        if (v := fastest(rows, of, H200))
    ]
    ratios = {rows: times[rows - 1] / times[rows - 2] for rows in range(2, 385)}
    assert all(rows % 8 == 1 for rows, ratio in ratios.items() if not 0.95 < ratio < 1.05)
    assert min(ratios.values()) > 0.9
    assert max(ratios.values()) < 1.6


def test_k_is_split_where_tiles_are_few():
    """A matrix of 4,096 rows makes 32 tiles of 256 columns and 64 rows, for 132 multiprocessors."""
    found = fastest(128, matrix(4096, 12288), H200)
    assert isinstance(found, LargeM)
    assert found.cluster > 1
    wide = fastest(2048, matrix(28672, 8192), H200)
    assert isinstance(wide, LargeM)
    assert wide.cluster == 1


def test_clusters_take_whole_stages_of_k():
    """2,880 is no multiple of 2 * 128, and so no block has a part of its stages."""
    assert not any(v.fits(matrix(2880, 2880), H200) for v in VARIANTS if v.cluster > 1)
    assert any(v.fits(matrix(2880, 2816), H200) for v in VARIANTS if v.cluster > 1)


def test_memory_decides_for_few_rows():
    slow = replace(H200, memory_bandwidth=H200.memory_bandwidth / 4)
    of = matrix(28672, 8192)
    fast, slower = (
        microseconds(v, 1, of, arch, constants())
        for arch in (H200, slow)
        if (v := fastest(1, of, arch))
    )
    assert slower > 2 * fast


def test_where_large_m_does_not_run_tables_decide():
    assert fastest(MOST_ROWS, matrix(2048, 2048), A100) is None
    assert A100.clustered(1) == A100.multiprocessors
    assert [H100.clustered(n) for n in (1, 2, 4)] == [132, 132, 112]


def test_what_is_not_of_the_model():
    """Several groups, gradients, weights that are not tiled or of more than 8 bits."""
    of = matrix(512, 2048)
    assert one_group.admits(of)
    for other in ({"groups": 2}, {"kind": "dgrad"}, {"tiled": False}, {"tile_bytes": 2048}):
        assert not one_group.admits(replace(of, **other))
    (only,) = choose_kernels(64, of, H200)
    assert only.variant == fastest(64, of, H200)


def test_no_rows_take_the_kernel_of_one():
    """A rank with one expert, in a call without tokens."""
    of = matrix(512, 2048)
    assert fastest(0, of, H200) == fastest(1, of, H200)
