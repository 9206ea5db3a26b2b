"""The facts of GPUs: known ones, and those that are derived for others."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fusion_moe.arch import A100, B200, H100, H200, KNOWN, L40S, RTX_4090, Arch, find


def read(known: Arch, name: str, **changes) -> Arch:
    """What a driver says of a GPU: no name of ours, nothing measured."""
    return replace(known, name=name, measured=None, **changes)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_gpu_is_found_by_the_name_of_its_driver(name):
    known = KNOWN[name]
    assert find(read(known, name, memory_bandwidth=1.0, l2_bytes=1)) is known


@pytest.mark.parametrize("changes", [{"multiprocessors": 16}, {"capability": (8, 6)}], ids=str)
def test_a_part_of_a_known_gpu_is_another(changes):
    found = find(read(H100, "NVIDIA H100 80GB HBM3", **changes))
    assert found == read(H100, "NVIDIA H100 80GB HBM3", **changes)
    assert found not in KNOWN.values()


def test_known_gpus_are_different_ones():
    assert len(set(KNOWN.values())) == len({arch.name for arch in KNOWN.values()}) == len(KNOWN)


@pytest.mark.parametrize("arch", KNOWN.values(), ids=lambda arch: arch.name)
def test_facts_of_known_gpus_agree_with_each_other(arch):
    assert all(getattr(arch, f.name) for f in fields(Arch) if f.name != "measured")
    # that the driver keeps, for one block
    assert arch.shared_per_multiprocessor - arch.shared_per_block == 1024
    assert arch.wgmma == arch.nvrtc.endswith("a")
    assert arch.programmatic_launch or not arch.wgmma
    assert arch.warps_to_saturate_memory <= arch.multiprocessors * arch.warps


def test_what_each_generation_has():
    assert [arch.nvrtc for arch in (A100, L40S, H100, B200)] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_100",
    ]
    assert [arch.wgmma for arch in (A100, RTX_4090, H200, B200)] == [False, False, True, False]
    assert [arch.programmatic_launch for arch in (A100, L40S, H100, B200)] == [
        False,
        False,
        True,
        True,
    ]


def test_facts_that_were_not_measured_follow_the_bandwidth_of_memory():
    assert (H200.warps_to_saturate_memory, H200.groups_read_per_two_tiles) == (3200, 300)
    assert (H100.warps_to_saturate_memory, H100.groups_read_per_two_tiles) == (2233, 209)
    same = replace(H200, name="another", measured=None)
    assert (same.warps_to_saturate_memory, same.groups_read_per_two_tiles) == (3200, 300)
    slow = replace(L40S, memory_bandwidth=1e9)
    assert (slow.warps_to_saturate_memory, slow.groups_read_per_two_tiles) == (1, 1)
    few = replace(B200, multiprocessors=10)
    assert few.warps_to_saturate_memory == 10 * 64  # no more than fit


def test_a_device_whose_driver_does_not_say_its_bandwidth():
    found = find(read(H200, "some GPU", multiprocessors=66, memory_bandwidth=0.0))
    assert found.memory_bandwidth == H200.memory_bandwidth / 2
    assert found.name == "some GPU"
    assert found.warps_to_saturate_memory == 1600
