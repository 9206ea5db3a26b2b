"""Tables of kernels as files: what is in the package, and which GPU has which."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_moe.arch import H100, H200, KNOWN, L40S
from fusion_moe.backends.cuda.table import (
    ALWAYS,
    KINDS,
    TABLES,
    Regime,
    parse,
    path_of,
    table_of,
)
from fusion_moe.backends.cuda.variants import SETS, LargeM

sys.path.append(str(Path(__file__).parents[2] / "tools" / "tune"))

import fit


@pytest.mark.parametrize("path", sorted(TABLES.iterdir()), ids=lambda path: path.name)
def test_files_are_tables_of_known_gpus_as_the_tool_writes_them(path):
    assert path in map(path_of, KNOWN.values())
    found = path.read_text(encoding="utf-8")
    assert fit.text(parse(found)) == found


def test_a_gpu_without_a_table_has_the_h200s():
    assert not path_of(L40S).exists()
    assert table_of(L40S) == table_of(H200)
    assert table_of(replace(H100, name="../h200")) == table_of(H200)  # a name is no path


def test_every_set_is_used_and_has_one_name():
    """But those without wgmma: in no table of a GPU that has it."""
    assert len(set(SETS.values())) == len(SETS)
    tables = [parse(path.read_text(encoding="utf-8")) for path in TABLES.iterdir()]
    assert {
        v for found in tables for kind in KINDS for r in getattr(found, kind) for v in _sets(r)
    } >= {v for name, v in SETS.items() if not name.startswith("MMA")}


def _sets(regime):
    return [regime.variants, *(variants for _, variants in regime.size_classes)]


@pytest.mark.parametrize("arch", [H100, H200], ids=lambda arch: arch.name)
def test_every_table_has_kernels_for_all_sizes_on_a_gpu_without_wgmma(arch):
    for kind in KINDS:
        last = getattr(table_of(arch), kind)[-1]
        assert last == Regime(ALWAYS, last.variants)
        assert not any(isinstance(v, LargeM) for v in last.variants)
