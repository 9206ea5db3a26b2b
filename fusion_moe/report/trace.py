"""explain: traces a call as torch.compile would, and looks at every graph of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph

from .. import options, translate
from .. import target as targets
from ..frontends.inductor import compile_calls
from ..frontends.regions import find_regions
from ..options import Options
from .build import Seen, report_of
from .data import Report


def explain(model_or_fn: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any) -> Report:
    """What torch.compile(model_or_fn, backend="fusion_moe") fuses when it is called with these arguments, what it does not, and why.

    The call is traced and run once, in the grad mode in force, with the sizes of these arguments; of a training step the forward pass.
    Nothing is compiled to machine code and what torch.compile knows of the model stays as it is. target: None follows the device of the
    tensors; else a name in target.py, also of one that this version runs nothing on: the call itself then runs by the operations'
    meaning, as with target "reference". OptionError for a target that there is not.
    """
    switches = options.current().replace(**({} if target is None else {"target": target}))
    return report_of(_look(model_or_fn, args, kwargs, switches), switches)


def _look(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], switches: Options) -> Seen:
    seen = Seen()

    def look(graph: Graph, is_inference: bool = False) -> None:
        if any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
            return  # a backward pass
        seen.graphs.append(find_regions(graph, lambda device: targets.find(switches.target, device)))
        seen.custom_ops.update((name, None) for n in graph.nodes if (name := _custom_op(n.target)))

    wanted = targets.find(switches.target, torch.device("cpu"))  # a name that is none raises here and not inside Dynamo
    has_isolation = "isolate_recompiles" in signature(torch.compile).parameters  # torch 2.13
    apart: dict[str, Any] = {"isolate_recompiles": True} if has_isolation else {}
    compiled = torch.compile(
        _called(_original(function)), backend=lambda model, inputs: compile_calls(look, model, inputs), dynamic=False, **apart
    )
    limits = torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16)
    with limits, nullcontext() if wanted.executed else options.override(target="reference"):
        compiled(*args, **kwargs)
    return seen


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given, where it was called already: on a module, on a function, or as module.compile()."""
    function = getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
    if isinstance(function, torch.nn.Module) and function._compiled_call_impl is not None:
        return function._call_impl
    return function


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another. Dynamo keeps what it compiles with the code of a function: this one's is its own, and goes with it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _custom_op(op: Any) -> str:
    """The name of an operation that is not torch's and has no translator, else nothing."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace in ("aten", "prims", "prim", "inductor"):
        return ""
    return "" if translate.find(op.name()) else op.name()
