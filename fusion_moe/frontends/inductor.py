"""torch.compile: a post-grad pass of Inductor puts one `fusion_moe::run` call where a region of translated calls stood.

    torch.compile(model, backend="fusion_moe")     Inductor and this pass; takes mode and options as Inductor does
    fusion_moe.enable()                            the pass in every torch.compile of the process; import alone changes nothing

Where there is no host compiler, the same pass runs and everything outside of the regions is run call by call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import ShortenTraceback
from torch._inductor import config, custom_graph_pass
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch.fx import Graph, GraphModule, Node

from .. import options as switches
from .. import target, translate
from ..compile import program_of
from ..errors import Error, OptionError, did_you_mean
from ..ir.text import one_line
from ..options import Options
from ..progress import waiting
from . import fingerprint
from .compiled import keep
from .float_experts import warn_of_float_experts
from .log_found import is_logged, log, log_found
from .regions import Found, Region, find_regions
from .size_sources import SizeSource
from .walk import mT_dims
from .warn import warn_once

_PREFIX = "fusion_moe."

# torch >= 2.12 has passes that get to know whether the graph is one of inference; a pass that follows ours may be one
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


class FusionPass(_InferenceAware):
    """The pass. options: the switches to compile under; found: called with what was found in each graph; then: passes to run after it."""

    def __init__(self, options: Options, found: Callable[[Found], None] | None = None, then: Sequence[Any] = ()):
        self.options, self.found, self.then = options, found, tuple(then)

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        """Replaces the regions of a graph in place."""
        result = find_regions(graph, self.options)
        replace_regions(graph, result.regions, self.options)
        log_found(result)
        if self.found is not None:
            self.found(result)
        for other in self.then:
            aware = _InferenceAware is not CustomGraphPass and isinstance(other, _InferenceAware)
            other(graph, is_inference) if aware else other(graph)

    def uuid(self) -> Any:
        """What compiled code depends on: our sources, the switches, every translator, the passes that follow.

        None, with which Inductor caches nothing, if one of them has no fingerprint.
        """
        translators = {t.op: fingerprint.of_function(t.function) for t in translate.registered()}
        others = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.then)
        unknown = [op for op, digest in translators.items() if digest is None]
        if unknown:
            warn_once(f"compiled code is not cached: the translator of {', '.join(unknown)} depends on values without a fingerprint")
        if unknown or None in others:
            return None
        return ("fusion_moe", fingerprint.of_library(), self.options.key(), tuple(translators.items()), others)


def replace_regions(graph: Graph, regions: Sequence[Region], with_: Options) -> list[Node]:
    """Puts one call of fusion_moe::run where each region stands, in place. -> these calls, in the order of the regions."""
    now: dict[Node, Node] = {}  # an output of a region -> what took its place
    calls = [_replace(graph, region, with_, now) for region in regions]
    if calls:
        stable_topological_sort(graph)
        graph.lint()
    return calls


def _replace(graph: Graph, region: Region, with_: Options, now: dict[Node, Node]) -> Node:
    """One call of fusion_moe::run, and getitems of its results, for the nodes of a region."""
    last = region.nodes[-1]
    with graph.inserting_before(last.next):
        sizes = [_size_node(graph, region.sizes[s], now) for s in region.fusion.symbols]
        inputs = [_as_stored(n, now.get(n, n)) if n in region.transposed else now.get(n, n) for n in region.inputs]
        program = one_line(region.fusion)
        call = graph.call_function(_operation(program, region, with_), (program, inputs, sizes, with_.key()))
        outputs = [n.meta["val"].new_empty(n.meta["val"].shape) for n in region.outputs]  # contiguous, as the program writes them
        call.meta.update(val=outputs, stack_trace=last.meta.get("stack_trace"))
        for i, n in enumerate(region.outputs):
            part = graph.call_function(operator.getitem, (call, i))
            part.meta.update({**n.meta, "val": outputs[i]})
            now[n] = _in_order_of(n, part)
            n.replace_all_uses_with(now[n])
    for n in reversed(region.nodes):
        graph.erase_node(n)
    return call


def _in_order_of(n: Node, made: Node) -> Node:
    """What a program made, its dimensions in memory in the order in which `n` had them: views after it count on that."""
    order, _ = compute_elementwise_output_logical_to_physical_perm(n.meta["val"])
    if order == sorted(order):
        return made
    back = [order.index(d) for d in range(len(order))]
    made = _called(n, torch.ops.aten.permute.default, made, order)
    made = _called(n, torch.ops.aten.clone.default, made, memory_format=torch.contiguous_format)
    return _called(n, torch.ops.aten.permute.default, made, back)


def _as_stored(n: Node, x: Node) -> Node:
    """The contiguous tensor that `x`, which took the place of `n`, is the transposed view of."""
    return _called(n, torch.ops.aten.permute.default, x, mT_dims(x.meta["val"]))


def _called(n: Node, op: OpOverload, x: Node, *args: Any, **kwargs: Any) -> Node:
    """A call on the way to the value of `n`."""
    call = n.graph.call_function(op, (x, *args), kwargs)
    call.meta.update({**n.meta, "val": op(x.meta["val"], *args, **kwargs)})
    return call


def _operation(program: str, region: Region, with_: Options) -> OpOverload:
    """The operation that runs a program: CUDA graphs leave out the one that may wait for the device."""
    devices = [n.meta["val"].device for n in region.inputs]
    safe = bool(devices) and devices[0].type == "cuda" and program_of(program, devices[0], with_).graph_safe
    return torch.ops.fusion_moe.run_graph_safe.default if safe else torch.ops.fusion_moe.run.default


def _size_node(graph: Graph, source: SizeSource, now: Mapping[Node, Node]) -> Node:
    """A node whose value is the size that is read there."""
    node = now.get(source.node, source.node)
    if source.dim is not None:
        size = node.meta["val"].shape[source.dim]
        node = graph.call_function(torch.ops.aten.sym_size.int, (node, source.dim))
        node.meta["val"] = size
    if source.by != 1:
        size = node.meta["val"] // source.by
        node = graph.call_function(operator.floordiv, (node, source.by))
        node.meta["val"] = size
    return node


# --------------------------------------------------------------------------------------------------------------- torch.compile


def backend(model: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """`torch.compile(..., backend="fusion_moe", mode=..., options=...)`: Inductor with the pass.

    options: Inductor's, and ours as "fusion_moe.<name>" (see options.py). OptionError for one that neither has.
    """
    own = {k[len(_PREFIX) :]: v for k, v in (options or {}).items() if k.startswith(_PREFIX)}
    rest = {k: v for k, v in (options or {}).items() if not k.startswith(_PREFIX)}
    try:
        switched = switches.current().replace(**own)
        _check_target(switched, inputs)
        warn_of_float_experts(model)
        compiled, found = keep(model, switched), list[Found]()
        with waiting("compiling a graph"):
            made = compile_with(FusionPass(switched, found.append, _set_passes(rest)), model, inputs, mode, rest)
        if not found and compiled and is_logged():  # the pass was not called: the code comes from a cache
            compiled.again(compile_calls, lambda graph, *_: log_found(find_regions(graph, switched)))
        return made
    except Error as error:
        raise _as_it_is(error) from error.__cause__


def compile_with(fusion_pass: FusionPass, model: GraphModule, inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any]) -> Any:
    """A graph compiled by Inductor with this pass, or without code of Inductor's own where the host has no compiler."""
    patches = {**_inductor_config(mode, options), "post_grad_custom_pre_pass": fusion_pass}
    if "cpu" in _device_types(inputs) and not has_compiler():
        return compile_calls(fusion_pass, model, inputs)
    return compile_fx(model, inputs, config_patches=patches)


def compile_calls(fusion_pass: Callable[[Graph, bool], None], model: GraphModule, inputs: Sequence[Any]) -> Any:
    """A graph taken apart as Inductor takes it apart, given to the pass, and then run call by call."""

    def inner(gm: GraphModule, example_inputs: Sequence[Any], **about: Any) -> Any:
        gm.graph.eliminate_dead_code()
        fusion_pass(gm.graph, bool(about.get("is_inference")))
        gm.recompile()

        def run(args: list[Any]) -> Any:
            taken = list(args)
            args.clear()  # the caller hands its inputs over
            return gm.forward(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_fx(model, inputs, inner_compile=inner, config_patches={"force_disable_caches": True})


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another. Dynamo keeps what it compiles with the code of a function: this one's is its own, and goes with it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def enable() -> None:
    """Adds the pass to every torch.compile with Inductor in this process, with the options now in force, before passes already set.

    Called again, it only takes the options anew. What was compiled before stays as it is: `torch._dynamo.reset()` forgets it.
    """
    config.post_grad_custom_pre_pass = FusionPass(switches.current(), then=_set_passes({}))


def disable() -> None:
    """Takes back what `enable` did; passes that others have set stay."""
    others = _set_passes({})
    config.post_grad_custom_pre_pass = list(others) if len(others) > 1 else others[0] if others else None


@functools.cache
def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler; says once if it does not."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        log.warning("no C++ compiler found: Inductor compiles nothing, what is around the fusions runs call by call; install g++")
        return False
    return True


def _set_passes(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The passes that the user has set, in options or in Inductor's config, without ours."""
    given = options.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    passes = given if isinstance(given, (list, tuple)) else [given]
    return tuple(q for p in passes if p is not None for q in (p.then if isinstance(p, FusionPass) else (p,)))


def _device_types(inputs: Sequence[Any]) -> set[str]:
    return {t.device.type for t in inputs if isinstance(t, torch.Tensor)} or {"cpu"}


# ------------------------------------------------------------------------------------------------------------- what is asked for


def _inductor_config(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a mode and options. OptionError where it does not know them or their values."""
    known = config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            own = [_PREFIX + o for o in Options.__dataclass_fields__]
            raise OptionError(
                f"unknown option {name!r}", expected=f"an option of Inductor, or one of {', '.join(own)}",
                todo=did_you_mean(name, [*known, *own]), where="torch.compile(options=...)",
            )  # fmt: skip
    modes = _modes()
    if mode is not None and mode not in modes:
        near = did_you_mean(mode, modes)
        raise OptionError(f"mode {mode!r}", expected=f"one of {', '.join(modes)}", todo=near, where="torch.compile(mode=...)")
    try:
        return torch._TorchCompileInductorWrapper(mode, dict(options), None).config
    except RuntimeError as error:  # a value of another type
        raise OptionError(str(error), where="torch.compile(options=...)") from None


def _modes() -> list[str]:
    from torch._inductor import list_mode_options

    return list(list_mode_options())


def _check_target(with_: Options, inputs: Sequence[Any]) -> None:
    """UnsupportedError if what is compiled could not be run."""
    for device in {t.device for t in inputs if isinstance(t, torch.Tensor)} or {torch.device("cpu")}:
        target.check_device(target.find(with_.target, device), device, "torch.compile")


class _PassedOn(ShortenTraceback):
    """What Dynamo hands to the user unchanged. Other errors of a backend it wraps into a BackendCompilerFailed."""

    first_useful_frame = None  # the whole traceback

    def __init__(self, message: str):
        RuntimeError.__init__(self, message)


def _as_it_is(error: Error) -> Error:
    """The same error, of a class of the same name that reaches the user."""
    kind = type(error)
    passed_on = type(kind.__name__, (kind, _PassedOn), {"__module__": kind.__module__})
    return passed_on(error.found, expected=error.expected, todo=error.todo, where=error.where)
