"""The log of the regions found in a graph."""

from __future__ import annotations

import logging

from torch._logging._internal import trace_log, trace_structured

from ...ir.text import text
from ...messages import log, warn_once
from ..regions import Found


def is_logged() -> bool:
    """Whether anybody reads what `log_found` logs besides warnings: with TORCH_TRACE or TORCH_LOGS,
    or at DEBUG.
    """
    return log.isEnabledFor(logging.DEBUG) or bool(trace_log.handlers)


def log_found(result: Found) -> None:
    """Reports the fusions as a page of tlparse's report and in the log, and translators at fault as
    warnings.
    """
    lines = [f"{text(r.fusion)}\n" for r in result.regions] + [
        f"not fused: {x.op} at {x.source or '?'}: {x.why}" for x in result.not_fused
    ]
    report = "\n".join(lines) or "no grouped product in this graph"
    log.debug("%s", report)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fusion_moe_fusions", "encoding": "string"},
        payload_fn=lambda: report,
    )
    for x in result.not_fused:
        if x.broken:
            warn_once(f"{x.op} at {x.source or '?'} is not fused: {x.why}")
