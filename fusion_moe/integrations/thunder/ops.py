"""torch's operations as symbols of thunder, with the derivatives that torch knows.

An operation's meta function is its fake. Its grad rule does what autograd does: the backward is
recorded on fake tensors, and the recorded calls become bound symbols of the backward trace. So a
formula given to torch.library.register_autograd works in thunder too, whatever it saves and calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import Symbol
from thunder.core.transforms import register_grad
from thunder.extend import Executor
from thunder.torch import register_function
from thunder.transforms.autocast import disable_autocast, maybe_downcast_to, register_autocast_rule
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.operator_schemas import get_signature_for_torch_op

from ...bodies.autocast import casted
from ...definitions import translate
from ...definitions.operations import SPECS, Spec, named_arguments
from ...definitions.run import NAMESPACE
from ...errors import TranslatorError, UnsupportedError
from .. import compat
from .graph import Recorder, as_torch, fake_of, k_major_arguments
from .quirks import at_users_line

_DIFFERENTIABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# recorded on contiguous fakes; the tensors of a call may have other strides
_ANY_STRIDES: dict[Any, OpOverload] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


class Symbols:
    """The symbols of an executor: one for each overload that was requested."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self._of: dict[OpOverload, Symbol] = {}
        self._missing = executor.register_operator(
            "fusion_moe_no_derivative", meta=_missing_meta, fn=_raise_missing
        )

    def register_translated(self) -> None:
        """Makes operations with translators known to thunder, and those that are made of such ones,
        unless they are already: of torch's own, only the grouped product, which thunder's executors
        take for a few devices and arguments, and the one that gives results of modules the shape of
        their inputs.
        """
        self.of(torch.ops.aten._grouped_mm.default, torch._grouped_mm)
        self.of(torch.ops.aten._unsafe_view.default)
        for translator in translate.registered():
            if not translator.op.startswith(("aten::", "prims::")):
                # a translator may be registered before its operation
                with suppress(TranslatorError):
                    self.of(translate.overload_of(translator.op))
        for product in compat.products():
            self._compose(product)

    def items(self) -> list[tuple[OpOverload, Symbol]]:
        """All operations that have a symbol, and their symbols."""
        return list(self._of.items())

    def of(self, op: OpOverload, *others: Callable[..., Any]) -> Symbol:
        """The symbol of an operation, with its derivative. others: more functions that call it."""
        if op not in self._of:
            names = (op, op.overloadpacket, *others) if op._overloadname == "default" else (op,)
            name, foreign = (
                op.name().replace("::", "_").replace(".", "_"),
                not torch._library.utils.is_builtin(op),
            )
            # too expensive to be recomputed in the backward
            tags = [prims.OpTags.MATMUL_OP] if foreign else None
            self._of[op] = symbol = self.executor.register_operator(
                name, meta=meta_of(op), fn=op, replaces=names, tags=tags
            )
            self.executor._lookasides.update((called, at_users_line(symbol)) for called in names)
            register_grad(symbol.id, partial(self._differentiated, op))
            if op.namespace == NAMESPACE and (spec := SPECS.get(op._opname)) and spec.autocast:
                register_autocast_rule(symbol.id)(partial(_autocast, symbol, spec))
            # thunderfx keeps what this map lacks out of thunder, whatever executors it is given
            for called in names if foreign else ():
                register_function(called, symbol)
        return self._of[op]

    def _compose(self, op: OpOverload) -> None:
        """Makes an operation that is made of others known to thunder: traces have these."""

        def calls(*args: Any, **kwargs: Any) -> Any:
            with recorded(op, args, kwargs) as call:
                nodes = list(map(call.recorder.node, call.results))
            parts = RecordedBackward(call.inputs, nodes, {}, {}, {}, False)
            results = Replay(self, parts, tensors_in((args, kwargs))).results()
            return results[0] if len(results) == 1 else tuple(results)

        for called in (op, op.overloadpacket):
            self.executor._lookasides[called] = at_users_line(calls)
            register_function(called, calls)

    @disable_autocast()  # the trace that is differentiated has its casts
    def _differentiated(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """thunder's grad rule of an operation: calls it, or one that returns its results and more,
        and puts its tensors' gradients.
        """
        derivative, tensors = RecordedBackward.of(op, args, kwargs), tensors_in((args, kwargs))
        replay = Replay(self, derivative, tensors)
        if derivative.outputs and derivative.saves:
            outputs = replay.results()
            result = outputs[0] if len(outputs) == 1 else tuple(outputs)
        else:
            result = self._of[op](*args, **kwargs)
            outputs = tensors_in(result)
        if not derivative.outputs:
            return result
        seeds = {i: prims.get_grad(outputs[i]) for i in derivative.outputs}
        for i, grad in replay.gradients(outputs, seeds).items():
            prims.put_grad(tensors[i], grad)
        # raises, when the backward runs, if the gradient is needed
        for i, why in derivative.missing.items():
            prims.put_grad(tensors[i], self._missing(tensors[i], why))
        return result


@dataclass
class RecordedCall:
    """A call that was recorded on fakes. tensors, inputs: the fakes of its tensor arguments and
    their nodes; results: the tensors that it returns.
    """

    recorder: Recorder
    tensors: Sequence[torch.Tensor]
    inputs: Sequence[Node]
    result: Any
    results: Sequence[torch.Tensor]


@contextmanager
def recorded(
    op: OpOverload, args: Any, kwargs: Any, tracked: Sequence[int] = ()
) -> Iterator[RecordedCall]:
    """Records a call of an operation with proxies; a context in which recording continues. tracked:
    the tensor arguments that require a gradient.
    """
    recorder = Recorder(Graph())
    k_major = {id(args[i]) for i in k_major_arguments(op)}
    tensors = [
        fake_of(p, recorder, id(p) in k_major).requires_grad_(i in tracked)
        for i, p in enumerate(tensors_in((args, kwargs)))
    ]
    inputs = [recorder.graph.placeholder(f"x{i}") for i in range(len(tensors))]
    for node, t in zip(inputs, tensors, strict=True):
        recorder.give(node, t)
    argument = iter(tensors)
    fake_args, fake_kwargs = tree_map(
        lambda a: next(argument) if isinstance(a, TensorProxy) else as_torch(a), (args, kwargs)
    )
    with recorder.running(), torch.enable_grad():
        result = op(*fake_args, **fake_kwargs)
        yield RecordedCall(recorder, tensors, inputs, result, tensors_in(result, torch.Tensor))


@dataclass
class RecordedBackward:
    """The recorded backward of a call. Tensors of the call are numbered in order.

    results: the nodes of its results; outputs: which of them have a gradient; grads: for each
    tensor with a derivative, the node of its gradient or None; missing: for each tensor without a
    derivative, the reason. saves: whether autograd calls another operation instead, which returns
    the results and what the backward reads.
    """

    inputs: Sequence[Node]
    results: Sequence[Node]
    seeds: Mapping[int, Node]
    grads: Mapping[int, Node | None]
    missing: Mapping[int, str]
    saves: bool

    @property
    def outputs(self) -> tuple[int, ...]:
        """Which results have a gradient."""
        return tuple(self.seeds)

    @classmethod
    def of(cls, op: OpOverload, args: Any, kwargs: Any) -> RecordedBackward:
        """The derivative of a call with respect to all its float tensors, or, if not all have one,
        to each of those that do.
        """
        wanted = [
            i
            for i, t in enumerate(tensors_in((args, kwargs)))
            if dtypes.to_torch_dtype(t.dtype) in _DIFFERENTIABLE
        ]
        try:
            return cls._recorded(op, args, kwargs, wanted, {})
        except Exception as error:
            missing = {i: str(error) for i in wanted}
        for i in list(missing):
            try:
                cls._recorded(op, args, kwargs, [i], {})
                del missing[i]
            except Exception as error:
                missing[i] = str(error)
        return cls._recorded(op, args, kwargs, [i for i in wanted if i not in missing], missing)

    @classmethod
    def _recorded(
        cls,
        op: OpOverload,
        args: Any,
        kwargs: Any,
        wanted: Sequence[int],
        missing: Mapping[int, str],
    ) -> RecordedBackward:
        # if nothing has a derivative: the results whose gradient may be wanted
        tracked = wanted or list(missing)
        with recorded(op, args, kwargs, tracked) as call:
            seeds, seed_nodes = {}, {}
            for i, r in enumerate(call.results):
                if r.requires_grad:
                    seeds[i] = call.recorder.empty(r.shape, r.dtype, r.device)
                    seed_nodes[i] = call.recorder.graph.placeholder(f"g{i}")
                    call.recorder.give(seed_nodes[i], seeds[i])
            outputs, x = [call.results[i] for i in seeds], [call.tensors[i] for i in wanted]
            grad = (
                torch.autograd.grad(outputs, x, list(seeds.values()), allow_unused=True)
                if outputs and x
                else [None] * len(x)
            )
            grads = {
                i: None if g is None else call.recorder.node(g)
                for i, g in zip(wanted, grad, strict=True)
            }
        results, nodes = [call.recorder.node(r) for r in call.results], call.recorder.graph.nodes
        saves = op.namespace == NAMESPACE and not any(n.target is op for n in nodes)
        return cls(call.inputs, results, seed_nodes, grads, missing if seeds else {}, saves)


class Replay:
    """A recorded derivative, replayed on proxies: calls of the symbols of the recorded operations,
    each once.
    """

    def __init__(self, symbols: Symbols, derivative: RecordedBackward, tensors: Sequence[Any]):
        self._symbols, self._derivative = symbols, derivative
        self._made: dict[Node, Any] = dict(zip(derivative.inputs, tensors, strict=True))

    def results(self) -> list[Any]:
        """The results of the call, as computed under autograd."""
        return list(map(self._value, self._derivative.results))

    def gradients(self, outputs: Sequence[Any], seeds: Mapping[int, Any]) -> dict[int, Any]:
        """The gradient of each tensor that has one, from the results and their gradients."""
        self._made.update(zip(self._derivative.results, outputs, strict=True))
        self._made.update((n, seeds[i]) for i, n in self._derivative.seeds.items())
        return {i: self._value(n) for i, n in self._derivative.grads.items() if n is not None}

    def _value(self, n: Any) -> Any:
        if isinstance(n, (list, tuple)):  # FX's own types, which thunder does not print
            return list(map(self._value, n))
        if not isinstance(n, Node):
            return n
        if n.target is torch.ops.aten.detach.default:  # traces have no autograd
            return self._value(n.args[0])
        if n not in self._made:
            target: Any = n.target
            called = (
                target
                if target is operator.getitem
                else self._symbols.of(_ANY_STRIDES.get(target, target))
            )
            self._made[n] = called(
                *self._value(n.args), **{k: self._value(v) for k, v in n.kwargs.items()}
            )
        return self._made[n]


# ----------------------------------------------------------------------------------- meta functions


def meta_of(op: OpOverload) -> Callable[..., Any]:
    """The meta function of an operation: its fake, with the parameters in its schema."""

    def meta(*args: Any, **kwargs: Any) -> Any:
        with recorded(op, args, kwargs) as call:
            return tree_map(
                lambda r: (
                    proxy_of(r.shape, r.device, r.dtype) if isinstance(r, torch.Tensor) else r
                ),
                call.result,
            )

    # thunder binds arguments by it
    (meta.__signature__,) = get_signature_for_torch_op(op)  # type: ignore[attr-defined,misc]
    return meta


def proxy_of(shape: Sequence[int], device: Any, dtype: torch.dtype) -> TensorProxy:
    """A new proxy of thunder for a tensor like a given one."""
    return TensorProxy(
        shape=tuple(shape),
        device=devices.to_device(device),
        dtype=dtypes.to_dtype(dtype),
        requires_grad=False,
    )


def tensors_in(tree: Any, kind: type = TensorProxy) -> list[Any]:
    """The tensors in a tree of arguments, in order."""
    return [x for x in tree_flatten(tree)[0] if isinstance(x, kind)]


def _autocast(symbol: Symbol, spec: Spec, *args: Any, dtype: Any, **kwargs: Any) -> Any:
    """thunder's autocast rule of an operation: calls it with the arguments that torch's autocast
    would make.
    """
    arguments = named_arguments(spec.name, args, kwargs)
    changed = casted(
        spec, arguments, partial(maybe_downcast_to, dtype), dtypes.to_torch_dtype(dtype)
    )
    positional = list(arguments)[: len(args)]
    return symbol(
        *({**arguments, **changed}[n] for n in positional),
        **{**kwargs, **{n: v for n, v in changed.items() if n not in positional}},
    )


def _missing_meta(x: TensorProxy, why: str) -> TensorProxy:
    return TensorProxy(like=x)


def _raise_missing(x: torch.Tensor, why: str) -> torch.Tensor:
    raise UnsupportedError(why)
