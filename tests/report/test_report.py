"""fusion_moe.explain: its table, its numbers, its stages, and what it says of what was not
fused.
"""

import inspect
import json
import runpy
from dataclasses import fields

import pytest
import torch
from bad_calls import messages
from pages import EXPERTS, HIDDEN, INTERMEDIATE, STAGES, TOKENS, TOP_K, Layer
from torch._dynamo.testing import CompileCounter

import fusion_moe
from fusion_moe.errors import OptionError
from fusion_moe.report.html import page

ops = torch.ops.fusion_moe


@pytest.fixture(scope="module")
def x():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(scope="module")
def report(x):
    with torch.no_grad():
        return fusion_moe.explain(Layer(), x)


def test_table(report, golden):
    golden(report.details())
    assert max(map(len, report.details().splitlines())) <= 120


def test_costs_are_those_counted_by_hand(report):
    rows = TOKENS * TOP_K
    first, second = report.fusions[0].segments
    weights = EXPERTS * 2 * INTERMEDIATE * HIDDEN
    # the product, silu and a multiplication
    assert first.flops == 2 * rows * 2 * INTERMEDIATE * HIDDEN + 2 * rows * INTERMEDIATE
    assert (
        first.bytes_read
        == TOKENS * TOP_K * 8 + TOKENS * HIDDEN * 2 + weights // 2 + weights // 16 + EXPERTS * 2 * 4
    )
    assert first.bytes_written == EXPERTS * 4 + rows * 4 + rows * INTERMEDIATE * 2
    inside = rows * 4 + rows * HIDDEN * 2  # row_of, gathered rows
    inside += rows * 2 * INTERMEDIATE * 2 + rows * INTERMEDIATE * 4  # the product in bf16, silu
    # the ends are written anyway, but not read again
    assert first.bytes_avoided == 2 * inside + EXPERTS * 4
    assert first.intensity == first.flops / (first.bytes_read + first.bytes_written)
    # rows and tokens, rounded to bf16
    assert second.bytes_avoided == 2 * (rows * HIDDEN * 2 + TOKENS * HIDDEN * 2)
    # product, combine, residual
    assert second.flops == 2 * rows * INTERMEDIATE * HIDDEN + 2 * rows * HIDDEN + TOKENS * HIDDEN


def test_few_rows_touch_few_experts(x):
    with torch.no_grad():
        one = fusion_moe.explain(Layer(), x[:1]).fusions[0].segments[1]
    assert one.bytes_read < HIDDEN * INTERMEDIATE * EXPERTS // 2  # two of four experts at most


def test_roundings_that_the_kernels_drop_are_listed(report, x):
    assert [s.roundings for s in report.fusions[0].segments] == [("bf16 after grouped_mm",), ()]
    with torch.no_grad(), fusion_moe.options.override(contract_rounding=False):
        exact = fusion_moe.explain(Layer(), x)
    assert all(s.roundings == () for s in exact.fusions[0].segments)


def test_what_was_not_fused_is_told(report):
    assert {x.op: x.why for x in report.not_fused} == {"aten.topk.default": "it has no translator"}
    assert all("layer.py" in x.source for x in report.not_fused)


def test_json_has_a_versioned_schema(report):
    data = json.loads(report.to_json())
    assert data["schema"] == "fusion_moe.explain/12"
    assert data.keys() == {"schema"} | {f.name for f in fields(report)}
    assert data["fusions"][0]["segments"][1]["boundary"].startswith(
        "grouped_mm contracts the result of grouped_mm"
    )
    assert data["fusions"][0]["programs"]["translated"] == report.stage("translated")


def test_a_boundary_names_the_segments_that_are_read(x):
    layer = Layer()
    layer.experts.activation_format = "nvfp4"
    with torch.no_grad():
        segments = fusion_moe.explain(layer, x, target="sm_100").fusions[0].segments
    assert [s.after for s in segments[:3]] == [(), ("fusion0.0",), ("fusion0.0", "fusion0.1")]
    # codes, block scales of 4 groups padded to 128 rows, a decode scale
    assert segments[2].bytes_written == TOKENS * TOP_K * HIDDEN // 2 + 4 * 128 * 4 + 4


def test_sizes_left_open_are_those_of_the_call(x, report):
    marked = x.clone()
    torch._dynamo.mark_dynamic(marked, 0)
    with torch.no_grad():
        found = fusion_moe.explain(Layer(), marked).fusions[0]
    assert found.sizes == {"s0": TOKENS}
    assert "fd.define_size('s0')" in found.programs["translated"]
    assert [(s.ops, s.flops, s.bytes_read) for s in found.segments] == [
        (s.ops, s.flops, s.bytes_read) for s in report.fusions[0].segments
    ]


def test_sizes_that_only_the_device_knows_are_not_made_up(x):
    layer = Layer()
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = fusion_moe.explain(lambda x: layer(x[x[:, 0] > 0]), x)
    assert found.fusions[0].segments[0].flops is None
    assert found.fusions[0].segments[0].outputs[-1] == "bf16[2*s0/g0, 32]"
    assert " ?" in found.details()
    assert str(found.flops) == str(found.bytes) == "?"


def test_every_stage_is_shown(report):
    assert report.stages == STAGES
    assert "fd.ops.silu" in report.stage("canonicalize")
    assert "grouped_mm; prologue: route, index_select; epilogue" in report.stage("schedules")


def ran(script, tmp_path, capsys):
    """What a script prints."""
    file = tmp_path / "script.py"
    file.write_text(script)
    runpy.run_path(str(file), run_name="__main__")
    return capsys.readouterr().out


def test_repro_is_a_script_that_runs(report, tmp_path, capsys):
    out = ran(report.repro("fusion0"), tmp_path, capsys)
    assert out.startswith("output 0: bf16[6, 64], largest difference ")
    assert float(out.rsplit(" ", 1)[1]) < 0.1


def test_repro_of_what_cannot_run_here_runs_the_reference(x, tmp_path, capsys):
    layer = Layer()
    layer.experts.activation_format = "nvfp4"
    with torch.no_grad():
        found = fusion_moe.explain(layer, x, target="sm_100")
    assert ran(found.repro(), tmp_path, capsys).startswith(
        "output 0: bf16[6, 64], largest difference "
    )


def test_nothing_fused_says_so(x, golden):
    with torch.no_grad():
        golden(fusion_moe.explain(lambda x: torch.relu(x) * 2, x).details())


def test_asked_often_it_answers_the_same_and_what_the_user_compiled_stays(x):
    layer = Layer()

    def broken(x):
        y = layer(x)
        torch._dynamo.graph_break()
        return layer(y)

    counter = CompileCounter()
    compiled = torch.compile(broken, backend=counter)
    with torch.no_grad():
        compiled(x)
        before = counter.frame_count
        # more often than a frame may be compiled anew
        with torch._dynamo.config.patch(recompile_limit=2):
            found = [fusion_moe.explain(broken, x) for _ in range(3)]
        assert [(r.graphs, sum(f.times for f in r.fusions)) for r in found] == [(2, 2)] * 3
        compiled(x)
        assert counter.frame_count == before
        # before torch 2.13, what explain compiles counts too
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            compiled(x[:4])
            assert counter.frame_count > before  # Dynamo has not given this function up


def test_no_graph_is_told_apart_from_no_fusion():
    assert "no graph was captured from this call" in fusion_moe.explain(lambda: 3).details()


def test_unknown_names(x, report, golden, tmp_path):
    with pytest.raises(
        OptionError, match="target 'sm_42'; expected one of auto, cpu, cuda, reference"
    ):
        fusion_moe.explain(Layer(), x, target="sm_42")
    golden(
        messages(
            {
                "a stage": lambda: report.stage("linker"),
                "a fusion": lambda: report.stage("translated", "fusion7"),
                "a suffix": lambda: report.save(tmp_path / "r.pdf"),
            }
        )
    )


def test_a_compiled_model_is_looked_into(x, report):
    with torch.no_grad():
        assert len(fusion_moe.explain(torch.compile(Layer()), x).fusions) == len(report.fusions)
        assert len(fusion_moe.explain(torch.compile(Layer().forward), x).fusions) == len(
            report.fusions
        )
        in_place = Layer()
        in_place.compile()
        assert len(fusion_moe.explain(in_place, x).fusions) == len(report.fusions)


def test_with_gradients_the_forward_pass_is_shown(x, report):
    """The same operations; the first kernel stores its product too, since the backward reads it."""
    found = fusion_moe.explain(Layer(), x.clone().requires_grad_()).fusions[0].segments
    assert [op for s in found for op in s.ops] == [
        op for s in report.fusions[0].segments for op in s.ops
    ]
    assert [s.ops.count("grouped_mm") for s in found] == [1, 1]


def test_saved_whole(report, tmp_path):
    report.save(tmp_path / "r.json")
    report.save(tmp_path / "r.txt")
    report.save(tmp_path / "r.html")
    assert json.loads((tmp_path / "r.json").read_text())["graphs"] == 1
    assert (tmp_path / "r.txt").read_text() == f"{report.details()}\n"
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == page(report)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "r.json", "r.txt"]
