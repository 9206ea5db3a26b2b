"""Tiers of CPU instructions: which this machine has, how one is forced, and what compilers are
told.
"""

from __future__ import annotations

import pytest

from fusion_moe import options
from fusion_moe.errors import OptionError
from fusion_moe.runtime import isa

HASWELL = frozenset({"sse4_2", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "popcnt"})
SKYLAKE_SERVER = HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
ICE_LAKE = SKYLAKE_SERVER | {"avx512vbmi", "avx512_vnni"}
ZEN4 = ICE_LAKE | {"avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN4 | {"avx512_fp16", "amx_tile", "amx_bf16"}
NEOVERSE = frozenset({"fp", "asimd", "sve", "bf16", "i8mm"})


@pytest.mark.parametrize(
    ("cpu", "tiles", "tiers"),
    [
        (SAPPHIRE_RAPIDS, True, ("amx", "avx512", "avx2", "generic")),
        (SAPPHIRE_RAPIDS, False, ("avx512", "avx2", "generic")),
        (ZEN4, True, ("avx512", "avx2", "generic")),
        (ICE_LAKE, False, ("avx512", "avx2", "generic")),
        (SKYLAKE_SERVER, False, ("avx2", "generic")),
        (HASWELL, False, ("avx2", "generic")),
        (NEOVERSE, False, ("generic",)),
        (frozenset(), False, ("generic",)),
    ],
)
def test_tiers_of_a_cpu(cpu, tiles, tiers, monkeypatch):
    monkeypatch.setattr(isa, "features", lambda: cpu)
    monkeypatch.setattr(isa, "_may_use_tiles", lambda: tiles)
    assert isa.available.__wrapped__() == tiers


def test_flags_name_what_there_is():
    assert isa.compiler_flags("generic") == ()
    assert "-mavx512bf16" in isa.compiler_flags("avx512", ZEN4)
    assert "-mavx512bf16" not in isa.compiler_flags("avx512", ICE_LAKE)
    assert "-mavx512vbmi" in isa.compiler_flags("avx512", having=())
    assert {"-mamx-tile", "-mamx-bf16", "-mavx512fp16"} <= set(isa.compiler_flags("amx", having=()))
    assert set(isa.compiler_flags("avx2")) == {
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mbmi",
        "-mbmi2",
        "-mlzcnt",
        "-mpopcnt",
    }


def test_the_best_tier_of_this_machine_and_each_one_forced():
    with options.override(cpu_isa="auto"):
        assert isa.selected() == isa.available()[0]
    for tier in isa.available():
        with options.override(cpu_isa=tier):
            assert isa.selected() == tier


@pytest.mark.parametrize(
    ("tier", "said"), [("amx", "'amx' is not supported by this CPU"), ("sse9", "'sse9'")]
)
def test_a_tier_that_the_machine_has_not(tier, said, monkeypatch):
    monkeypatch.setattr(isa, "available", lambda: ("avx2", "generic"))
    with options.override(cpu_isa=tier), pytest.raises(OptionError) as e:
        isa.selected()
    assert str(e.value) == f"options: cpu_isa = {said}; expected 'auto' or one of avx2, generic"


def test_the_environment_forces_a_tier():
    assert options.from_environment({"FUSION_MOE_CPU_ISA": "generic"}).cpu_isa == "generic"
