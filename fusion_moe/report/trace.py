"""explain: traces a call as torch.compile would, and looks at each of its graphs; last_compiled:
looks at those that torch.compile has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule

from .. import backends, options, plugins, target as targets
from ..arch import named, shown
from ..backends import cuda
from ..errors import Error, OptionError, UnsupportedError
from ..frontends.compiled import kept
from ..frontends.float_experts import experts_outside, float_experts
from ..frontends.inductor.compile_graph import compile_calls
from ..frontends.inductor.dynamo import apart, first_break
from ..frontends.regions import NotFused
from ..nn.frozen import PackedModule, requantizing
from ..options import Options
from ..plugins import CompiledBy
from .advice import advice_on
from .backward import Step, input_names, is_backward
from .build import Seen, report_of
from .fakes import Call, device_of_values, like, on_fakes
from .measure import Watch
from .report import Report

_LOOP = (
    "; if these experts run in a loop, fusion_moe.quantize_ makes one operation of those of known "
    "classes, and a converter of those of "
    "your own (docs/extend/converters.md)"
)


def explain(
    model_or_fn: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    gpu: str | tuple[int, int] | None = None,
    measure: bool = False,
    load: bool = False,
    backward: bool = False,
    **kwargs: Any,
) -> Report:
    """Shows what torch.compile(model_or_fn, backend="fusion_moe") fuses when it is called with
    these arguments, what it does not, and why.

    For what another compiler made, it shows what our part of that fuses. The call is traced in the
    grad mode in force, with the sizes of these arguments; for a training step, the forward pass or
    both passes. Tracing uses fake tensors: nothing is computed, weights and arguments may be on the
    meta device or fake, and the model does not change. A call that asks for the values of tensors,
    as in `if x.sum() > 0`, is run once instead, by the reference. Nothing is compiled to machine
    code.

    Args:
        model_or_fn: what is called with `args` and `kwargs`.
        target: None: the target of the tensors' device; otherwise a name in target.py, even of a
            target whose programs cannot run here.
        gpu: a GPU whose kernels to show, even if it is absent: its name ("H100", or what its
            driver calls it), or a compute capability ("8.6", "sm_86" or (8, 6)), which the first
            known GPU that has it stands for. The target is then "cuda", and weights have the
            layout that modules give them there. None: the GPU at hand, or an H200.
        measure: also run the call, on real tensors, with its fusions as compiled programs, and
            report the time of each kernel, next to the time that this machine takes to read the
            kernel's inputs. The model's writes into itself take effect. On a GPU, CUDA events
            measure. Report.void says if the machine was too busy for the times to mean something.
        load: also run the call, and report how many rows each group (expert) has.
        backward: also report the backward pass: what is saved for it, what it recomputes, and where
            gradients come from.

    Raises:
        OptionError: for an unknown target or GPU.
        UnsupportedError: for a call that asks for values that do not exist, for one that cannot be
            run or measured, for a backward if there is none, and for something that cannot be
            called.
    """
    if not callable(model_or_fn):
        raise UnsupportedError(
            f"a {type(model_or_fn).__name__}",
            expected="a torch.nn.Module or a function",
            where="explain",
        )
    changes = {} if target is None else {"target": target}
    if gpu is not None:
        changes = _of_gpu(gpu, target, measure or load)
    switches = options.current().replace(**changes)
    # an unknown name raises here and not inside a compiler
    backends.find(switches.target, torch.device("cpu"))
    watch = Watch(switches, measure, load) if measure or load else None
    with options.override(cuda_arch=switches.cuda_arch):
        arranged = _as_on_gpus if gpu is not None else None
        return _explained(model_or_fn, args, kwargs, switches, watch, backward, arranged)


def _explained(
    model_or_fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    switches: Options,
    watch: Watch | None,
    backward: bool,
    arranged: Callable[[torch.nn.Module], None] | None,
) -> Report:
    compiled = next((c for ask in plugins.compiled_by if (c := ask(model_or_fn))), None)
    call = Call(compiled.function if compiled else _original(model_or_fn), args, kwargs)
    _check(compiled, call, watch, backward)

    def look(call: Call) -> Seen:
        if not compiled:
            return _in_dynamo(call, switches, watch, backward)
        with options.override(target=switches.target):
            return Seen(compiled.look(call.function, call.args, call.kwargs))

    try:
        seen = look(call) if watch else on_fakes(look, call, arranged)
    except TorchDynamoException as error:
        if own := _own_error(error):
            raise own.at("explain") from error
        raise
    except TypeError as error:
        if isinstance(error, Error) or not (args or kwargs) or call.tensors:
            raise
        raise UnsupportedError(
            f"arguments without a tensor: {error}",
            expected="tensors, such as input_ids = torch.tensor([[1, 2]])",
            where="explain",
        ) from error
    seen.of, seen.advice = str(call), tuple(advice_on(call.owner, seen))
    if backward and not seen.steps:
        raise UnsupportedError(
            "backward=True for a call of whose results none requires a gradient",
            expected="a training step",
            todo="call it outside of torch.no_grad(), with arguments or parameters that require "
            "gradients",
            where="explain",
        )
    return report_of(seen, switches)


def _own_error(error: BaseException) -> Error | None:
    """Our error inside of a longer one of Dynamo's, if there is one."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, Error):
        inner = inner.__cause__ or inner.__context__
    return inner


def _check(compiled: CompiledBy | None, call: Call, watch: Watch | None, backward: bool) -> None:
    """UnsupportedError if a call cannot be run, measured or differentiated as it is asked for."""
    found = expected = todo = ""
    if compiled and (watch or backward):
        found = f"backward, measure or load of the result of {compiled.name}"
        expected = "a module or a function"
        todo = f"pass what {compiled.name} was given: it is then traced as under torch.compile"
    elif watch and backward:
        found, expected = (
            "backward=True with measure or load",
            "one of them: the backward is not run",
        )
    elif watch:
        device = device_of_values(call)
        targets.check_device(backends.find(watch.switches.target, device), device, "explain")
        if watch.measure and device.type not in ("cpu", "cuda"):
            found, expected = f"measure=True for tensors on {device}", "a CPU or a CUDA GPU"
    if found:
        raise UnsupportedError(found, expected=expected, todo=todo, where="explain")


def _as_on_gpus(model: torch.nn.Module) -> None:
    """Lays the weights of a copy without values out as its modules would on a GPU by themselves."""
    if not options.current().order_weights:
        return
    for module in model.modules():
        if isinstance(module, PackedModule) and not module.form.integers:
            module.put_in(module.layout_on(backends.TARGETS[cuda.NAME]))


def _of_gpu(name: str | tuple[int, int], target: str | None, runs: bool) -> dict[str, str]:
    """The options with which the kernels of a GPU are shown."""
    if target not in (None, cuda.NAME):
        raise OptionError(
            f"gpu = {name!r} for the target {target!r}",
            expected=f"the target {cuda.NAME!r}, or none",
            where="explain",
        )
    if runs:
        raise UnsupportedError(
            f"gpu = {name!r} with measure or load",
            expected="one of them: the call runs on the GPU at hand",
            where="explain",
        )
    named(name)
    return {"target": cuda.NAME, "cuda_arch": name if isinstance(name, str) else shown(name)}


def _in_dynamo(call: Call, switches: Options, watch: Watch | None, backward: bool) -> Seen:
    """What is found when torch.compile traces a call. watch: if given, programs run compiled for
    the target, not on the reference.
    """
    seen, owner = Seen(watch=watch), call.owner

    def look(
        model: GraphModule, forward: list[Graph], graph: Graph, is_inference: bool = False
    ) -> None:
        if not is_backward(graph):
            forward.append(graph)
        elif backward:
            seen.steps.append(Step(input_names(model), forward[-1], graph))
        else:
            return
        result = seen.add(graph, switches)
        if watch is not None:
            watch.take_over(graph, result.regions)

    def backend(model: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.add_float_experts(float_experts(model))
        return compile_calls(partial(look, model, []), model, _own(model, inputs))

    has_isolation = "isolate_recompiles" in signature(torch.compile).parameters  # torch 2.13
    isolated: dict[str, Any] = {"isolate_recompiles": True} if has_isolation else {}
    compiled = torch.compile(apart(call.function), backend=backend, dynamic=False, **isolated)
    limits = torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16)
    # it measures on the GPU which shapes to pad
    no_timing = inductor_config.patch(shape_padding=False)
    at_once = functorch_config.patch(force_non_lazy_backward_lowering=backward)
    with limits, no_timing, at_once, options.override(target="reference"):
        compiled(*call.args, **call.kwargs)
        forwards = len(seen.graphs) - len(seen.steps)
        broken = not seen.graphs or (watch is None and forwards > 1)
        if broken and (found := first_break(call.function, call.args, call.kwargs)):
            if not seen.graphs:
                seen.add_float_experts(experts_outside(owner))
            why, line = found
            why += _LOOP if seen.float_experts else ""
            seen.breaks.append(NotFused("graph break", line, why))
    if isinstance(owner, torch.nn.Module):
        notes = requantizing(owner.modules()), *(note(owner) for note in plugins.noted)
        seen.requantized = "; ".join(filter(None, notes))
    return seen


def _own(model: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a graph; fakes of another mode become fakes of the mode in which the graph is
    traced.
    """
    mode = TracingContext.get().fake_mode
    assert mode is not None
    known = [n.meta["example_value"] for n in model.graph.find_nodes(op="placeholder")]
    return [
        like(k, mode) if isinstance(x, FakeTensor) else x
        for x, k in zip(inputs, known, strict=True)
    ]


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given, if it was called already: on a module, on a function, or as
    module.compile().
    """
    function = getattr(
        function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function)
    )
    if isinstance(function, torch.nn.Module) and function._compiled_call_impl is not None:
        return function._call_impl
    return function


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
