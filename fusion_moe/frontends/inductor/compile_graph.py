"""Compiles a graph with the pass: by Inductor, or, without Inductor's code generation, to run its
calls one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule

from ...messages import log
from .config import inductor_config
from .fusion_pass import FusionPass


def compile_with(
    fusion_pass: FusionPass,
    model: GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any],
) -> Any:
    """Compiles a graph by Inductor with this pass; without a host compiler, without Inductor's code
    generation.
    """
    patches = {**inductor_config(mode, options), "post_grad_custom_pre_pass": fusion_pass}
    if any(device.type == "cpu" for device in devices(inputs)) and not has_compiler():
        return compile_calls(fusion_pass, model, inputs)
    return compile_fx(model, inputs, config_patches=patches)


def compile_calls(
    fusion_pass: Callable[[Graph, bool], None], model: GraphModule, inputs: Sequence[Any]
) -> Any:
    """Decomposes a graph like Inductor, gives it to the pass, and makes it run call by call."""

    def inner(gm: GraphModule, example_inputs: Sequence[Any], **about: Any) -> Any:
        gm.graph.eliminate_dead_code()
        fusion_pass(gm.graph, bool(about.get("is_inference")))
        gm.recompile()

        def run(args: list[Any]) -> Any:
            taken = list(args)
            args.clear()  # the caller hands over its inputs
            return gm.forward(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_fx(
        model, inputs, inner_compile=inner, config_patches={"force_disable_caches": True}
    )


@functools.cache
def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler; if not, says so once."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        log.warning(
            "no C++ compiler found: Inductor compiles nothing, what is around the fusions "
            "runs call by call; install g++"
        )
        return False
    return True


def devices(inputs: Sequence[Any]) -> set[torch.device]:
    """The devices of a graph's inputs; the CPU without tensors among them."""
    return {t.device for t in inputs if isinstance(t, torch.Tensor)} or {torch.device("cpu")}
