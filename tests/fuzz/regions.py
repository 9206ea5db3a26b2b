"""The regions of a case: the graph as our front end leaves it, run with every region evaluated
stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Interpreter, Node

from fusion_moe import options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import Lowered, lower
from fusion_moe.frontends.regions import find_regions
from fusion_moe.frontends.rewrite import replace_regions
from fusion_moe.ir.core import Fusion, Value
from fusion_moe.ir.text import parse
from fusion_moe.options import Options
from fusion_moe.runtime.check import check_stages
from tests.moe_models import copied

from .case import REFERENCE, Case
from .compare import difference, outcome

RUN = torch.ops.fusion_moe.run.default
ON_CPU = options.Options().replace(target="cpu", contract_rounding=False)


@dataclass
class Run:
    """One run of a region: its program, what it was given, what it must give; rough: outputs whose
    last bits may differ.
    """

    fusion: Fusion
    inputs: list[Any]
    sizes: dict[str, int]
    want: Any
    rough: list[bool]


@dataclass
class Judged:
    """What came of a case: what is wrong, in a few words, "" if nothing is; and the regions that
    ran.
    """

    wrong: str
    runs: list[Run] = field(default_factory=list)


def evaluated(case: Case) -> Judged:
    """The case by way of our front end, against eager. Each region's stages must agree bit for bit,
    on the CPU's segments too.
    """
    want = outcome(case.eager)
    graph = copied(case.graph)
    try:
        found = find_regions(graph, ON_CPU)
        if broken := [left for left in found.not_fused if left.broken]:
            return Judged(f"a translator is at fault: {broken[0].why}")
        replace_regions(graph, found.regions, REFERENCE)
    except Exception as error:
        return Judged(f"the front end raises {type(error).__name__}: {error}")
    walk = _Evaluate(torch.nn.Module(), graph)
    got = outcome(lambda: walk.run(*case.inputs))
    wrong = walk.wrong or difference(got, want, [n.meta["rough"] for n in case.outputs])
    return Judged(wrong, walk.runs)


class _Evaluate(Interpreter):
    """Runs a graph; evaluates the regions instead of compiling them, and notes each."""

    def __init__(self, root: torch.nn.Module, graph: Graph):
        super().__init__(root, graph=graph)
        self.wrong, self.runs = "", list[Run]()
        self._node: Node | None = None

    def run_node(self, n: Node) -> Any:
        self._node = n
        with options.using(REFERENCE):
            return super().run_node(n)

    def call_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is not RUN:
            return super().call_function(function, args, kwargs)
        program, inputs, sizes, _ = args
        fusion = parse(program)
        env = dict(zip(fusion.symbols, sizes, strict=True))
        run = Run(
            fusion,
            list(inputs),
            env,
            outcome(lambda: fusion.evaluate(*inputs, sizes=env)),
            self._rough(len(fusion.outputs)),
        )
        self.runs.append(run)
        self.wrong = self.wrong or stages_differ(run)
        if isinstance(run.want, Exception):
            raise run.want
        return run.want

    def _rough(self, count: int) -> list[bool]:
        """From the nodes that take the results apart: they have what the nodes had whose place they
        took.
        """
        assert self._node is not None
        parts = {n.args[1]: n.meta["rough"] for n in self._node.users}
        return [bool(parts.get(i, False)) for i in range(count)]


def stages_differ(run: Run) -> str:
    """What differs between the stages of a region's program for the CPU, all of which mean the
    same.
    """
    if isinstance(run.want, Exception):
        return ""
    lowered = lowered_of(run.fusion, contract=False)
    found = outcome(lambda: check_stages(lowered.stages, lowered.segments, run.inputs, run.sizes))
    return f"{type(found).__name__}: {found}" if isinstance(found, Exception) else ""


def lowered_of(fusion: Fusion, contract: bool) -> Lowered:
    """A region's program on its way to the CPU; to the reference where it quantizes activations,
    which the CPU does not take.
    """
    on_cpu = not any(op.kind.role == "grouped" and op.values[0].type.quantized for op in fusion.ops)
    return lower(
        fusion,
        TARGETS["cpu" if on_cpu else "reference"],
        Options().replace(contract_rounding=contract),
    )


def by_segments(lowered: Lowered, run: Run) -> tuple[Any, ...]:
    """What the segments mean that kernels are made of."""
    fusion = lowered.stages[-1][1]
    made: dict[Value, Any] = dict(zip(fusion.inputs, run.inputs, strict=True))
    env = lowered.stages[0][1].bind(run.inputs, run.sizes)
    for s in lowered.segments:
        made.update(
            zip(
                s.outputs,
                s.plan.fusion.evaluate(*(made[v] for v in s.inputs), sizes=env),
                strict=True,
            )
        )
    return tuple(made[v] for v in fusion.outputs)


def noted(case: Case) -> dict[int, Any]:
    """The value of each node by its place, as far as the graph runs."""
    values: dict[int, Any] = {}

    class Noted(Interpreter):
        def run_node(self, n: Node) -> Any:
            values[places[n]] = super().run_node(n)
            return values[places[n]]

    places = {n: i for i, n in enumerate(case.graph.nodes)}
    with options.using(REFERENCE):
        outcome(lambda: Noted(torch.nn.Module(), graph=case.graph).run(*case.inputs))
    return values
