"""What fusion_moe.explain says of the CUDA kernels that sizes launch, and of their workspace."""

from __future__ import annotations

import json
import re

import pytest
import torch
from bad_calls import messages
from experts import experts_of_ones
from kernel_tables import TABLE, use

import fusion_moe
from fusion_moe import options
from fusion_moe.backends.cuda.table import ALWAYS, Regime
from fusion_moe.backends.cuda.variants import SETS
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.errors import OptionError, UnsupportedError
from fusion_moe.runtime import nvrtc

pytestmark = pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
EXPERTS, SLOTS, HIDDEN, INTERMEDIATE = 8, 2, 128, 64


def report(
    tokens: int, target: str | None = None, gpu: str | tuple[int, int] | None = None
) -> fusion_moe.report.Report:
    """Of an H200, unless another target is asked for."""
    module = experts_of_ones(EXPERTS, HIDDEN, INTERMEDIATE)
    fusion_moe.prepare_(module, target or "cuda")
    x, ids = (
        torch.ones(tokens, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(tokens, SLOTS, dtype=torch.long),
    )
    gpu = gpu or ("H200" if target is None else None)
    with torch.no_grad():
        return fusion_moe.explain(module, x, ids, torch.ones(tokens, SLOTS), target=target, gpu=gpu)


def launched(found: fusion_moe.report.Report) -> list[str]:
    return [s.launched for f in found.fusions for s in f.segments]


def test_kernels_follow_the_sizes():
    # one: which tracers take for a constant
    assert launched(report(1)) == ["small_m_1x1x4x2x2 with route", "small_m_1x1x8x1x3, combine"]
    assert launched(report(4000)) == [
        "route, reorder_activations, large_m_160x3; result in fragment order, for segment 1",
        "large_m_160x3, combine; activations in fragment order, of segment 0",
    ]


def test_few_rows_in_fp8_are_quantized_where_they_are_read():
    """No kernel is between the products then, or before them."""
    encoding = ENCODINGS["fp8"]
    weights = [list(quantize(torch.ones(EXPERTS, n, 128), encoding)) for n in (256, 128)]
    how = {"weight_format": "fp8", "activation_format": "fp8"}
    x, ids, w = torch.ones(3, 128).bfloat16(), torch.zeros(3, SLOTS).long(), torch.ones(3, SLOTS)
    found = launched(
        fusion_moe.explain(
            lambda *given: torch.ops.fusion_moe.fused_experts(*given, *weights, **how),
            *(x, ids, w),
            target="cuda",
            gpu="H200",
        )
    )
    later = "result quantized by the product that reads it"
    assert found == [
        later,
        f"small_m_1x1x4x2x2 with route; {later}",
        "small_m_1x1x8x2x2, combine",
    ]


def test_kernels_follow_the_gpu(golden):
    ada = report(4000, gpu="L40S")
    assert all(
        "large_mma" in kernels and "fragment order" not in kernels for kernels in launched(ada)
    )
    assert [(f.gpu, f.sizes) for f in ada.fusions] == [
        ("L40S (sm_89), never run on compute capability 8.9", {})
    ]
    assert "on L40S (sm_89), never run on compute capability 8.9, workspace" in ada.details()
    assert report(4000, "cuda", "H100").fusions[0].gpu == "H100 (sm_90a)"
    assert report(4000, gpu="rtx 4090").fusions[0].gpu.startswith("RTX 4090 (sm_89), never run")
    of_8_6 = report(4000, gpu="8.6").fusions[0].gpu
    assert of_8_6.startswith("A10 (sm_86), never run on compute capability 8.6")
    assert report(4000, gpu=(8, 6)).fusions[0].gpu == of_8_6
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    golden(
        messages(
            {
                "measured": lambda: fusion_moe.explain(linear, x, gpu="A100", measure=True),
                "unknown": lambda: report(1, gpu="H300"),
                "of a CPU": lambda: report(1, "cpu", "H200"),
            }
        )
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_have_the_layout_that_modules_give_them_on_that_gpu(device):
    """Without prepare_; the module itself stays as it is."""
    module = experts_of_ones(EXPERTS, HIDDEN, INTERMEDIATE).to(device)
    x, ids = torch.ones(4000, HIDDEN, dtype=torch.bfloat16), torch.zeros(4000, SLOTS).long()

    def explained() -> fusion_moe.report.Report:
        with torch.no_grad():
            return fusion_moe.explain(module, x, ids, torch.ones(4000, SLOTS), gpu="A100")

    assert launched(explained()) == launched(report(4000, gpu="A100"))
    assert module.weight_layout == "linear"
    with options.override(order_weights=False):
        assert all("small_m" in kernels for kernels in launched(explained()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="some GPU is here")
def test_the_summary_names_the_gpu_that_is_not_here():
    def said(gpu: str) -> str:
        return " ".join(str(report(4, gpu=gpu)).split())

    never = "; never run on compute capability"
    assert f"unexecuted: for an A100, which is not here{never} 8.0" in said("a100")
    assert f"for compute capability 8.9; an L40S stands for it{never} 8.9" in said("8.9")
    assert f"for a B200, which is not here{never} 10.0" in said("NVIDIA B200")
    assert "for an H100, which is not here bits" in said("H100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what this GPU launches")
def test_without_a_gpu_an_h200_is_meant():
    assert report(3, "cuda").fusions[0].gpu == "H200 (sm_90a)"


def test_concurrent_kernels_say_which_groups_are_theirs(monkeypatch):
    use(
        monkeypatch,
        tiled=(Regime(ALWAYS, SETS["M8"], ((12, SETS["M8"]), (None, SETS["M80"]))), *TABLE.tiled),
    )
    high, low = (
        "large_m_80x4 (groups of more than 12 rows)",
        "small_m_1x1x8x1x3 (groups of 1 to 12 rows)",
    )
    assert f"{high}, {low}, combine" in launched(report(2 * EXPERTS))


def test_a_pinned_kernel_is_what_runs():
    with options.override(cuda_variant="large_m_80x4"):
        assert [re.findall("[a-z]+_m_[^,;]*", kernels) for kernels in launched(report(1))] == [
            ["large_m_80x4"]
        ] * 2
        with pytest.raises(
            UnsupportedError,
            match=r"'large_m_80x4' does not fit .* on L40S; "
            r"expected one of small_m_1x1x1x1x3, ",
        ):
            report(1, gpu="L40S")
    with (
        options.override(cuda_variant="large_m_81x4"),
        pytest.raises(OptionError, match="'large_m_81x4'; expected one of auto, small_m_1x1x1"),
    ):
        report(1)


def test_workspace_is_what_no_result_holds():
    """At a time: the rows that are summed lie where those before the first product, in fragment
    order, were.
    """
    rows = 4000 * SLOTS
    row_of, slot_of, x, h, y = (
        rows * 4,
        rows * 4,
        4000 * HIDDEN * 2,
        rows * INTERMEDIATE * 2,
        rows * HIDDEN * 2,
    )
    (found,) = report(4000).fusions
    alone = sum(-(-n // 256) * 256 for n in (row_of, slot_of, x, h, y, EXPERTS * 4))
    assert slot_of + h + y <= found.workspace < alone
    assert found.workspace == sum(-(-n // 256) * 256 for n in (slot_of, h, y)) + 256


def test_what_runs_while_kernels_are_compiled():
    """Kernels that no size changes: those of one call serve another."""
    with options.override(background_compile=True):
        few, many = (
            report(tokens).stage("choice").split("while these are compiled, kernels for any size: ")
            for tokens in (1, 4000)
        )
    assert [len(said) for said in (few, many)] == [2, 2]
    names = [re.findall(r"^    (\w+): \d+ blocks", said[1], re.MULTILINE) for said in (few, many)]
    assert names[0] == names[1]
    assert [name.startswith(("large_m", "small_m")) for name in names[0]].count(True) == 2
    assert "while these are compiled" not in report(1).stage("choice")


def test_said_in_the_table_and_in_json():
    found = report(4000)
    (fusion,) = found.fusions
    told = " ".join(found.details().split())
    assert (
        f"fusion0 on H200 (sm_90a), workspace {fusion.workspace / 1e6:.3g} MB fusion0.0 "
        f"{fusion.segments[0].launched}"
    ) in told
    said = json.loads(found.to_json())["fusions"][0]
    assert (said["gpu"], said["workspace"]) == ("H200 (sm_90a)", fusion.workspace)


def test_the_whole_choice_is_a_stage(golden):
    golden(report(4000).stage("choice"))


def test_sources_are_of_what_runs():
    few, many = (report(tokens).stage("source") for tokens in (1, 4000))
    assert "large_m.cuh" not in few
    assert many.count("LargeM<Segment, 160, 3, 1>::run(s, size_class);") == 2
    assert many.count("using Columns = FragmentOrder;") == 1


def test_the_cpu_has_nothing_to_say():
    found = report(3, "cpu")
    assert launched(found) == ["", ""]
    assert [(f.gpu, f.workspace) for f in found.fusions] == [("", None)]
    assert "choice" not in found.stages
