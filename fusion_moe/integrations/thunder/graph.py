"""A stretch of a thunder trace as an FX graph of torch's operations, in which regions are found as
in any other graph.

Each bound symbol is run on fake tensors, as thunder would run it: the operations that it dispatches
become its nodes. So every name for which a translator may be registered means the same here as
under torch.compile. A bound symbol that cannot be run this way becomes one opaque node.
"""

from __future__ import annotations

import functools
import linecache
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import thunder
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.passes import transform_for_execution
from thunder.extend import get_always_executors
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map as map_tree

from ...definitions.nodes import function_around
from ...definitions.operations import SPECS
from ...errors import UnsupportedError

_THUNDER = str(Path(thunder.__file__).parent)


class Recorder(TorchDispatchMode):
    """Writes the calls that run under it into a graph. Tensors are fakes without memory, contiguous
    unless something else is known.
    """

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
        self.fakes = FakeTensorMode()
        self.source = ""  # the stack trace of what is running
        # the tensor is kept alive, so that no other one gets its id
        self._nodes: dict[int, tuple[Node, torch.Tensor]] = {}

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, k_major: bool = False
    ) -> torch.Tensor:
        """A fake tensor without a node; k_major: the transposed view of a contiguous one."""
        with torch.inference_mode(False), self.fakes:
            if k_major:
                return torch.empty(
                    (*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device=device
                ).mT
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def give(self, node: Node, value: Any) -> None:
        """Assigns a node to a tensor, or to a tuple whose tensors are its getitems."""
        node.meta.update(val=value, stack_trace=self.source)
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = (node, value)
            return
        for i, part in enumerate(value if isinstance(value, (tuple, list)) else ()):
            if isinstance(part, torch.Tensor):
                self.give(self.graph.call_function(operator.getitem, (node, i)), part)

    def node(self, value: Any) -> Any:
        """The node of a tensor; any other value unchanged. UnsupportedError for a tensor that no
        recorded call made.
        """
        if not isinstance(value, torch.Tensor):
            return value
        # a number, as the dispatcher passes it
        if not isinstance(value, FakeTensor) and value.dim() == 0:
            with _disable_current_modes():
                return value.item()
        if id(value) not in self._nodes:
            raise UnsupportedError(
                "a tensor that is neither an input nor the result of an operation",
                expected="constants as numbers",
            )
        return self._nodes[id(value)][0]

    @contextmanager
    def running(self, source: str = "") -> Iterator[None]:
        """A context in which calls are recorded, without autocast, whose casts traces have. If it
        fails, what it recorded is removed.
        """
        before, self.source = list(self.graph.nodes), source
        try:
            with torch.inference_mode(False), torch._C._DisableAutocast(), self.fakes, self:
                yield
        except BaseException:
            for n in reversed(list(self.graph.nodes)[len(before) :]):
                self.graph.erase_node(n)
            raise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a query about a tensor
            return result
        if func._schema.is_mutable:
            raise UnsupportedError(
                f"{func} mutates its arguments", expected="an operation that returns new tensors"
            )
        node_args, node_kwargs = map_tree(self.node, (args, kwargs or {}))
        self.give(self.graph.call_function(func, node_args, node_kwargs), result)
        return result


def k_major_arguments(op: Any) -> tuple[int, ...]:
    """The positions of arguments [..., K, N] that an operation takes with K contiguous, in whatever
    namespace it was registered.
    """
    spec = SPECS.get(op._schema.name.partition("::")[2])
    return tuple(i for i, a in enumerate(op._schema.arguments) if spec and a.name in spec.k_major)


class TraceGraph:
    """The FX graph of bound symbols. nodes: those of each bound symbol; proxies: the tensor in the
    trace that a node stands for.

    read: names of tensors that are read elsewhere; opaque: positions of bound symbols that stay
    whole.
    """

    def __init__(
        self, bsyms: Sequence[BoundSymbol], read: Iterable[str], opaque: Iterable[int] = ()
    ):
        self.graph = Graph()
        self.nodes: list[list[Node]] = []
        self.proxies: dict[Node, TensorProxy] = {}
        self._recorder = Recorder(self.graph)
        self._values: dict[str, Any] = {}
        opaque, k_major = set(opaque), _k_major(bsyms)
        for p in _inputs(bsyms):
            self._define(
                p, self.graph.placeholder(p.name), fake_of(p, self._recorder, p.name in k_major)
            )
        for i, bsym in enumerate(bsyms):
            before = len(self.graph.nodes)
            if i in opaque or not self._run(bsym):
                self._opaque(bsym)
            self.nodes.append(list(self.graph.nodes)[before:])
        self.graph.output(
            tuple(self._recorder.node(self._values[name]) for name in read if name in self._values)
        )

    def _define(self, p: TensorProxy, node: Node, value: torch.Tensor) -> None:
        self._recorder.give(node, value)
        self._values[p.name], self.proxies[node] = value, p

    def _run(self, bsym: BoundSymbol) -> bool:
        """Records what a bound symbol does; False, with nothing recorded, if it cannot be run on
        fake tensors.
        """
        if bsym.sym.is_fusion:  # a fusion of another executor is a kernel already
            return False
        try:
            with self._recorder.running(_stack_trace(bsym)), torch.no_grad():
                local = dict(self._values)
                parts, output = _runnable(bsym)
                for part in parts:
                    result = callable_of(part)(
                        *_read(local, part.args), **_read(local, part.kwargs)
                    )
                    local.update(_named(part.output, result))
                named = _named(bsym.output, _read(local, output))
                for p in bsym.flat_proxy_outs:
                    value, dtype = named[p.name], dtypes.to_torch_dtype(p.dtype)
                    if (tuple(value.shape), value.dtype) != (tuple(p.shape), dtype):
                        raise UnsupportedError(f"{bsym.sym.name} returned {value}", expected=str(p))
                    self._name(p, named[p.name])
        except Exception:  # whatever the error: thunder runs this bound symbol itself
            return False
        return True

    def _name(self, p: TensorProxy, value: torch.Tensor) -> None:
        """Assigns the node of a result; a result that is an input or another result gets a node of
        its own.
        """
        if self._recorder.node(value) in self.proxies:
            value = torch.ops.aten.alias.default(value)
        node = self._recorder.node(value)
        self._values[p.name], self.proxies[node] = value, p

    def _opaque(self, bsym: BoundSymbol) -> None:
        """One node for a bound symbol."""
        inputs = [
            self._recorder.node(self._values[p.name])
            for p in bsym.flat_proxy_args
            if p.name in self._values
        ]
        node = self.graph.call_function(_not_recorded, tuple(inputs))
        outputs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
        node.meta.update(
            val=tuple(fake_of(p, self._recorder) for p in outputs), stack_trace=_stack_trace(bsym)
        )
        for i, p in enumerate(outputs):
            self._define(
                p, self.graph.call_function(operator.getitem, (node, i)), node.meta["val"][i]
            )


def _not_recorded(*tensors: Any) -> Any:
    """The function that an opaque node calls."""
    raise NotImplementedError("a bound symbol that only thunder runs")


def has_open_sizes(trace: TraceCtx) -> bool:
    """Whether a trace is for more than one shape: thunder's cache='symbolic values'."""
    return any(
        isinstance(size, NumberProxy)
        for p in trace.args
        if isinstance(p, TensorProxy)
        for size in p.shape
    )


def stays_in_place(bsym: BoundSymbol) -> bool:
    """Whether nothing may be moved across a bound symbol: it unpacks inputs, returns, or writes
    into memory that others may read.
    """
    if bsym.sym.id is prims.PrimIDs.GET_GRAD:
        return False
    writes = bsym.sym.name in ("copy_", "update_aliases") or prims.OpTags.IN_PLACE in (
        bsym.sym.tags or ()
    )
    return writes or bsym.sym.python_impl is not None


def fake_of(p: TensorProxy, recorder: Recorder, k_major: bool = False) -> torch.Tensor:
    """A fake tensor like a proxy. Proxies have no strides."""
    return recorder.empty(
        tuple(map(_constant, p.shape)),
        dtypes.to_torch_dtype(p.dtype),
        devices.to_torch_device(p.device),
        k_major,
    )


def _constant(size: Any) -> int:
    if isinstance(size, NumberProxy):
        raise UnsupportedError(
            "a symbolic size, as with cache='symbolic values'",
            expected="constant sizes",
            todo="leave out cache=: thunder then compiles once per shape",
        )
    return int(size)


def _k_major(bsyms: Sequence[BoundSymbol]) -> set[str]:
    """The names of tensors whose last dimension but one is contiguous, according to the operations
    that take them.
    """
    called = ((bsym, (bsym._call_ctx or {}).get(bsym.sym.name)) for bsym in bsyms)
    return {
        bsym.args[i].name
        for bsym, op in called
        if isinstance(op, OpOverload)
        for i in k_major_arguments(op)
    }


def in_order(items: Sequence[tuple[int, BoundSymbol]]) -> list[BoundSymbol]:
    """Bound symbols ordered after those that make what they read, otherwise by position."""
    from networkx import DiGraph, lexicographical_topological_sort  # which torch needs

    maker = {p.name: k for k, (_, bsym) in enumerate(items) for p in bsym.flat_proxy_outs}
    graph: Any = DiGraph()
    graph.add_nodes_from(range(len(items)))
    for k, (_, bsym) in enumerate(items):
        makers = {maker.get(p.name, k) for p in bsym.flat_proxy_args} - {k}
        graph.add_edges_from((before, k) for before in makers)
    order = lexicographical_topological_sort(graph, key=lambda k: items[k][0])
    return [items[k][1] for k in order]


def _inputs(bsyms: Sequence[BoundSymbol]) -> list[TensorProxy]:
    """The tensors that bound symbols read but do not make."""
    results = {p.name for bsym in bsyms for p in bsym.flat_proxy_outs}
    read = {p.name: p for bsym in bsyms for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)}
    return [p for name, p in read.items() if name not in results]


def _runnable(bsym: BoundSymbol) -> tuple[Sequence[BoundSymbol], Any]:
    """A bound symbol as ones that an executor runs, and their output: itself, or its decomposition
    by thunder if nobody claimed it.
    """
    if bsym.sym.executor is not None or bsym.sym.python_impl is not None:
        return (bsym,), bsym.output
    trace = TraceCtx(None)
    trace.names = _names(bsym)
    trace.args, trace.kwargs = list(bsym.flat_proxy_args), {}
    trace.bound_symbols = [bsym, prims.python_return.bind(bsym.output, output=None)]
    *parts, returned = transform_for_execution(trace, get_always_executors()).bound_symbols
    return parts, returned.args[0]


def _names(bsym: BoundSymbol) -> set[str]:
    own = {p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
    return own.union(*map(_names, bsym.subsymbols))


def callable_of(bsym: BoundSymbol) -> Any:
    """The function whose call a bound symbol prints."""
    if bsym._call_ctx and bsym.sym.name in bsym._call_ctx:
        return bsym._call_ctx[bsym.sym.name]
    if bsym.sym.python_impl is not None:
        return bsym.sym.python_impl
    return functools.reduce(getattr, bsym.sym.name.split("."), bsym.sym.module)


def _read(values: dict[str, Any], arguments: Any) -> Any:
    """Arguments as torch takes them, with fake tensors for proxies."""
    return tree_map(
        lambda a: values[a.name] if isinstance(a, TensorProxy) else as_torch(a), arguments
    )


def as_torch(a: Any) -> Any:
    """thunder's numbers, dtypes and devices as torch's; any other value unchanged."""
    if isinstance(a, NumberProxy):
        return a.value
    if isinstance(a, dtypes.dtype):
        return dtypes.to_torch_dtype(a)
    return devices.to_torch_device(a) if isinstance(a, devices.Device) else a


def _named(output: Any, result: Any) -> dict[str, Any]:
    """The tensors of a result by the names of their proxies."""
    pairs = zip(tree_flatten(output)[0], tree_flatten(result)[0], strict=True)
    return {p.name: value for p, value in pairs if isinstance(p, TensorProxy)}


def _stack_trace(bsym: BoundSymbol) -> str:
    """The line of the program that a bound symbol comes from, as FX writes stack traces."""
    line = getattr(bsym.source_positions, "lineno", None)
    if not bsym.source_filename or not line or bsym.source_filename.startswith(_THUNDER):
        return ""
    code = linecache.getline(bsym.source_filename, line).strip()
    function = function_around(bsym.source_filename, line)  # thunder keeps only the line
    name = function.name if function else "<module>"
    return f'File "{bsym.source_filename}", line {line}, in {name}\n    {code}\n'
