"""Builds one graph node by node. Each call is run at once on real and on fake tensors, so a step
may choose by values and by types.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg

from fusion_moe.errors import DtypeError, Error, ShapeError

from . import values

aten = torch.ops.aten
_INEXACT = (
    "exp",
    "expm1",
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "tanh",
    "erf",
    "erfc",
    "sin",
    "cos",
    "atan",
    "sigmoid",
    "silu",
    "div",
    "pow",
    "mean",
    "scaled_swiglu",
    "expert_mlp",
    "nvfp4_quantize",
)
_STEEP = (
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "sign",
    "floor",
    "logical_not",
    "isnan",
    "amax",
    "reciprocal",
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "div",
    "pow",
    "nvfp4_quantize",
)
_NARROW = (torch.bfloat16, torch.float16)
_SUMS = (
    "sum",
    "mean",
    "cumsum",
    "combine",
    "index_add",
    "index_put",
    "nvfp4_grouped_mm",
    "grouped_mm",
    "f16a_nvfp4weight_scaled_grouped_mm",
    "group_add",
)


class Skip(Exception):
    """A step that cannot be done here."""


class Builder:
    """graph: so far. real: node -> its value. raised: the error of ours that the last call raises
    when it runs; nothing may follow then.
    """

    def __init__(self, rng: Random, dynamic: bool):
        self.rng, self.dynamic, self.graph = rng, dynamic, Graph()
        self.real: dict[Node, Any] = {}
        self.inputs: list[Node] = []
        self.weights: dict[Node, list[Node]] = {}  # codes -> the three tensors of a weight
        self.raised: Error | None = None
        self._first: Node | None = None  # after the inputs
        self.fakes = FakeTensorMode(shape_env=ShapeEnv()) if dynamic else FakeTensorMode()

    # Values ---------------------------------------------------------------------------------------

    @property
    def tensors(self) -> list[Node]:
        """All values that are tensors, in order."""
        return [n for n, v in self.real.items() if isinstance(v, Tensor)]

    def shape(self, n: Node) -> tuple[int, ...]:
        """The shape that a value has here."""
        return tuple(self.real[n].shape)

    def dtype(self, n: Node) -> torch.dtype:
        """Its dtype."""
        return self.real[n].dtype

    def key(self, n: Node) -> tuple[str, ...]:
        """Its shape as the graph knows it: sizes that are equal by chance are not."""
        return tuple(map(str, n.meta["val"].shape))

    def pick(self, wanted: Callable[[Node], bool]) -> Node:
        """One of the values that are wanted, rather a late one. Skip if there is none."""
        found = [n for n in self.tensors if wanted(n)]
        if not found:
            raise Skip
        return found[int(len(found) * self.rng.random() ** 0.6)]

    def maybe(
        self, wanted: Callable[[Node], bool], new: Callable[[], Node], p: float = 0.7
    ) -> Node:
        """One of the values that are wanted, or a new one."""
        if self.rng.random() < p and any(wanted(n) for n in self.tensors):
            return self.pick(wanted)
        return new()

    # Nodes ----------------------------------------------------------------------------------------

    def input(self, real: Tensor, rows: bool = False) -> Node:
        """A new input. rows: its first size is one that changes from call to call."""
        place = (
            self.graph.inserting_before(self._first)
            if self._first
            else self.graph.inserting_after()
        )
        with place:
            n = self.graph.placeholder(f"x{len(self.inputs)}")
        how = [DimDynamic.DUCK if rows and i == 0 else DimDynamic.STATIC for i in range(real.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=how)
        shown = (
            {"symbolic_context": context, "source": ConstantSource(n.name)} if self.dynamic else {}
        )
        n.meta["val"] = self.fakes.from_tensor(real, **shown)
        n.meta["rough"] = False
        self.inputs.append(n)
        self.real[n] = real
        return n

    def new(self, shape: Sequence[int], dtype: torch.dtype, rows: bool = False) -> Node:
        """A new input of small numbers."""
        return self.input(
            values.exact(self.rng, tuple(shape), dtype, special=self.rng.random() < 0.1), rows
        )

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The value, or the list of values, of a call. Skip if torch does not take it."""
        rough = self._rough(op, args, kwargs)
        real = self._real(op, args, kwargs)
        fake = self._fake(op, args, kwargs, real)
        n = self.graph.call_function(op, args, kwargs)
        self._first = self._first or n
        n.meta.update(val=fake, rough=rough)
        self.real[n] = real
        return (
            [self._part(n, i) for i in range(len(fake))] if isinstance(fake, (list, tuple)) else n
        )

    def _part(self, n: Node, i: int) -> Node:
        part = self.graph.call_function(operator.getitem, (n, i))
        part.meta.update(val=n.meta["val"][i], rough=n.meta["rough"])
        self.real[part] = self.real[n] if isinstance(self.real[n], Error) else self.real[n][i]
        return part

    def _real(self, op: Any, args: Any, kwargs: Any) -> Any:
        try:
            return op(
                *self._mapped(args, self.real.__getitem__),
                **self._mapped(kwargs, self.real.__getitem__),
            )
        except Error as error:
            return error
        except Exception:
            raise Skip from None

    def _fake(self, op: Any, args: Any, kwargs: Any, real: Any) -> Any:
        """The fake value, which must be like the real one."""
        try:
            with self.fakes:
                fake = op(
                    *self._mapped(args, lambda n: n.meta["val"]),
                    **self._mapped(kwargs, lambda n: n.meta["val"]),
                )
        except Exception as error:
            if isinstance(real, Error) or op.namespace != "fusion_moe":
                raise Skip from None
            raise AssertionError(
                f"the fake of {op} refuses what eager takes: {type(error).__name__}: {error}"
            ) from error
        if isinstance(real, (ShapeError, DtypeError)) and op.namespace == "fusion_moe":
            raise AssertionError(f"the fake of {op} takes what eager refuses: {real}")
        self.raised = real if isinstance(real, Error) else self.raised
        if not isinstance(real, Error):
            found, want = (
                [(tuple(map(int, t.shape)), t.dtype) for t in _tensors(v)] for v in (fake, real)
            )
            if found != want and not self.dynamic:
                raise AssertionError(f"the fake of {op} gives {found}, eager {want}")
        return fake

    def _rough(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether the value of a call may differ in its last bits from way to way. Skip where that
        could make a large difference.
        """
        nodes: list[Node] = []
        map_arg((args, kwargs), nodes.append)
        name = op._schema.name.split("::")[1]
        rough = any(n.meta["rough"] for n in nodes)
        numbers = [self.real[n] for n in nodes if isinstance(self.real[n], Tensor)]
        whole = kwargs.get("dtype") is not None and not kwargs["dtype"].is_floating_point
        whole = whole or (name == "convert_element_type" and not args[1].is_floating_point)
        if rough and (name in _STEEP or whole or kwargs.get("activation_format") == "nvfp4"):
            raise Skip
        # torch rounds the number of a sum first, on CPUs
        uneven = (
            name in ("add", "sub", "rsub")
            and any(isinstance(a, float) for a in args)
            and any(t.dtype in _NARROW for t in numbers)
        )
        fine = all(
            values.is_fine(t)
            for t in numbers
            if t.dtype in values.FLOATS or t.dtype == torch.float64
        )
        return (
            rough
            or uneven
            or name in _INEXACT
            or kwargs.get("activation_format") == "nvfp4"
            or (name in _SUMS and not fine)
        )

    def _mapped(self, args: Any, value: Callable[[Node], Any]) -> Any:
        return map_arg(args, value)

    def finish(self) -> None:
        """Makes outputs of all values that nobody reads, and sometimes of one that somebody
        does.
        """
        made = [
            n
            for n in self.graph.nodes
            if n.op == "call_function" and isinstance(n.meta["val"], Tensor)
        ]
        outputs = [n for n in made if not n.users]
        read = [n for n in made if n.users and isinstance(self.real[n], Tensor)]
        outputs += self.rng.sample(read, 1) if read and self.rng.random() < 0.3 else []
        if not outputs:
            raise Skip
        self.graph.output(tuple(outputs))
        self.graph.eliminate_dead_code()
        for n in [n for n in self.inputs if not n.users]:
            self.graph.erase_node(n)
            self.inputs.remove(n)


def _tensors(v: Any) -> list[Tensor]:
    return [t for t in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, Tensor)]
