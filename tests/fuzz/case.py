"""A random graph with its inputs: built from a seed, printed as Python that runs."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fusion_moe import options

from . import ours, torchs
from .builder import Builder, Skip

REFERENCE = options.Options().replace(target="reference", contract_rounding=False)


@dataclass(frozen=True)
class Case:
    """graph: its nodes have fake values, and whether their last bits may differ ("rough"). inputs:
    of its placeholders, in order.
    """

    seed: int
    graph: Graph
    inputs: tuple[Tensor, ...]
    dynamic: bool

    @property
    def outputs(self) -> list[Node]:
        """The nodes that are returned."""
        (output,) = (n for n in self.graph.nodes if n.op == "output")
        return list(output.args[0])

    def module(self) -> GraphModule:
        """The graph as a function."""
        return GraphModule({}, self.graph)

    def eager(self) -> Any:
        """What it computes, operation by operation."""
        with options.using(REFERENCE):
            return self.module()(*self.inputs)

    def __str__(self) -> str:
        dynamic = ", dynamic" if self.dynamic else ""
        return f"# seed {self.seed}{dynamic}\n{_python(self.graph, self.inputs)}"


def case_of(seed: int) -> Case:
    """The case of a seed. Skip if nothing came of it."""
    rng = Random(seed)
    b = Builder(rng, dynamic=rng.random() < 0.4)
    with options.using(REFERENCE), torch.no_grad():
        for step in [_first, *(_step for _ in range(rng.randint(1, 12)))]:
            if b.raised is None:
                _tried(b, step)
        if b.raised is None and not any(
            n.op == "call_function" and "nvfp4_grouped_mm" in str(n.target) for n in b.graph.nodes
        ):
            _tried(b, ours.product)
    b.finish()
    return Case(
        seed, b.graph, tuple(b.real[n] for n in b.graph.nodes if n.op == "placeholder"), b.dynamic
    )


def _first(b: Builder) -> None:
    b.rng.choice(
        (ours.routed_rows, ours.product, ours.two_products, ours.route, ours.expert_mlp, ours.f16a)
    )(b)


def _step(b: Builder) -> None:
    b.rng.choice(ours.STEPS if b.rng.random() < 0.3 else torchs.STEPS)(b)


def _tried(b: Builder, step: Any) -> None:
    with contextlib.suppress(Skip):
        step(b)


def _python(graph: Graph, inputs: tuple[Tensor, ...]) -> str:
    places = [n.name for n in graph.nodes if n.op == "placeholder"]
    lines = [
        "import torch",
        "from torch import inf, nan, tensor",
        "import fusion_moe",
        "",
        "",
        f"def f({', '.join(places)}):",
    ]
    for n in graph.nodes:
        if n.op == "call_function":
            lines.append(f"    {n.name} = {_call(n)}")
        elif n.op == "output":
            lines.append(f"    return {_text(n.args[0])}")
    tensors = (f"    {tensor_text(t)},  # {name}" for name, t in zip(places, inputs, strict=True))
    return "\n".join([*lines, "", "", "inputs = [", *tensors, "]"])


def _call(n: Node) -> str:
    arguments = [*map(_text, n.args), *(f"{k}={_text(v)}" for k, v in n.kwargs.items())]
    if n.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    return f"torch.ops.{n.target}({', '.join(arguments)})"


def _text(a: Any) -> str:
    if isinstance(a, Node):
        return a.name
    if isinstance(a, (list, tuple)):
        inside = ", ".join(map(_text, a))
        return f"[{inside}]" if isinstance(a, list) else f"({inside},)"
    return repr(a)


def tensor_text(t: Tensor) -> str:
    """A tensor as Python: few numbers as they are, many by their bytes."""
    if t.numel() and bool((t.flatten()[:1] == t.flatten()).all()) and t.dtype.itemsize != 1:
        return f"torch.full({tuple(t.shape)}, {t.flatten()[0].item()!r}, dtype={t.dtype})"
    if t.dtype == torch.float8_e4m3fn:
        return f"{tensor_text(t.view(torch.uint8))}.view({t.dtype})"
    return f"tensor({t.tolist()!r}, dtype={t.dtype}).view({tuple(t.shape)})"
