"""Tables of kernels as files: what is in the package, and which GPU has which."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_moe.arch import A10, GB10, H100, H200, KNOWN, like
from fusion_moe.backends.cuda.table import (
    ALWAYS,
    KINDS,
    REGIMES,
    TABLES,
    Regime,
    parse,
    path_of,
    table_of,
)
from fusion_moe.backends.cuda.variants import SETS, LargeM, LargeMma, SmallM

sys.path.append(str(Path(__file__).parents[2] / "tools" / "tune"))

import fit


@pytest.mark.parametrize("path", sorted(TABLES.iterdir()), ids=lambda path: path.name)
def test_files_are_tables_of_known_gpus_as_the_tool_writes_them(path):
    assert path in map(path_of, KNOWN.values())
    found = path.read_text(encoding="utf-8")
    assert fit.text(parse(found)) == found


def test_a_gpu_without_a_table_has_that_of_the_nearest_one():
    assert all(path_of(known).exists() for known in KNOWN.values())
    assert table_of(like("NVIDIA RTX A6000", (8, 6), 84)) == table_of(A10)
    assert table_of(like("a GPU of tomorrow", (13, 0), 200)) == table_of(GB10)
    assert table_of(replace(H100, name="../h200")) == table_of(H200)  # a name is no path


def test_every_set_is_used_and_has_one_name():
    assert len(set(SETS.values())) == len(SETS)
    tables = [parse(path.read_text(encoding="utf-8")) for path in TABLES.iterdir()]
    assert {
        v for found in tables for kind in REGIMES for r in getattr(found, kind) for v in _sets(r)
    } == set(SETS.values())


def test_what_tables_name_first_runs_on_their_gpu():
    """Kernels without wgmma are in no table of a GPU that has it, and the other way round."""
    for arch in KNOWN.values():
        hopper = not arch.why_not(LargeM.needs)
        for r in table_of(arch).tiled:
            of = {type(v) for variants in _sets(r) for v in variants}
            assert not of & {LargeMma if hopper else LargeM}


def _sets(regime):
    return [regime.variants, *(variants for _, variants in regime.size_classes)]


@pytest.mark.parametrize("arch", KNOWN.values(), ids=lambda arch: arch.name)
def test_every_table_has_kernels_for_all_sizes_on_a_gpu_without_wgmma(arch):
    for kind in KINDS:
        last = getattr(table_of(arch), kind)[-1]
        assert last == Regime(ALWAYS, last.variants)
        assert all(isinstance(v, SmallM) for v in last.variants)
