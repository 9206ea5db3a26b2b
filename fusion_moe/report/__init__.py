"""The report of `fusion_moe.explain`: what was fused, what was not, and why; and how two reports
differ; and of `fusion_moe.record`: what a run did.
"""

from .data import FusionReport, Load, Machine, Measured, NotFusedReport, SegmentReport
from .difference import Difference, diff
from .recorder import record
from .report import Report
from .running import Comparison, Run
from .trace import explain, last_compiled

__all__ = [
    "Comparison",
    "Difference",
    "FusionReport",
    "Load",
    "Machine",
    "Measured",
    "NotFusedReport",
    "Report",
    "Run",
    "SegmentReport",
    "diff",
    "explain",
    "last_compiled",
    "record",
]
