"""Reports that are made up, for the page and for browsers: numbers that are the same everywhere,
and text that means harm.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from experts import experts

import fusion_moe
from fusion_moe.report import Load, Machine, Measured, NotFusedReport, Report
from fusion_moe.report.data import Listing

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 64, 32, 6, 2
STAGES = (
    "translated",
    "canonicalize",
    "assign_layouts",
    "dequantize_operands",
    "simplify",
    "gather_for_each",
    "segments",
    "schedules",
    "source",
)
HARM = (
    "</script><script>window.harmed = 1</script>"
    """<img src="http://example.com/x" onerror='window.harmed = 1'>"""
)


class Layer(torch.nn.Module):
    """A mixture-of-experts layer with a router and a residual sum."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, dtype=torch.bfloat16)
        self.experts = experts(EXPERTS, HIDDEN, INTERMEDIATE)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, ids, weights)


def explained(**options) -> Report:
    """Of one call, on fake tensors."""
    with torch.no_grad():
        return fusion_moe.explain(
            Layer(), torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), **options
        )


def measured(report: Report) -> Report:
    """A report with times and loads; its second segment runs in plain torch."""
    (fusion,) = report.fusions
    first, second = fusion.segments
    second = replace(
        second,
        backend="reference",
        backend_why="no C++ compiler",
        measured=Measured(1.5e-3, 1.4e-3, 1.9e-3, 10**6, 50e-6),
    )
    first = replace(first, measured=Measured(250e-6, 240e-6, 270e-6, 2_000_000, 100e-6))
    loads = (Load("g0", (2, 3, 0, 7)), Load("g0", (3, 3, 3, 3)))
    fusion = replace(
        fusion,
        segments=(first, second),
        measured=Measured(1.7e-3, 1.7e-3, 1.7e-3, 3_000_000, 150e-6),
        loads=loads,
    )
    machine = Machine(
        "Some CPU",
        4,
        2,
        "avx2",
        "the best tier of this CPU",
        20e9,
        19e9,
        "C++, 256 MiB",
        7,
        0,
        340_000_000,
        339_000_000,
    )
    return replace(report, fusions=(fusion,), machine=machine)


def harmful(report: Report) -> Report:
    """A report whose texts come from somebody who means harm."""
    (fusion,) = report.fusions
    source = f"{HARM}.py:1, in forward: {HARM}"
    segments = tuple(
        replace(s, sources=(source,), boundary=HARM, backend_why=HARM, ops=(HARM,), launched=HARM)
        for s in fusion.segments
    )
    stages = tuple((name, f"{text}\n{HARM}") for name, text in fusion.stages)
    return replace(
        report,
        fusions=(replace(fusion, segments=segments, stages=stages),),
        not_fused=(NotFusedReport(HARM, source, HARM, 1),),
        listings=(Listing(f"{HARM}.py", 1, HARM),),
        float_experts=(HARM,),
        options=((HARM, HARM),),
        target=HARM,
    )
