"""Tables of kernels as files: what is in the package, what is refused, which GPU has which."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fusion_moe.arch import H100, H200, KNOWN, L40S
from fusion_moe.backends.cuda.table import (
    ALWAYS,
    KINDS,
    TABLES,
    parse,
    path_of,
    table_of,
    text,
)
from fusion_moe.backends.cuda.variants import SETS, LargeM
from fusion_moe.errors import ParseError

GOOD = path_of(H200).read_text(encoding="utf-8")


def changed(change) -> str:
    """The H200's table after a change of what its file says."""
    said = json.loads(GOOD)
    change(said)
    return json.dumps(said)


@pytest.mark.parametrize("path", sorted(TABLES.iterdir()), ids=lambda path: path.name)
def test_files_are_tables_of_known_gpus_as_the_tool_writes_them(path):
    assert path in map(path_of, KNOWN.values())
    found = path.read_text(encoding="utf-8")
    assert text(parse(found, path.name)) == found


def test_a_gpu_without_a_table_has_the_h200s():
    assert not path_of(L40S).exists()
    assert table_of(L40S) == table_of(H200)
    assert table_of(replace(H100, name="../h200")) == table_of(H200)  # a name is no path


def test_every_set_is_used_and_has_one_name():
    assert len(set(SETS.values())) == len(SETS)
    tables = [parse(path.read_text(encoding="utf-8"), path.name) for path in TABLES.iterdir()]
    assert {
        v for found in tables for kind in KINDS for r in getattr(found, kind) for v in _sets(r)
    } == set(SETS.values())


def _sets(regime):
    return [regime.variants, *(variants for _, variants in regime.size_classes)]


def test_every_table_has_kernels_for_a_gpu_without_wgmma():
    for kind in KINDS:
        last = getattr(table_of(H200), kind)[-1]
        assert last.max_average == ALWAYS
        assert not any(isinstance(v, LargeM) for v in last.variants)


BAD = {
    "no JSON": lambda: "{",
    "no object": lambda: "[]",
    "a key too few": lambda: changed(lambda t: t.pop("linear")),
    "a key too many": lambda: changed(lambda t: t.update(more=1)),
    "no regimes": lambda: changed(lambda t: t.update(tiled=[])),
    "a regime that is none": lambda: changed(lambda t: t["tiled"].insert(0, 3)),
    "a regime without variants": lambda: changed(lambda t: t["tiled"][0].pop("variants")),
    "a regime with more": lambda: changed(lambda t: t["tiled"][0].update(variant="M8")),
    "no such set": lambda: changed(lambda t: t["tiled"][0].update(variants="M7")),
    "nothing for more rows": lambda: changed(lambda t: t["tiled"][-1].update(max_average=1000)),
    "nothing for more groups": lambda: changed(lambda t: t["tiled"][-1].update(max_groups=15)),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_table_is_refused_with_its_place(what):
    with pytest.raises(ParseError, match="bad.json"):
        parse(BAD[what](), "bad.json")
