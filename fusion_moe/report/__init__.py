"""The report of `fusion_moe.explain`: what was fused, what was not, and why; and how two reports
differ.

trace.py, fakes.py, build.py, backward.py, kernels.py, cost.py, outside.py, measure.py, listings.py,
advice.py, repro.py
                 collect; data.py has what they found, and knows no form
summary.py, details.py, html/, output.py
                 forms; report.py has all of them
difference.py    two reports compared
"""

from __future__ import annotations

from .data import FusionReport, Load, Machine, Measured, NotFusedReport, SegmentReport
from .difference import Difference, diff
from .report import Report
from .trace import explain, last_compiled

__all__ = [
    "Difference",
    "FusionReport",
    "Load",
    "Machine",
    "Measured",
    "NotFusedReport",
    "Report",
    "SegmentReport",
    "diff",
    "explain",
    "last_compiled",
]
