"""A random graph with its inputs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from fusion_moe import options

from . import ours, torchs
from .builder import Builder, Skip

REFERENCE = options.Options().replace(target="reference", contract_rounding=False)
_FIRST = (ours.routed_rows, ours.product, ours.two_products, ours.route, ours.expert_mlp, ours.f16a)


@dataclass(frozen=True)
class Case:
    """graph: its nodes have fake values, and whether their last bits may differ ("rough"). inputs:
    of its placeholders, in order.
    """

    graph: Graph
    inputs: tuple[Tensor, ...]
    dynamic: bool

    @property
    def rough(self) -> list[bool]:
        """Whether the last bits of each output may differ."""
        (output,) = (n for n in self.graph.nodes if n.op == "output")
        return [n.meta["rough"] for n in output.args[0]]

    def eager(self, *inputs: Tensor) -> Any:
        """What it computes, operation by operation; of its own inputs if none are given."""
        with options.using(REFERENCE):
            return GraphModule({}, self.graph)(*(inputs or self.inputs))

    def __str__(self) -> str:
        code = self.graph.python_code("self").src
        return "\n".join([f"dynamic: {self.dynamic}", code, *map(repr, self.inputs)])


def case_of(rng: Random) -> Case:
    """A case drawn from random numbers. Skip if nothing came of them."""
    b = Builder(rng, dynamic=rng.random() < 0.4)
    with options.using(REFERENCE), torch.no_grad():
        _add(b, rng.choice(_FIRST))
        for _ in range(rng.randint(1, 12)):
            _add(b, rng.choice(ours.STEPS if rng.random() < 0.3 else torchs.STEPS))
        if not any("nvfp4_grouped_mm" in str(n.target) for n in b.graph.nodes):
            _add(b, ours.product)
    b.finish()
    return Case(
        b.graph, tuple(b.real[n] for n in b.graph.nodes if n.op == "placeholder"), b.dynamic
    )


def _add(b: Builder, step: Any) -> None:
    """One step more, where one is possible and nothing has raised before."""
    with contextlib.suppress(Skip):
        if b.raised is None:
            step(b)
