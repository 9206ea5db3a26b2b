"""The pass that Inductor calls on a graph: finds its regions and replaces each by a call of
`fusion_moe::run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V
from torch.fx import Graph

from ...definitions import translate
from ...definitions.digest import library_digest
from ...messages import log, warn_once
from ...options import Options
from ..constants import store_constants
from ..regions import Found, find_regions, limit
from ..rewrite import replace_regions
from .log_found import log_found

# torch >= 2.12 has passes that are told whether the graph is for inference; a pass that follows
# ours may be one
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


class FusionPass(_InferenceAware):
    """The pass. options: the options to compile under; found: called with what was found in each
    graph; then: passes to run after it.
    """

    def __init__(
        self,
        options: Options,
        found: Callable[[Found], None] | None = None,
        then: Sequence[Any] = (),
    ):
        self.options, self.found, self.then = options, found, tuple(then)

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        """Replaces the regions of a graph in place."""
        result = find_regions(graph, self.options)
        if config.cpp_wrapper and not V.aot_compilation:
            _leave_single_results(result)
        limit(result, self.options)
        if config.freezing and not V.aot_compilation:  # whose constants may be updated
            result.regions = store_constants(graph, result.regions, self.options)
        replace_regions(graph, result.regions, self.options)
        log_found(result)
        if self.found is not None:
            self.found(result)
        for other in self.then:
            aware = _InferenceAware is not CustomGraphPass and isinstance(other, _InferenceAware)
            other(graph, is_inference) if aware else other(graph)

    def uuid(self) -> Any:
        """What compiled code depends on: our sources, the options, users' translators by their
        versions, the passes that follow.

        None, with which Inductor caches nothing, if one of these has no version or uuid; if
        the option bisect_limit is set: what a graph gets then depends on the graphs before it; and
        under freezing: code then has weights of its own, which Inductor's key does not know.
        """
        if self.options.bisect_limit != Options().bisect_limit or config.freezing:
            return None
        users = [t for t in translate.registered() if t.of_user]
        if unknown := [t.op for t in users if not t.version]:
            log.info(
                "compiled code is not cached: the translator of %s has no version; pass one to "
                "fusion_moe.translator",
                ", ".join(unknown),
            )
        others = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.then)
        if unknown or None in others:
            return None
        translators = tuple((t.op, t.version, t.as_stored) for t in users)
        return "fusion_moe", library_digest(), self.options.key(), translators, others


def _leave_single_results(result: Found) -> None:
    """Takes out the regions with one result: Inductor's C++ wrapper, unless it is AOTInductor's,
    crashes on a list of one tensor.
    """
    left = [r for r in result.regions if len(r.outputs) == 1]
    if left:
        why = "torch's cpp_wrapper cannot call a program with one result"
        warn_once(f"calls are not fused: {why}; leave out cpp_wrapper to fuse them")
        result.leave(left, why)


def passes_set(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The passes that the user has set, in options or in Inductor's config, except ours."""
    own = options.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    passes = own if isinstance(own, (list, tuple)) else [own]
    return tuple(
        q for p in passes if p is not None for q in (p.then if isinstance(p, FusionPass) else (p,))
    )
