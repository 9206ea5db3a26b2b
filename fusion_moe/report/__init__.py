"""The report of `fusion_moe.explain`: what was fused, what was not, and why; and how two reports
differ.
"""

from .compiled import last_compiled
from .data import FusionReport, Load, Machine, Measured, NotFusedReport, SegmentReport
from .difference import Difference, diff
from .report import Report
from .trace import explain

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
