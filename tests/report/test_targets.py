"""fusion_moe.explain for GPUs that are not there: stages, definitions, and who would run them."""

import pytest
import torch
from layer import Layer
from pages import STAGES

import fusion_moe
from fusion_moe.integrations.nvfuser import library
from fusion_moe.ir.text import parse

HIDDEN, TOKENS, TOP_K = 256, 6, 2  # the 4-bit product takes them


def explained(target, activation_format="bf16"):
    with torch.device("meta"):
        layer = Layer(activation_format, hidden=HIDDEN, inner=128)
        x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        return fusion_moe.explain(layer, x, target=target)


@pytest.fixture(scope="module")
def blackwell():
    return explained("sm_100", "nvfp4")


@pytest.fixture(scope="module")
def hopper():
    return explained("sm_90")


def segments(report):
    return [s for f in report.fusions for s in f.segments]


def test_blackwell(blackwell, golden):
    golden(blackwell.details())
    assert blackwell.stages == STAGES
    assert max(map(len, blackwell.details().splitlines())) <= 120
    assert "relayout" in blackwell.stage("assign_layouts")
    assert "cutlass_nvfp4_grouped_mm" in blackwell.stage("schedules")


def test_hopper(hopper, golden):
    golden(hopper.details())
    assert hopper.stages == STAGES
    assert "relayout" not in hopper.stage("assign_layouts")


def test_they_are_unexecuted_and_one_was_never_tried(blackwell, hopper):
    assert not blackwell.executed
    assert not hopper.executed
    assert "never run on compute capability 10.0" in segments(blackwell)[0].backend_why
    assert "never run" not in segments(hopper)[0].backend_why


def test_nvfuser_rounds_where_the_program_does(blackwell, hopper):
    assert {(s.kind, s.roundings) for report in (blackwell, hopper) for s in segments(report)} == {
        ("nvfuser", ())
    }


def test_what_nvfuser_refuses_runs_in_plain_torch_for_a_reason():
    """Experts of a width that the 4-bit product does not take"""
    x, ids = (
        torch.empty(TOKENS, 64, device="meta"),
        torch.empty(TOKENS, TOP_K, dtype=torch.long, device="meta"),
    )
    narrow = fusion_moe.NVFP4Experts.from_float(
        torch.ones(2, 64, 64, device="meta"), torch.ones(2, 64, 32, device="meta"), "nvfp4"
    )
    with torch.no_grad():
        report = fusion_moe.explain(
            narrow, x, ids, torch.empty(TOKENS, TOP_K, device="meta"), target="sm_100"
        )
    found = {s.kind: s.backend for s in segments(report)}
    assert found == {"nvfuser": "nvfuser", "single": "reference"}
    products = [s for s in segments(report) if s.ops == ("grouped_mm",)]
    assert [s.backend_why.split(": ", 2)[1] for s in products] == [
        "K = 64 and N = 64 of a 4-bit product",
        "K = 32 and N = 64 of a 4-bit product",
    ]


def test_without_nvfuser_the_source_says_what_to_install(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    library.nvfuser.cache_clear()
    try:
        source = explained("sm_90").stage("source")
    finally:
        library.nvfuser.cache_clear()
    head, hint, program = source.split("\n", 2)
    assert head == "# fusion0.0: nvfuser"
    assert hint.startswith(
        "# source not shown: nvFuser is not installed; pip install "
        "'.[nvfuser]' in a clone of fusion_moe"
    )
    assert [op.kind.name for op in parse(program).ops].count("grouped_mm") == 2


@pytest.mark.nvfuser
def test_with_nvfuser_the_source_is_its_definition(blackwell, hopper):
    four_bits, bf16 = blackwell.stage("source"), hopper.stage("source")
    assert four_bits.startswith("# fusion0.0: nvfuser\ndef nvfuser_fusion(fd : FusionDefinition)")
    assert four_bits.count("fd.ops.cutlass_nvfp4_grouped_mm(") == 2
    # the weights, as they are
    assert four_bits.count("dtype=DataType.Float4_e2m1fn, is_cpu=False") == 2
    assert bf16.count("fd.ops.grouped_mm(") == 2
    assert "Float4_e2m1fn" not in bf16
