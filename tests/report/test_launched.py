"""What fusion_moe.explain says of the CUDA kernels that sizes launch, and of their workspace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from experts import experts_of_ones
from kernel_tables import TABLE, use

import fusion_moe
from fusion_moe.runtime import nvrtc

pytestmark = pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
EXPERTS, SLOTS, HIDDEN, INTERMEDIATE = 8, 2, 128, 64


def report(tokens: int, target: str = "cuda") -> fusion_moe.report.Report:
    module = experts_of_ones(EXPERTS, HIDDEN, INTERMEDIATE)
    fusion_moe.prepare_(module, target)
    x, ids = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), torch.zeros(tokens, SLOTS, dtype=torch.long)
    with torch.no_grad():
        return fusion_moe.explain(module, x, ids, torch.ones(tokens, SLOTS), target=target)


def segments(found: fusion_moe.report.Report) -> list[fusion_moe.report.SegmentReport]:
    return [s for f in found.fusions for s in f.segments]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what this GPU launches")
def test_kernels_follow_the_sizes():
    few, many = (segments(report(tokens)) for tokens in (1, 4000))  # one: which tracers take for a constant
    assert [s.launched for s in few] == ["route, small_m_1x1x4x1x3 on sm_90a", "small_m_1x1x8x1x3, combine on sm_90a"]
    assert [s.launched for s in many] == [
        "route, reorder_activations, large_m_160x3 on sm_90a",
        "large_m_160x3, combine on sm_90a",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what this GPU launches")
def test_concurrent_kernels_say_which_groups_are_theirs(monkeypatch):
    use(monkeypatch, min_groups=0, tiled=tuple(replace(regime, min_weights=0) for regime in TABLE.tiled))
    high, low = "large_m_80x4 (groups of more than 12 rows)", "small_m_1x1x8x1x3 (groups of 1 to 12 rows)"
    assert f"{high}, {low}, combine on sm_90a" in [s.launched for s in segments(report(2 * EXPERTS))]


def test_workspace_is_what_no_result_holds():
    rows = 4000 * SLOTS
    first, second = segments(report(4000))
    row_of, x = rows * 4, 4000 * HIDDEN * 2
    assert first.workspace == row_of + x
    assert second.workspace == rows * HIDDEN * 2  # the sum's rows


def test_said_in_the_table_and_in_json():
    found = report(4000)
    first, _ = segments(found)
    assert f"{first.launched}; workspace 1.06 MB" in " ".join(str(found).split())
    assert json.loads(found.to_json())["fusions"][0]["segments"][0]["workspace"] == first.workspace


def test_the_cpu_has_nothing_to_say():
    assert [(s.launched, s.workspace) for s in segments(report(3, "cpu"))] == [("", None)] * 2
