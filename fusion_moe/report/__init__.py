"""The report of `fusion_moe.explain`: what was fused, what was not, and why."""

from .data import FusionReport, Load, Machine, Measured, NotFusedReport, Report, SegmentReport
from .trace import explain

__all__ = ["FusionReport", "Load", "Machine", "Measured", "NotFusedReport", "Report", "SegmentReport", "explain"]
