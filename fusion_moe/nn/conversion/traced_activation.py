"""The text of an activation, traced from a torch function."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._guards import tracing
from torch.fx import GraphModule, Node

from ...definitions import translate
from ...definitions.nodes import op_name
from ...definitions.walk import Walk
from ...encodings import real_tensors
from ...errors import Error, UnsupportedError, Untranslatable
from ...ir import FusionDefinition, TensorType, Value, dtype_name
from ...ir.activation import read, written
from ...ir.derivative import differentiate
from ...messages import warn_once
from ...plugins import message

_ROWS, _FEATURES = 3, 8  # of the tensors that are traced


def activation(
    function: Callable[..., Tensor], parts: int = 2, interleave: int = 0, parameters: int = 0
) -> str:
    """The text of a pointwise torch function, for `Experts` and `fused_experts`.

        activation(lambda gate, up: torch.nn.functional.gelu(gate) * up)

    Args:
        function: takes the parts, then the parameters, float tensors [M, I], and returns one. It
            is traced once, in float32.
        parts: 2: gate and up; 1: up alone.
        interleave: in the rows of gate_up, 0: gate above up; n: blocks of n gate rows and n up rows
            alternate.
        parameters: of each expert, which the function takes in each row: those of the row's expert
            in `activation_parameters`.

    Raises:
        UnsupportedError: for a function that is not pointwise, depends on data, has tensors of its
            own or calls an operation without a translator.
    """

    def of_columns(x: Tensor, *more: Tensor) -> Tensor:
        return function(*x.unflatten(1, (parts, -1)).unbind(1), *more)

    try:
        _need_parts(function, parts + parameters)
        with real_tensors():
            return _text(_columns(of_columns, parts, parameters), interleave)
    except Error as error:
        raise UnsupportedError(
            error.found, expected=error.expected, todo=error.todo, where="activation"
        ) from error


Texts = dict[bool, str | None]  # by whether gate and up are as they are stored
_traced = WeakKeyDictionary[Any, tuple[Hashable, Texts]]()  # by module
_by_kind: dict[Hashable, tuple[Texts, Any]] = {}  # and what the kind names, so that it stays
_KINDS, _ABSENT, _HOOKS = 64, nn.Identity(), ("_forward_hooks", "_forward_pre_hooks")
_COMPARED = bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType


def activation_of(module: Any, as_stored: bool = False) -> str | None:
    """The text of the activation of a module that follows transformers'
    `use_experts_implementation`: of `_apply_gate`, or `act_fn` without a gate. None, after a
    warning, if it has none.

    as_stored: gate and up in the order of the module's weights; otherwise gate above up.
    """
    numbers, cached = _numbers(module), _traced.get(module)
    if cached is None or cached[0] != numbers:
        _traced[module] = cached = numbers, _of_kind(module)
    return cached[1][as_stored]


def is_that_of(module: Any, copy: Any) -> None:
    """Gives `module` the traced activation of `copy`, a copy of it, so that the same function is
    not traced twice. Nothing happens if the copy's was not traced.
    """
    if copy in _traced:
        _traced[module] = _numbers(module), _traced[copy][1]


# torch.compiler.assume_constant_result or disable, which would import the tracer. What a module's
# experts compute does not change. Tracers before torch 2.13 take no module as an argument: there
# the graph breaks.
activation_of.__dict__[
    "_dynamo_marked_constant" if torch.__version__ >= "2.13" else "_torchdynamo_disable"
] = True


def _numbers(module: Any) -> Hashable:
    """What an activation may depend on: numbers among the attributes of the module and of its
    function, and the function.
    """
    function = getattr(module, "act_fn", None)
    owners = vars(module), getattr(function, "__dict__", {})
    return id(function), tuple(
        (name, v)
        for owner in owners
        for name, v in owner.items()
        if isinstance(v, (bool, int, float)) and name != "training"
    )


def _of_kind(module: Any) -> Texts:
    """As `_of_module`: once for all layers of a model."""
    kind = _kind(module)
    if kind is None:
        return _of_module(module)
    if kind not in _by_kind:
        if len(_by_kind) == _KINDS:
            _by_kind.clear()
        _by_kind[kind] = _of_module(module), getattr(module, "config", None)
    return _by_kind[kind][0]


def _kind(module: Any) -> Hashable:
    """All that the activations of two modules may differ by. None where that is not known: with
    tensors, hooks or objects of their own.
    """
    function = getattr(module, "act_fn", _ABSENT)
    if not (isinstance(module, nn.Module) and isinstance(function, nn.Module)):
        return None
    more = [vars(function)[n] for n in ("_modules", "_parameters", "_buffers", *_HOOKS)]
    own = [(n, v) for m in (module, function) for n, v in vars(m).items() if n not in vars(_ABSENT)]
    own = [(n, v) for n, v in own if n != "config"]
    config = getattr(module, "config", None)
    if (
        module._modules.keys() - {"act_fn"}
        or any(more)
        or not all(isinstance(v, _COMPARED) for _, v in own)
    ):
        return None
    own += [(n, v) for n, v in getattr(config, "__dict__", {}).items() if isinstance(v, _COMPARED)]
    gate = getattr(type(module), "_apply_gate", None)
    return type(module), gate, type(function), id(config), tuple((n, type(v), v) for n, v in own)


def _of_module(module: Any) -> Texts:
    function, parts = (module._apply_gate, 2) if module.has_gate else (module.act_fn, 1)
    try:
        with real_tensors():
            columns = _columns(function, parts)
            apart = _text(columns, 0)
            stored = _text(columns, columns.interleave) if columns.interleave else apart
            return {False: apart, True: stored}
    except Error as error:
        warn_once(
            f"the activation of {type(module).__name__} runs between two products, not inside of "
            f"them: {error.found}"
        )
        return {False: None, True: None}


def _text(columns: _Columns, interleave: int) -> str:
    """The text of what a graph computes, if it has a derivative. interleave: of the text."""
    parameters = len(columns.parameters)
    text = written(columns.body, columns.parts, interleave, parameters)
    _need_derivative(text, parameters)
    return text


@lru_cache(maxsize=64)  # all layers of a model have one text
def _need_derivative(text: str, parameters: int) -> None:
    differentiate(
        read(text).fusion,
        range(1 + parameters),
        names=("the rows", *(f"parameter {i}" for i in range(parameters))),
    )


def _columns(function: Callable[..., Any], parts: int, parameters: int = 0) -> _Columns:
    """The graph of a function of f32[_ROWS, parts * I], and of parameters f32[_ROWS, I]. What has
    no translator is decomposed.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    def called(*inputs: Tensor) -> Any:  # the tracer reads signatures, and miscounts methods'
        return function(*inputs)

    widths = parts * _FEATURES, *[_FEATURES] * parameters
    inputs = [torch.empty(_ROWS, width, dtype=torch.float32) for width in widths]
    try:
        with tracing(None):  # otherwise sizes would be the symbols of a trace around this call
            trace = make_fx(
                functionalize(called, remove="mutations"),
                _decompositions(),
                "fake",
                _allow_non_fake_inputs=True,
            )
            # the tracer's state is the process's; and what was decomposed
            with compile_lock, preserve_node_meta():
                graph = trace(*inputs)
    except Exception as error:  # of the user's function, or of the tracer
        raise Untranslatable(message(error).split("\n")[0]) from error
    return _Columns(graph, parts)


def _need_parts(function: Callable[..., Any], count: int) -> None:
    """Untranslatable for a function that takes fewer tensors than there are parts: the next one
    would be a number of its own.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = [p for p in taken if not isinstance(p.default, (bool, int, float))]
    if len(taken) < count:
        names = ", ".join(p.name for p in taken) or "none"
        raise Untranslatable(
            f"a function of {len(taken)} tensors ({names}) for {count}",
            expected="function(gate, up), which gets the halves of each row, and then parameters",
            todo="write f(gate, up) in place of x.chunk(2, -1); parts=1 is for experts without a "
            "gate",
        )


@lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    known = {t.op for t in translate.registered()}
    return {op: f for op, f in decomposition_table.items() if op.name() not in known}


class _Columns:
    """A graph of one tensor [M, parts * I], as a function of its parts and of parameters.

    Views of the input are run on the positions of its elements: they must give the same columns of
    each row, those of one part.
    """

    def __init__(self, graph: GraphModule, parts: int):
        self.nodes, self.parts = list(graph.graph.nodes), parts
        x, *self.parameters = (n for n in self.nodes if n.op == "placeholder")
        every = torch.arange(_ROWS * parts * _FEATURES).view(_ROWS, -1)
        self.positions: dict[Node, Any] = {x: every}
        for n in self.nodes:
            if n.op == "get_attr":
                raise Untranslatable(
                    f"a tensor of its own, {n.target}",
                    expected="a function of its arguments",
                    todo="activation(function, parameters=1) passes it parameters of each expert",
                )
            if n.target is torch.ops.aten.detach.default:
                raise Untranslatable(
                    "a tensor that is detached", expected="gradients of all that is computed"
                )
            if n.target is torch.ops.aten._to_copy.default:  # all tensors are on one device
                n.kwargs = {"dtype": n.kwargs.get("dtype")}
            if n.op == "call_function" and _is_view(n) and n.args[0] in self.positions:
                self.positions[n] = n.target(self.positions[n.args[0]], *n.args[1:], **n.kwargs)
        self.part_of = {
            n: self._part(self.positions[n])
            for n in self.nodes
            if n in self.positions and any(u not in self.positions for u in n.users)
        }
        self.interleave = max((turns for _, turns in self.part_of.values()), default=0)

    def _part(self, positions: Any) -> tuple[int, int]:
        """The part that has these columns, and the size of the blocks that alternate."""
        for turns in (0, 1, 2, 4) if self.parts > 1 else (0,):
            block = turns or _FEATURES
            every = torch.arange(_ROWS * self.parts * _FEATURES)
            divided = every.view(_ROWS, -1, self.parts, block)
            for part in range(self.parts):
                if torch.equal(divided[:, :, part].flatten(1), positions):
                    return part, turns
        raise Untranslatable(
            "an operation on columns other than all of gate, or all of up",
            todo="write f(gate, up) for the halves of rows" if self.parts == 1 else "",
        )

    def body(self, fd: FusionDefinition, *inputs: Value) -> Value:
        """What the graph computes of the parts, then the parameters."""
        if len({turns for _, turns in self.part_of.values()}) > 1:
            raise Untranslatable("gate and up in two orders")
        rows = _Rows(
            [n for n in self.nodes if n.op == "call_function" and n not in self.positions],
            fd,
            {
                self.nodes[0]: inputs[0],
                **{n: inputs[part] for n, (part, _) in self.part_of.items()},
                **dict(zip(self.parameters, inputs[self.parts :], strict=True)),
            },
        )
        for refusal in rows.refused.values():
            raise refusal
        result: Any = self.nodes[-1].args[0]
        return rows.values[result] if isinstance(result, Node) else result


class _Rows(Walk):
    """A walk over calls on tensors [_ROWS, _FEATURES], which stand for those of any sizes."""

    def called(self, n: Node) -> str:
        """The function of torch that was decomposed into it."""
        return str(getattr(n.meta.get("original_aten"), "overloadpacket", op_name(n)))

    def _translate(self, n: Node) -> None:
        constant = _constant(n)
        if constant is None:
            super()._translate(n)
        else:  # a number beside each element
            self.values[n], self.made[n] = constant, ()

    def type_of(self, val: Tensor) -> TensorType:
        """Of the number of rows and features that the parts have."""
        if tuple(val.shape) != (_ROWS, _FEATURES):
            raise Untranslatable(
                f"a tensor of shape {list(val.shape)} for {_ROWS} rows of {_FEATURES} features",
                expected="one number for each feature of each row",
            )
        part: Value = next(iter(self.values.values()))
        return part.type.with_(dtype=dtype_name(val.dtype))


# what makes tensors of one number, and which of the arguments that is, or the number
_CONSTANTS = {
    **{f"{lib}::scalar_tensor": (0, None) for lib in ("aten", "prims")},
    **{f"{lib}::full{like}": (1, None) for lib in ("aten", "prims") for like in ("", "_like")},
    "aten::new_full": (2, None),
    **{f"aten::{name}": (0, 0.0) for name in ("zeros", "zeros_like", "new_zeros")},
    **{f"aten::{name}": (0, 1.0) for name in ("ones", "ones_like", "new_ones")},
}


def _constant(n: Node) -> float | bool | None:
    """The number that all elements are, of a call that makes such a tensor."""
    if n.target is operator.getitem or op_name(n) not in _CONSTANTS:
        return None
    at, number = _CONSTANTS[op_name(n)]
    result: Any = n.args[at] if number is None else number
    return float(result) if n.meta["val"].is_floating_point() else result


def _is_view(n: Node) -> bool:
    """Whether a node returns what one tensor has, in another shape or order."""
    op: Any = n.target
    views = ("aten::clone", "aten::_unsafe_view")
    return op is operator.getitem or op.is_view or op.name() in views
