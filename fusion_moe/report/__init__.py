"""The report of `fusion_moe.explain`: what was fused, what was not, and why."""

from .data import FusionReport, LeftReport, Report, SegmentReport
from .trace import explain

__all__ = ["FusionReport", "LeftReport", "Report", "SegmentReport", "explain"]
