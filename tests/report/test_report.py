"""fusion_moe.explain: its table, its numbers, its stages, and what it says of what was not fused."""

import json
import subprocess
import sys

import pytest
import torch

import fusion_moe
from fusion_moe import Untranslatable, translate
from fusion_moe.errors import OptionError, UnsupportedError
from fusion_moe.report import repro

ops = torch.ops.fusion_moe
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 64, 32, 6, 2


class Layer(torch.nn.Module):
    """A mixture-of-experts layer with what stands around it in a model."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, dtype=torch.bfloat16)
        self.experts = fusion_moe.NVFP4Experts.from_float(
            torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator),
            torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator),
        )

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, ids, weights)


@pytest.fixture(scope="module")
def x():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(scope="module")
def report(x):
    with torch.no_grad():
        return fusion_moe.explain(Layer(), x)


def test_table(report, golden):
    golden(str(report))


def test_no_line_is_wider_than_120(report):
    assert max(map(len, str(report).splitlines())) <= 120


def test_costs_are_those_counted_by_hand(report):
    rows = TOKENS * TOP_K
    first, second = report.fusions[0].segments
    weights = EXPERTS * 2 * INTERMEDIATE * HIDDEN
    assert first.flops == 2 * rows * 2 * INTERMEDIATE * HIDDEN + 2 * rows * INTERMEDIATE  # the product, silu and a multiplication
    assert first.bytes_read == TOKENS * TOP_K * 8 + TOKENS * HIDDEN * 2 + weights // 2 + weights // 16 + EXPERTS * 2 * 4
    assert first.bytes_written == EXPERTS * 4 + rows * 4 + rows * INTERMEDIATE * 2
    inside = rows * 4 + rows * HIDDEN * 2  # row_of, gathered rows
    inside += rows * 2 * INTERMEDIATE * (4 + 2)  # the product, rounded
    inside += rows * INTERMEDIATE * 4 * 4  # gate and up in float32, silu, their product
    assert first.bytes_avoided == 2 * inside
    assert second.flops == 2 * rows * INTERMEDIATE * HIDDEN + 2 * rows * HIDDEN + TOKENS * HIDDEN  # product, combine, residual


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
    assert {x.op: x.why for x in report.left} == {
        "aten.topk.default": "it has no translator",
        "aten.cat.default": "left to the graph's compiler: no grouped product to fuse with (it stands before or after them)",
    }
    assert all("test_report.py" in x.source for x in report.left)


def test_json_has_a_versioned_schema(report):
    data = json.loads(report.to_json())
    assert data["schema"] == "fusion_moe.explain/1"
    assert set(data) == {"schema", "target", "executed", "graphs", "calls", "fused_calls", "fusions", "left"}
    assert data["fusions"][0]["segments"][1]["why"].startswith("grouped_mm contracts what grouped_mm makes")
    assert list(data["fusions"][0]["stages"]) == list(report.stages)


def test_every_stage_is_shown(report):
    assert report.stages == ("translated", "canonicalize", "assign_layouts", "simplify", "segments", "schedules", "source")
    assert "fd.ops.silu" in report.stage("canonicalize")
    assert "GroupedGemm(product='grouped_mm', prologue=('route', 'index_select')" in report.stage("schedules")
    with pytest.raises(OptionError, match="no stage is called 'linker'; expected one of translated"):
        report.stage("linker")
    with pytest.raises(OptionError, match="no fusion is called 'fusion7'; expected one of fusion0"):
        report.stage("translated", "fusion7")


def test_repro_is_a_script_that_runs(report, tmp_path):
    script = tmp_path / "repro.py"
    script.write_text(report.repro("fusion0"))
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert out.startswith("output 0: bf16[6, 64], largest difference ")
    assert float(out.rsplit(" ", 1)[1]) < 0.1


def test_random_inputs_fit_what_reads_them():
    fd = fusion_moe.FusionDefinition()
    m = fd.define_size("m")
    rows, offs = fd.define_tensor(shape=[m, 16], dtype="f32"), fd.define_tensor(shape=[3], dtype="i32")
    table, index = fd.define_tensor(shape=[5, 16], dtype="f32"), fd.define_tensor(shape=[m], dtype="i64")
    ends = fd.ops.ends(offs, rows=m, groups=fd.fresh_groups(3))
    weight = fd.define_tensor(shape=[3, 8, 16], dtype="f32")
    fd.add_output(fd.ops.grouped_mm(fd.ops.cut(fd.ops.add(rows, fd.ops.index_select(table, index, dim=0)), ends), weight, ends))
    fusion = fd.fusion()
    for seed in range(5):
        inputs = repro.random_inputs(fusion, seed, {"m": 11})
        assert fusion.evaluate(*inputs)[0].shape == (11, 8)


def test_equal_layers_are_one_entry(x):
    layer = Layer()
    with torch.no_grad():
        twice = fusion_moe.explain(lambda x: layer(torch.relu(layer(x) @ torch.eye(HIDDEN, dtype=x.dtype))), x)
    assert sum(f.times for f in twice.fusions) == 2


def test_nothing_fused_says_so(x, golden):
    with torch.no_grad():
        golden(str(fusion_moe.explain(lambda x: torch.nn.functional.silu(x) * 2, x)))


def test_a_graph_break_makes_two_graphs(x):
    layer = Layer()

    def broken(x):
        y = layer(x)
        torch._dynamo.graph_break()
        return layer(y)

    with torch.no_grad():
        found = fusion_moe.explain(broken, x)
    assert found.graphs == 2
    assert sum(f.times for f in found.fusions) == 2


def test_a_refusal_is_shown_with_its_sentence(x):
    name = "report_test::twice"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "CompositeExplicitAutograd", lambda x: x * 2)
    torch.library.register_fake(name, torch.empty_like)

    @fusion_moe.translator(name)
    def refuse(fd, x):
        raise Untranslatable(f"{x.type} is not to my taste", expected="something else")

    layer = Layer()
    try:
        with torch.no_grad():
            found = fusion_moe.explain(lambda x: torch.ops.report_test.twice(layer.experts(x, torch.zeros(TOKENS, 1).long(), x[:, :1])), x)
    finally:
        translate.unregister(name)
    assert "refused: bf16[6, 64] is not to my taste; expected something else" in str(found)


def test_a_target_that_is_not_here_is_shown_and_called_unexecuted(x):
    layer = Layer()
    layer.experts.activation_format = "nvfp4"
    with torch.no_grad(), fusion_moe.options.override(target="reference"):
        found = fusion_moe.explain(layer, x, target="sm_100")
        here = layer(x)
    assert "for sm_100 (emitted, unexecuted)" in str(found)
    assert "relayout" in found.stage("assign_layouts")
    assert {s.backend for s in found.fusions[0].segments} == {"none"}
    assert here.isfinite().all()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="activation_format = 'nvfp4' on cpu"):
        layer(x)


def test_an_unknown_target_raises(x):
    with pytest.raises(OptionError, match="target 'sm_42'; expected one of auto, reference, cpu"):
        fusion_moe.explain(Layer(), x, target="sm_42")


def test_a_compiled_model_is_looked_into(x, report):
    with torch.no_grad():
        assert len(fusion_moe.explain(torch.compile(Layer()), x).fusions) == len(report.fusions)


def test_with_gradients_the_forward_pass_is_shown(x, report):
    found = fusion_moe.explain(Layer(), x.clone().requires_grad_())
    assert [s.ops for s in found.fusions[0].segments] == [s.ops for s in report.fusions[0].segments]


def test_saved_whole(report, tmp_path):
    report.save(tmp_path / "r.json")
    report.save(tmp_path / "r.txt")
    assert json.loads((tmp_path / "r.json").read_text())["graphs"] == 1
    assert (tmp_path / "r.txt").read_text() == f"{report}\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "r.txt"]


def test_kernels_have_names_in_the_profiler(x):
    layer = Layer()
    with torch.no_grad(), torch.profiler.profile() as profile:
        layer(x)
    names = {event.name for event in profile.events()}
    assert {"fusion_moe::0[grouped_gemm, reference]", "fusion_moe::1[grouped_gemm, reference]"} <= names


def test_fusions_are_artifacts_of_the_structured_trace(tmp_path):
    script = tmp_path / "traced.py"
    script.write_text(
        "import torch, fusion_moe\n"
        "from fusion_moe.frontends.inductor import FusionPass, compile_calls\n"
        "e = fusion_moe.NVFP4Experts.from_float(torch.randn(2, 32, 16), torch.randn(2, 16, 16))\n"
        "f = torch.compile(e, backend=lambda m, i: compile_calls(FusionPass(fusion_moe.options.current()), m, i))\n"
        "with torch.no_grad(): f(torch.randn(3, 16), torch.zeros(3, 1).long(), torch.ones(3, 1))\n"
    )
    subprocess.run([sys.executable, script], env={"TORCH_TRACE": str(tmp_path / "trace"), "PATH": ""}, check=True, capture_output=True)
    logs = "".join(p.read_text() for p in (tmp_path / "trace").iterdir())
    assert '"name": "fusion_moe_fusions"' in logs
    assert "fd.ops.grouped_mm" in logs
