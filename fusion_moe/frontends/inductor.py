"""torch.compile: a post-grad pass of Inductor puts one `fusion_moe::run` call where a region of translated calls stood.

    torch.compile(model, backend="fusion_moe")     Inductor and this pass; takes mode and options as Inductor does
    fusion_moe.enable()                            the pass in every torch.compile of the process; import alone changes nothing

Where there is no host compiler, the same pass runs and everything outside of the regions is run call by call.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import logging
import marshal
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, GraphModule, Node

from .. import options as switches
from .. import target, translate
from ..errors import OptionError
from ..ir.text import text
from ..options import Options
from .fx import Found, Region, find_regions

log = logging.getLogger("fusion_moe")
_PREFIX = "fusion_moe."


class FusionPass(CustomGraphPass):
    """The pass. options: the switches to compile under; found: called with what was found in each graph; then: passes to run after it."""

    def __init__(self, options: Options, found: Callable[[Found], None] | None = None, then: Sequence[Any] = ()):
        self.options, self.found, self.then = options, found, tuple(then)

    def __call__(self, graph: Graph) -> None:
        """Replaces the regions of a graph in place."""
        result = find_regions(graph, lambda device: target.find(self.options.target, device))
        for region in result.regions:
            _replace(graph, region)
        if result.regions:
            stable_topological_sort(graph)
            graph.lint()
        _trace_artifact(result)
        if self.found is not None:
            self.found(result)
        for other in self.then:
            other(graph)

    def uuid(self) -> Any:
        """What compiled code depends on: our sources, the switches, every translator, the passes that follow."""
        translators = [(t.op, _function_hash(t.function)) for t in translate.registered()]
        return ("fusion_moe", _sources_hash(), self.options.key(), tuple(translators), tuple(_pass_uuid(p) for p in self.then))


def _replace(graph: Graph, region: Region) -> None:
    """One call of fusion_moe::run, and getitems of its results, for the nodes of a region."""
    last = region.nodes[-1]
    with graph.inserting_after(last):
        anchor = graph.call_function(torch.ops.aten.detach.default, (last,))  # a place that stays while nodes go
    with graph.inserting_before(anchor):
        sizes = [_size_node(graph, region.sizes[s], region.inputs) for s in region.fusion.symbols]
        call = graph.call_function(torch.ops.fusion_moe.run.default, (text(region.fusion), list(region.inputs), sizes))
        outputs = [n.meta["val"].new_empty(n.meta["val"].shape) for n in region.outputs]  # contiguous, as the program writes them
        call.meta.update(val=outputs, stack_trace=last.meta.get("stack_trace"))
        for i, n in enumerate(region.outputs):
            item = graph.call_function(operator.getitem, (call, i))
            item.meta.update({**n.meta, "val": outputs[i]})
            n.replace_all_uses_with(item, delete_user_cb=lambda user: user is not anchor)
    graph.erase_node(anchor)
    for n in reversed(region.nodes):
        graph.erase_node(n)


def _size_node(graph: Graph, expr: Any, inputs: Sequence[Node]) -> Any:
    """A node (or int) whose value is a symbolic size: one that is there already, or a size of an input."""
    for n in graph.nodes:
        val = n.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr == expr:
            return n
    for n in inputs:
        for dim, size in enumerate(n.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr == expr:
                node = graph.call_function(torch.ops.aten.sym_size.int, (n, dim))
                node.meta["val"] = size
                return node
    raise AssertionError(f"no node shows the size {expr}")


def _trace_artifact(found: Found) -> None:
    """The fusions as a page of tlparse's report and in the log."""
    lines = [f"{text(r.fusion)}\n" for r in found.regions] + [f"not fused: {x.op} at {x.source or '?'}: {x.why}" for x in found.left]
    report = "\n".join(lines) or "no grouped product in this graph"
    log.debug("%s", report)
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": "fusion_moe_fusions", "encoding": "string"}, payload_fn=lambda: report
    )


# --------------------------------------------------------------------------------------------------------------- torch.compile


def backend(model: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """`torch.compile(..., backend="fusion_moe", mode=..., options=...)`: Inductor with the pass.

    options: Inductor's, and ours as "fusion_moe.<name>" (see options.py). OptionError for one that neither has.
    """
    own = {k[len(_PREFIX) :]: v for k, v in (options or {}).items() if k.startswith(_PREFIX)}
    rest = {k: v for k, v in (options or {}).items() if not k.startswith(_PREFIX)}
    return compile_with(FusionPass(switches.current().replace(**own), then=_set_passes(rest)), model, inputs, mode, rest)


def compile_with(fusion_pass: FusionPass, model: GraphModule, inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any]) -> Any:
    """A graph compiled by Inductor with this pass, or without code of Inductor's own where the host has no compiler."""
    _check_options(options)
    inductor = torch._TorchCompileInductorWrapper(mode, dict(options), None)
    patches = {**inductor.config, "post_grad_custom_pre_pass": fusion_pass}
    if any(t.device.type == "cpu" for t in inputs if isinstance(t, torch.Tensor)) and not has_compiler():
        return compile_calls(fusion_pass, model, inputs)
    return compile_fx(model, inputs, config_patches=patches)


def compile_calls(fusion_pass: FusionPass, model: GraphModule, inputs: Sequence[Any]) -> Any:
    """A graph taken apart as Inductor takes it apart, given to the pass, and then run call by call."""

    def inner(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        gm.graph.eliminate_dead_code()
        fusion_pass(gm.graph)
        gm.recompile()

        def run(args: list[Any]) -> Any:
            taken = list(args)
            args.clear()  # the caller hands its inputs over
            return gm.forward(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_fx(model, inputs, inner_compile=inner, config_patches={"force_disable_caches": True})


def enable() -> None:
    """Adds the pass to every torch.compile with Inductor in this process, before a pass that is set already."""

    current = config.post_grad_custom_pre_pass
    if not isinstance(current, FusionPass):
        config.post_grad_custom_pre_pass = FusionPass(switches.current(), then=_set_passes({}))


def disable() -> None:
    """Takes back what `enable` did."""

    current = config.post_grad_custom_pre_pass
    if isinstance(current, FusionPass):
        config.post_grad_custom_pre_pass = current.then[0] if current.then else None


@functools.cache
def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler; says once if it does not."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        log.warning("no C++ compiler found: fusions are compiled, everything else runs call by call. Install g++ for Inductor's own kernels.")
        return False
    return True


def _set_passes(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The pass that the user has set, in options or in Inductor's config."""
    given = options.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    passes = given if isinstance(given, (list, tuple)) else [given]
    return tuple(q for p in passes if p is not None for q in (p.then if isinstance(p, FusionPass) else (p,)))


def _check_options(options: Mapping[str, Any]) -> None:
    known = config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            near = difflib.get_close_matches(name, [*known, *(_PREFIX + o for o in Options.__dataclass_fields__)], 1)
            raise OptionError(
                f"unknown option {name!r}", expected=f"an option of Inductor, or {_PREFIX}<name> with one of {', '.join(Options.__dataclass_fields__)}",
                todo=f"did you mean {near[0]!r}?" if near else "", where="torch.compile(options=...)",
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------- cache keys


@functools.cache
def _sources_hash() -> bytes:
    """Of every Python file of the library."""
    return get_hash_for_files(tuple(sorted(str(p) for p in Path(__file__).parents[1].rglob("*.py"))))


def _function_hash(function: Callable[..., Any]) -> str:
    """Of a translator: its code, and the file it stands in for what it calls there."""
    code = function.__code__
    digest = hashlib.sha256(marshal.dumps(code))
    path = Path(code.co_filename)
    if path.is_file():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _pass_uuid(other: Any) -> Any:
    return other.uuid() if isinstance(other, CustomGraphPass) else _function_hash(other)
