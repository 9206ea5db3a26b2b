"""The facts of GPUs: known ones, and those that are derived for others."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from bad_calls import messages

from fusion_moe.arch import (
    A100,
    B200,
    FEATURES,
    H100,
    H200,
    KNOWN,
    L40S,
    RTX_4090,
    Arch,
    find,
    is_capability,
    like,
    named,
    nearest,
    standing_in,
    tensor_rate,
)


def read(known: Arch, name: str, **changes) -> Arch:
    """What a driver says of a GPU: no name of ours."""
    return replace(known, name=name, **changes)


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
    assert all(getattr(arch, f.name) for f in fields(Arch) if f.name != "code")
    # that the driver keeps, for one block
    assert arch.shared_per_multiprocessor - arch.shared_per_block == 1024
    assert arch.warps_to_saturate_memory <= arch.multiprocessors * arch.warps
    # of one compute capability a multiprocessor has the same
    first = nearest(arch.capability)
    assert (
        replace(
            first,
            name=arch.name,
            multiprocessors=arch.multiprocessors,
            l2_bytes=arch.l2_bytes,
            memory_bandwidth=arch.memory_bandwidth,
            tensor_rate=arch.tensor_rate,
        )
        == arch
    )


@pytest.mark.parametrize("name", KNOWN)
def test_tensor_rates_are_those_of_clocks_that_there_are(name):
    known = KNOWN[name]
    each_hertz = tensor_rate(name, known.capability, known.multiprocessors, 1)
    assert 1.3e9 < known.tensor_rate / each_hertz < 2.7e9


def test_what_each_generation_has():
    assert [arch.nvrtc for arch in (A100, L40S, H100, B200)] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_100",
    ]
    having = {
        name: [a for a in (A100, L40S, H200, B200) if not a.why_not([name])] for name in FEATURES
    }
    assert having == {
        "mma": [A100, L40S, H200, B200],
        "cp.async": [A100, L40S, H200, B200],
        "mma.e4m3": [L40S, H200, B200],
        "griddepcontrol": [H200, B200],
        "clusters": [H200, B200],
        "TMA": [H200, B200],
        "wgmma": [H200],
        "setmaxnreg": [H200],
    }
    assert [arch.programmatic_launch for arch in (A100, L40S, H100, B200)] == [
        False,
        False,
        True,
        True,
    ]
    assert A100.why_not(("mma", "TMA")) == (
        "TMA requires compute capability 9.0 or higher, A100 has 8.0"
    )
    assert B200.why_not(("wgmma",)) == "wgmma requires compute capability 9.0, B200 has 10.0"


def test_code_for_one_compute_capability_is_for_that_alone():
    """Not for others of the same major version, which might come."""
    other = replace(H200, capability=(9, 9))
    assert (H200.nvrtc, other.nvrtc) == ("sm_90a", "sm_99")
    for feature in "wgmma", "setmaxnreg":
        assert H200.why_not((feature,)) == ""
        assert "requires compute capability 9.0, H200 has 9.9" in other.why_not((feature,))


def test_geforce_gpus_add_up_in_float32_at_half_the_rate():
    rates = [tensor_rate(name, (8, 9), 100, 2e9) for name in ("NVIDIA L40S", "NVIDIA GeForce RTX")]
    assert rates == [204.8e12, 102.4e12]
    assert RTX_4090.tensor_rate / RTX_4090.multiprocessors < L40S.tensor_rate / 142 / 1.9


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ((128, 1024, 12, 40), ""),
        ((1056, 0), "1056 threads of a block, RTX 4090 has 1024"),
        ((128, 100 * 1024), "102400 bytes of shared memory of a block, RTX 4090 has 101376"),
        ((32, 0, 25), "25 blocks of a multiprocessor, RTX 4090 has 24"),
        ((512, 0, 4), "2048 threads of a multiprocessor, RTX 4090 has 1536"),
        (
            (128, 50 * 1024, 2),
            "104448 bytes of shared memory of a multiprocessor, RTX 4090 has 102400",
        ),
        ((128, 0, 4, 129), "69632 registers of a multiprocessor, RTX 4090 has 65536"),
    ],
)
def test_limits_of_a_multiprocessor(kernel, why):
    assert RTX_4090.why_no_room(*kernel) == why


def test_a_name_or_a_compute_capability_names_a_gpu():
    assert named("rtx 4090") is RTX_4090
    assert named("8.0") is A100
    assert named("9.0") is H200


@pytest.mark.parametrize("name", [*KNOWN, *(known.name for known in KNOWN.values())])
def test_names_that_machines_print_name_a_gpu(name):
    known = KNOWN.get(name) or next(k for k in KNOWN.values() if k.name == name)
    bare = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    for written in (name, bare, bare.replace(" ", ""), bare.removeprefix("RTX ").lower()):
        assert named(written) is known
        assert not is_capability(written)


@pytest.mark.parametrize("asked", [(8, 9), "8.9", "sm_89", L40S.nvrtc])
def test_a_compute_capability_as_others_write_it(asked):
    assert named(asked) is L40S


def test_what_names_no_gpu(golden):
    golden(
        messages(
            {
                "A900": lambda: named("A900", "option cuda_arch", ["auto"]),
                "8.0": lambda: named(8.0),
                "4080": lambda: named("RTX 4080"),
                "7.5": lambda: named((7, 5)),
                "a device in place of a newer one": lambda: standing_in(H200, "12.0"),
                "a device in place of one too old": lambda: standing_in(H200, "7.0"),
            }
        )
    )


def test_other_gpus_are_like_the_nearest_one():
    assert nearest((8, 7)) is KNOWN["NVIDIA A10"]
    assert nearest((10, 3)) is B200
    assert like("NVIDIA H200", (9, 0), 132) is H200
    part = like("NVIDIA RTX A6000", (8, 6), 84)
    assert (part.name, part.capability, part.blocks) == ("NVIDIA RTX A6000", (8, 6), 16)
    assert like("Tesla T4", (7, 5), 40).why_not(("mma",))


def test_a_device_stands_in_for_an_older_gpu():
    """By name for all of it; by compute capability for its limits."""
    a100, as_8_0 = standing_in(H200, "a100"), standing_in(H200, "8.0")
    assert a100 == replace(A100, code="compute_80,sm_90")
    assert as_8_0 == replace(
        a100,
        multiprocessors=132,
        l2_bytes=H200.l2_bytes,
        memory_bandwidth=4.8e12,
        tensor_rate=H200.tensor_rate,
    )
    assert (standing_in(H200, "NVIDIA A100-SXM4-80GB"), standing_in(H200, "sm_80")) == (
        a100,
        as_8_0,
    )
    assert a100.nvrtc == "compute_80,sm_90"
    assert standing_in(B200, "RTX 4090").nvrtc == "compute_89,sm_100"
    assert standing_in(H200, "9.0") == H200
    assert standing_in(H200, "H100") == H100
    # PTX has not what only machine code for one GPU has
    hopper = standing_in(B200, "9.0")
    assert (hopper.nvrtc, hopper.programmatic_launch) == ("compute_90,sm_100", True)
    assert hopper.why_not(("wgmma",))


def test_what_was_measured_on_one_gpu_follows_the_bandwidth_of_memory():
    assert (H200.warps_to_saturate_memory, H200.groups_read_per_two_tiles) == (3200, 300)
    assert (H100.warps_to_saturate_memory, H100.groups_read_per_two_tiles) == (2233, 209)
    slow = replace(L40S, memory_bandwidth=1e9)
    assert (slow.warps_to_saturate_memory, slow.groups_read_per_two_tiles) == (1, 1)
    few = replace(B200, multiprocessors=10)
    assert few.warps_to_saturate_memory == 10 * 64  # no more than fit


def test_a_device_whose_driver_does_not_say_its_bandwidth():
    found = find(read(H200, "some GPU", multiprocessors=66, memory_bandwidth=0.0))
    assert found.memory_bandwidth == H200.memory_bandwidth / 2
    assert found.name == "some GPU"
    assert found.warps_to_saturate_memory == 1600
