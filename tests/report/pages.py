"""Reports that are made up, for the page and for browsers: numbers that are the same everywhere,
and text that means harm.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from layer import Layer

import fusion_moe
from fusion_moe.recorder import Run
from fusion_moe.recorder.data import KernelRun, LayerRun, RunData, Span
from fusion_moe.report import Load, Machine, Measured, NotFusedReport, Report
from fusion_moe.report.data import Listing

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 64, 32, 6, 2
STAGES = (
    "translated",
    "canonicalize",
    "assign_layouts",
    "sink_quantize",
    "lower_operands",
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
        "Some CPU", 4, 2, 7, 0, 20e9, 19e9, "C++, 256 MiB", "avx2", 340_000_000, 339_000_000
    )
    return replace(report, fusions=(fusion,), machine=machine)


def harmful(report: Report) -> Report:
    """A report whose texts come from somebody who means harm."""
    (fusion,) = report.fusions
    source = f"{HARM}.py:1, in forward: {HARM}"
    texts = dict.fromkeys(("boundary", "backend_why", "launched", "ir", "source"), HARM)
    segments = tuple(replace(s, sources=(source,), ops=(HARM,), **texts) for s in fusion.segments)
    programs = {name: f"{text}\n{HARM}" for name, text in fusion.programs.items()}
    return replace(
        report,
        fusions=(replace(fusion, segments=segments, programs=programs),),
        not_fused=(NotFusedReport(HARM, source, HARM, 1),),
        listings=(Listing(f"{HARM}.py", 1, HARM),),
        float_experts=(HARM,),
        options={HARM: HARM},
        target=HARM,
    )


def harmful_run() -> Run:
    """A run whose every name means harm."""
    kernel = KernelRun(
        HARM, HARM, {HARM: 1}, [HARM], 2, 2e-3, 1e-3, 3e-3, 4e-3, 9, 9, 1e-3, 1e-4, 1e-5
    )
    kernel = replace(kernel, sources=[HARM])
    span = Span(HARM, HARM, 0.1, 0.2)
    layer = LayerRun(HARM, 2, [1, 2], [[1, 1], [0, 1]], offloaded={"hits": 1, "misses": 2})
    data = RunData(
        [layer], [kernel], [span], 2, [0.0, 0.5], 1.0, HARM, 0.6, 0.2, [span], [span], [span]
    )
    return Run(data=replace(data, missed=1, made=HARM, where=HARM, of=HARM))
