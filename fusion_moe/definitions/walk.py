"""From calls of a graph to a Fusion: one walk over them in order, in which their translators build
it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch._prims_common import is_contiguous_or_false
from torch.fx import Node

from ..errors import Error, FusionError, ShapeError, TranslatorError, Untranslatable
from ..ir import Fusion, FusionDefinition, Op, TensorType, Value
from . import translate
from .nodes import call_of, device_of, is_torchs, op_name, source_of, tensors
from .traced import Sizes, may_be_equal, plain_argument, tensor_type
from .translate import Translator


class Walk:
    """One walk over nodes in order, in which their translators build a Fusion.

    values: what nodes stand for, to begin with those before the walk that have values; made: the
    operations of each node; refused: nodes with reasons; transposed: inputs that are read as the
    tensor whose transposed view they are.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        fd: FusionDefinition | None = None,
        values: Mapping[Node, Any] | None = None,
    ):
        self.nodes = tuple(nodes)
        self.fd = fd or FusionDefinition()
        self.sizes = Sizes()
        self.inputs: dict[Node, Value] = {}
        self.transposed: set[Node] = set()
        self.values: dict[Node, Any] = dict(values or {})
        self.made: dict[Node, tuple[Op, ...]] = {}
        self.refused: dict[Node, Error] = {}
        for n in nodes:
            if call_of(n) not in self.refused:
                try:
                    self._translate(n)
                except TranslatorError as error:
                    self.refused[call_of(n)] = error
                    break  # the definition may be inconsistent now
                except Error as error:  # the walk continues, to find all refusals at once
                    self.refused[call_of(n)] = error

    @property
    def device(self) -> torch.device:
        """The device of the results of a graph."""
        return device_of(self.nodes[0])

    @property
    def outputs(self) -> list[Node]:
        """The nodes whose values are read outside."""
        return [
            n
            for n in self.nodes
            if isinstance(self.values[n], Value) and any(u not in self.made for u in n.users)
        ]

    @cached_property
    def fusion(self) -> Fusion:
        """The Fusion of all nodes. FusionError if it does not verify, or for sizes that the graph
        does not know.
        """
        for n in self.outputs:
            self.fd.add_output(self.values[n])
        fusion = self.fd.fusion()
        if unknown := [s for s in fusion.symbols if s not in self.sizes.expressions()]:
            raise FusionError(
                f"unknown size {', '.join(unknown)}", expected="sizes of the call's arguments"
            )
        return fusion

    def _translate(self, n: Node) -> None:
        first = self.fd.count
        if n.target is operator.getitem:
            self.values[n] = self.values[call_of(n)][n.args[1]]
        else:
            translator = translate.find(op_name(n))
            if translator is None:
                raise Untranslatable(f"{self.called(n)}, which has no translator")
            with self.fd.at(source_of(n), translator.where):
                args = [self._argument(n, a) for a in n.args]
                kwargs = {k: self._argument(n, v) for k, v in n.kwargs.items()}
                try:
                    outputs = translator(
                        self.fd, args, kwargs, [self.type_of(v) for v in tensors(n.meta["val"])]
                    )
                except (TranslatorError, Untranslatable) as error:
                    raise self._reported(n, translator, error) from error.__cause__ or error
            self.values[n] = outputs if isinstance(n.meta["val"], (tuple, list)) else outputs[0]
        self.made[n] = self.fd.ops_from(first)

    def called(self, n: Node) -> str:
        """What a message calls an operation."""
        return op_name(n)

    def _reported(self, n: Node, translator: Translator, error: Error) -> Error:
        """The error to report if a translator fails: that the trace does not know two sizes to be
        equal is not the translator's fault.
        """
        of_sizes = isinstance(error.__cause__, (ShapeError, FusionError))
        returned_other_types = isinstance(error, TranslatorError) and error.__cause__ is None
        pair = self._unrelated(n) if of_sizes or returned_other_types else None
        if pair is None:
            return error
        text = f"sizes {pair[0]} and {pair[1]} of {op_name(n)} are not known to be equal"
        expected = "dimensions that the trace relates"
        check = "torch._check(a.shape[i] == b.shape[j])"
        if not translator.of_user:
            return Untranslatable(
                text, expected=expected, todo=f"relate them before the call: {check}"
            )
        return TranslatorError(
            text,
            expected=expected,
            todo=f"relate them in the operation's fake: {check}",
            where=error.where,
        )

    def _unrelated(self, n: Node) -> tuple[Any, Any] | None:
        """Two sizes of a call's tensors that may be equal, since they have one value now, but are
        two sizes of the IR.
        """
        results: list[tuple[tuple[int, int], Any]] = []
        for t in (t for m in (*n.all_input_nodes, n) for t in tensors(m.meta.get("val"))):
            results += [
                ((t.dim(), i), size) for i, size in enumerate((*t.shape, prod(t.shape[:-1])))
            ]
        pairs = [(a, b) for a, b in combinations(results, 2) if may_be_equal(a[1], b[1])]
        symbols = [
            (a, b) for (_, a), (_, b) in pairs if not isinstance(a, int) and not isinstance(b, int)
        ]
        constants = [(a, b) for (i, a), (j, b) in pairs if i == j]  # at other places by chance
        return next(
            ((a, b) for a, b in (*symbols, *constants) if self.sizes.size(a) != self.sizes.size(b)),
            None,
        )

    def _argument(self, reader: Node, a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return tuple(self._argument(reader, x) for x in a)
        if not isinstance(a, Node):
            return plain_argument(a, self.sizes)
        if a in self.values:
            return self._linear(a) if is_torchs(reader) else self.values[a]
        val = a.meta.get("val")
        if isinstance(val, (int, torch.SymInt)):
            return plain_argument(val, self.sizes)
        if not isinstance(val, torch.Tensor):
            raise Untranslatable(
                f"argument {a.name} is {_described(val)}", expected="a tensor or an integer"
            )
        if val.device != self.device:
            raise Untranslatable(
                f"argument {a.name} is on {val.device}", expected=f"{self.device}, like the results"
            )
        return self._input(reader, a, val)

    def _input(self, reader: Node, n: Node, val: torch.Tensor) -> Value:
        """The value of a tensor from outside, in the form that its first reader wants."""
        if n not in self.inputs:
            translator = translate.find(op_name(reader))
            if (
                translator
                and translator.as_stored
                and val.dim() > 1
                and not is_contiguous_or_false(val)
                and is_contiguous_or_false(val.mT)
            ):
                self.transposed.add(n)
            self.inputs[n] = self.fd.define_like(
                self.type_of(val.mT if n in self.transposed else val)
            )
        if n not in self.transposed:
            return self.inputs[n]
        return self.fd.ops.permute(self.inputs[n], dims=mT_dims(val))

    def _linear(self, n: Node) -> Any:
        """The value of a node for a torch operation, which takes tensors as they are stored.
        Untranslatable if its layout is not linear.
        """
        v = self.values[n]
        if isinstance(v, Value) and v.type.layout != "linear":
            raise Untranslatable(f"argument {n.name} is {v.type}", expected="the linear layout")
        return v

    def type_of(self, val: torch.Tensor) -> TensorType:
        """The type of a tensor of the graph."""
        return tensor_type(val.dtype, self.sizes.shape(val.shape))


def mT_dims(t: torch.Tensor) -> tuple[int, ...]:
    """The order of dimensions of `t.mT`."""
    return (*range(t.dim() - 2), t.dim() - 1, t.dim() - 2)


def _described(val: Any) -> str:
    return "of unknown type" if val is None else f"a {type(val).__name__}"
