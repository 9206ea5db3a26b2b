"""The report of `fusion_moe.explain`: what was fused, what was not, and why."""

from .data import FusionReport, LeftReport, Load, Machine, Measured, Report, SegmentReport
from .trace import explain

__all__ = ["FusionReport", "LeftReport", "Load", "Machine", "Measured", "Report", "SegmentReport", "explain"]
