"""The report of what torch.compile compiled in this process."""

from __future__ import annotations

from torch.fx import Graph

from .. import options
from ..errors import UnsupportedError
from ..frontends.compiled import kept
from ..frontends.float_experts import float_experts
from ..frontends.inductor.compile_graph import compile_calls
from .build import Seen, report_of
from .report import Report


def last_compiled() -> Report:
    """What torch.compile(..., backend="fusion_moe") has fused so far in this process, whether it
    compiled code or found it in a cache.

    Covers the forward passes of those of the last 256 graphs that were compiled under the options
    of the latest one. They are traced again, on fake tensors, so nothing is computed.
    UnsupportedError if there is none.
    """
    graphs = kept()
    if not graphs:
        raise UnsupportedError(
            "no graph was compiled in this process",
            expected='a call of torch.compile(model, backend="fusion_moe")',
            todo="fusion_moe.explain(model, ...) needs none",
            where="last_compiled",
        )
    seen, switches = Seen(), graphs[-1].options

    def look(graph: Graph, is_inference: bool = False) -> None:
        seen.add(graph, switches)

    with options.using(switches):
        for compiled in graphs:
            if compiled.options == switches:
                seen.add_float_experts(float_experts(compiled.model))
                compiled.again(compile_calls, look)
    return report_of(seen, switches)
