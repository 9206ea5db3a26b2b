"""print(report): a screenful at the terminal's width; repr(report) is a line; report.details() has
the rest.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pages import EXPERTS, HIDDEN, TOKENS, TOP_K, Layer

import fusion_moe
from fusion_moe.report import Measured, NotFusedReport
from fusion_moe.report.data import Share

X = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def report():
    with torch.no_grad():
        return fusion_moe.explain(Layer(), X, target="reference")


@pytest.fixture(scope="module")
def hopper():
    with torch.no_grad():
        return fusion_moe.explain(Layer(), X, target="sm_90")


@pytest.fixture(params=[70, 80, 120])
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def told(report):
    """A report with one kernel, one segment in plain torch, and more reasons than are shown."""
    (fusion,) = report.fusions
    first, second = fusion.segments
    kernel = replace(first, backend="cpu", backend_why="compiles it whole")
    torchs = replace(second, backend_why="no C++ compiler: CXX='/nowhere/g++' does not run")
    others = tuple(
        NotFusedReport(
            f"aten.op{i}.default", "model.py:3, in forward: ...", f"reason {i % 9}", 1 + i
        )
        for i in range(20)
    )
    return replace(
        report,
        target="cpu",
        fusions=(replace(fusion, times=3, segments=(kernel, torchs)),),
        not_fused=others,
    )


def test_at_80_columns(report, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    golden(str(told(report)))


def test_what_is_not_here(hopper, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    golden(str(hopper))


def test_it_fits_a_screen(report, hopper, width):
    for text in map(str, (report, hopper, told(report))):
        assert max(map(len, text.splitlines())) <= width
        assert text.count("\n") < 40


def test_repr_is_one_line(report):
    assert repr(report) == (
        "<Report of fusion_moe.explain: 1 graph, 1 fusion for reference, 97.9% of flops fused>"
    )


def test_shares_come_before_counts_and_plain_torch_before_kernels(report):
    text = str(told(report))
    order = [
        "of flops",
        "of bytes",
        "of 12 calls",
        "! plain torch runs",
        "! fusion0.1",
        "fusion0.0",
        "not fused",
        "report.details()",
    ]
    places = [text.index(said) for said in order]
    assert places == sorted(places)


def test_reasons_are_grouped(report):
    text = str(told(report))
    assert text.count("reason 0") == 1
    assert "aten.op0.default, aten.op9.default x 10, aten.op18.default x 19: reason 0" in " ".join(
        text.split()
    )
    assert "and 3 more" in text


def test_only_rich_colours(report):
    rich = pytest.importorskip("rich.console")
    assert "\x1b" not in str(report)
    for terminal in (True, False):
        console = rich.Console(
            force_terminal=terminal, width=80, color_system="standard" if terminal else None
        )
        with console.capture() as printed:
            console.print(told(report))
        assert ("\x1b[" in printed.get()) == terminal


def test_nothing_fused():
    with torch.no_grad():
        none = fusion_moe.explain(torch.relu, X)
    assert "nothing: no call makes a grouped product that can join others" in str(none)
    no_graph = str(fusion_moe.explain(lambda: 3))
    assert "nothing: no graph was captured from this call, which calls no operation" in no_graph
    assert "look next" in str(none)
    assert "look next" not in no_graph


def test_times_stand_below_their_segments(report):
    first, second = report.segments
    times = Measured(2e-3, 1e-3, 3e-3, 10**6, 1e-6)
    (fusion,) = report.fusions
    text = str(
        replace(
            report, fusions=(replace(fusion, segments=(replace(first, measured=times), second)),)
        )
    )
    assert "    2 ms, 2,000 times its memory bound\n" in text


# How much is fused --------------------------------------------------------------------------------


def test_flops_and_bytes_outside_are_those_counted_by_hand(report):
    probabilities = TOKENS * EXPERTS
    assert report.flops.unfused == 2 * TOKENS * HIDDEN * EXPERTS + softmax_flops(probabilities)
    router = (TOKENS * HIDDEN + EXPERTS * HIDDEN + EXPERTS + probabilities) * 2
    topk = probabilities * 2 + TOKENS * TOP_K * (2 + 8)
    assert report.bytes.unfused >= router + topk


def softmax_flops(elements):
    """Its decomposition in float32: to float and back, maximum, difference, exponential, sum,
    quotient.
    """
    return 7 * elements


def test_costs_of_fusions_count_as_often_as_they_occur(report):
    segments = report.segments
    assert report.flops.fused == sum(s.flops for s in segments)
    assert report.bytes.fused == sum(
        s.bytes_read + s.bytes_written + s.bytes_avoided for s in segments
    )
    assert told(report).flops.fused == 3 * report.flops.fused


def test_of_a_table_the_rows_that_are_gathered_count():
    table = torch.nn.Embedding(50_000, HIDDEN)
    with torch.no_grad():
        found = fusion_moe.explain(table, torch.arange(3))
    assert found.unfused_bytes == 2 * 3 * HIDDEN * 4 + 3 * 8


@pytest.mark.parametrize(
    ("fused", "unfused", "text"),
    [
        (0, 7, "0%"),
        (7, 0, "100%"),
        (10**9, 1, "99.9%"),
        (1, 10**9, "0.1%"),
        (1, 3, "25%"),
        (None, 3, "?"),
    ],
)
def test_shares(fused, unfused, text):
    assert str(Share(fused, unfused)) == text


def test_what_changes_a_program_is_told(report):
    assert (report.version, report.options["contract_rounding"]) == (
        fusion_moe.__version__,
        "True",
    )
    (listing,) = report.listings
    assert (listing.file, listing.text.splitlines()[0].strip()) == (
        "layer.py",
        "def forward(self, x: Tensor) -> Tensor:",
    )


def test_what_a_rows_bits_depend_on():
    """Our products unless order="row", and torch's products and attention."""

    layer = Layer()

    def attend(x):
        y = layer(x)[None, None].float()
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)

    def section():
        with torch.no_grad():
            text = " ".join(str(fusion_moe.explain(attend, X, target="cpu")).split())
        return text.partition("depend on its batch ")[2].partition(" look next")[0]

    names = "aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default"
    torchs = f"{names}: torch chooses the kernel by sizes"
    ours = "the order of a product's sums is chosen by the number of rows; order='row' fixes it"
    assert section() == f"fusion0.0, fusion0.1: {ours} {torchs}"
    with fusion_moe.options.override(order="row"):
        assert section() == torchs
