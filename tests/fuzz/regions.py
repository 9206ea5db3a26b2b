"""The regions of a case: the graph as our front end leaves it, run with every region evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Interpreter, Node

from fusion_moe import options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import Lowered, lower
from fusion_moe.frontends.regions import find_regions
from fusion_moe.frontends.rewrite import replace_regions
from fusion_moe.ir.core import Fusion, Value
from fusion_moe.ir.text import parse
from fusion_moe.options import Options
from tests.moe_models import copied

from .case import REFERENCE, Case
from .compare import outcome

RUN = torch.ops.fusion_moe.run.default
ON_CPU = options.Options().replace(target="cpu", contract_rounding=False)


@dataclass
class Run:
    """One run of a region: its program, what it was given, what it gave; rough: outputs whose last
    bits may differ.
    """

    fusion: Fusion
    inputs: list[Any]
    sizes: dict[str, int]
    result: Any
    rough: list[bool]

    def lowered(self, contract: bool = False) -> Lowered:
        """On its way to the CPU; to the reference where it quantizes activations, which the CPU
        does not take.
        """
        return lower(
            self.fusion,
            TARGETS["reference" if self.quantizes else "cpu"],
            Options().replace(contract_rounding=contract),
        )

    @property
    def quantizes(self) -> bool:
        """Whether a product has quantized activations."""
        products = (op for op in self.fusion.ops if op.kind.role == "grouped")
        return any(op.values[0].type.quantized for op in products)

    def by_segments(self, contract: bool) -> tuple[Any, ...]:
        """What the segments mean that kernels are made of."""
        lowered = self.lowered(contract)
        fusion = lowered.stages[-1][1]
        made: dict[Value, Any] = dict(zip(fusion.inputs, self.inputs, strict=True))
        env = self.fusion.bind(self.inputs, self.sizes)
        for s in lowered.segments:
            outputs = s.plan.fusion.evaluate(*(made[v] for v in s.fusion.inputs), sizes=env)
            made.update(zip(s.fusion.outputs, outputs, strict=True))
        return tuple(made[v] for v in fusion.outputs)


class Evaluated(Interpreter):
    """A case by way of our front end, which evaluates the regions instead of compiling them, and
    notes each in `runs`. result: its outputs, or the exception that it raised.
    """

    def __init__(self, case: Case):
        graph = copied(case.graph)
        found = find_regions(graph, ON_CPU)
        assert not [left.why for left in found.not_fused if left.broken]  # by a translator's fault
        replace_regions(graph, found.regions, REFERENCE)
        super().__init__(torch.nn.Module(), graph=graph)
        self.runs = list[Run]()
        self._node: Node | None = None
        self.result = outcome(lambda: self.run(*case.inputs))

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
        result = outcome(lambda: fusion.evaluate(*inputs, sizes=env))
        assert self._node is not None
        # the nodes that take the results apart have what those had whose place they took
        parts = {n.args[1]: n.meta["rough"] for n in self._node.users}
        rough = [bool(parts.get(i, False)) for i in range(len(fusion.outputs))]
        self.runs.append(Run(fusion, list(inputs), env, result, rough))
        if isinstance(result, Exception):
            raise result
        return result
