"""Checks whether a translator computes what its operation does: both run on the same tensors, the
translation in plain torch.

The option `check` does this with random tensors for every call that a user's translator accepts;
`fusion_moe.testing` checks more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import tracing
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..definitions import translate
from ..definitions.nodes import called_op
from ..definitions.operations import fp4_as_bytes
from ..definitions.traced import hint
from ..definitions.translate import Translator
from ..definitions.walk import Walk
from ..errors import Error, TranslatorError, in_one_line
from ..ir import Fusion
from ..messages import warn_once
from ..plugins import message

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ANOTHER = 0.03  # a difference that two roundings, or two orders of a sum, do not cause


@dataclass(frozen=True)
class Translated:
    """A translated call. inputs: the tensors that the Fusion reads, packed codes as bytes; want:
    the results of the operation.
    """

    fusion: Fusion
    inputs: tuple[Tensor, ...]
    want: tuple[Tensor, ...]


def compared(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rtol: float | None = None,
    atol: float | None = None,
) -> Translated:
    """A call on real tensors whose body, fake and translator agree. TranslatorError if they
    disagree, Untranslatable if it is refused.

    rtol, atol: tolerances, as in torch.testing.assert_close.
    """
    translator = found(op)
    walk, inputs = _translated(op, args, kwargs)
    fakes = _results(walk.nodes[0].meta["val"])
    want = _results(op(*args, **kwargs))
    if _forms(want) != _forms(fakes):
        raise TranslatorError(
            f"{op} returns {_forms(want)}",
            expected=f"{_forms(fakes)}, as its fake returns",
            todo="fix the fake",
        )
    for refusal in walk.refused.values():
        raise refusal
    try:
        fusion = walk.fusion
    except Error as error:
        raise TranslatorError(
            error.found, expected=error.expected, todo=error.todo, where=translator.where
        ) from error
    same(translator, "in plain torch", fusion.evaluate(*inputs), want, rtol, atol)
    return Translated(fusion, inputs, want)


def found(op: OpOverload) -> Translator:
    """The translator of an operation. TranslatorError if there is none, or if the operation writes
    into its arguments.
    """
    translator = translate.find(op.name())
    if translator is None or op._schema.is_mutable:
        why = (
            "has no translator"
            if translator is None
            else ("mutates its arguments, and a fusion only returns new tensors")
        )
        raise TranslatorError(
            f"{op} {why}", expected="an operation that returns new tensors, with a translator"
        )
    return translator


def same(
    translator: Translator,
    what: str,
    got: Sequence[Tensor],
    want: Sequence[Tensor],
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """TranslatorError if results of a translation are not close to those of the operation. what:
    how they were computed.
    """
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        try:
            torch.testing.assert_close(a, fp4_as_bytes(b), rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise TranslatorError(
                f"the translator of {translator.op}, {what}, differs from the operation in output "
                f"{i}: {in_one_line(error)}",
                expected="the operation's values",
                todo="fix the translator",
                where=translator.where,
            ) from None


def semantics_error(n: Node) -> TranslatorError | None:
    """How a call's operation, run on random tensors of its shapes, differs from its translator;
    None if they agree or it cannot run.
    """
    op = called_op(n)
    assert op is not None
    with _disable_current_modes(), torch.no_grad():
        try:
            args, kwargs = tree_map(_real, (tuple(n.args), dict(n.kwargs)))
            compared(op, args, kwargs, rtol=_ANOTHER, atol=_ANOTHER)
        except TranslatorError as error:
            return error
        except Exception as error:  # the operation may not accept random values
            warn_once(
                f"check: {op} was not compared with its translator, because it fails on "
                f"random inputs: {message(error)}"
            )
    return None


def drawn(t: Tensor, seed: int = 0) -> Tensor:
    """Random values for a float tensor, the same in every run; any other tensor unchanged."""
    if t.dtype not in _FLOATS:
        return t
    values = torch.randn(
        t.shape,
        generator=torch.Generator("cpu").manual_seed(seed),
        dtype=torch.float64,
        device="cpu",
    )
    return values.to(t.device, t.dtype)


def _real(a: Any) -> Any:
    """A real tensor for the fake one of a node; integers are zeros, which are valid indices for
    every size.
    """
    val = a.meta["val"] if isinstance(a, Node) else a
    if isinstance(val, torch.SymInt):
        return int(hint(val))
    if not isinstance(val, Tensor):
        return val
    return drawn(torch.zeros([int(hint(s)) for s in val.shape], dtype=val.dtype, device=val.device))


def _results(result: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in tree_leaves(result) if isinstance(t, Tensor))


def _forms(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{t.dtype} {list(t.shape)}" for t in tensors)


def _translated(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Walk, tuple[Tensor, ...]]:
    """The walk over a call in a graph, and the tensors that are its inputs, codes as bytes."""
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    tensors = {id(a): a for a in leaves if isinstance(a, Tensor)}

    def call(*fakes: Tensor) -> Any:
        fake = dict(zip(tensors, fakes, strict=True))
        fake_args, fake_kwargs = tree_unflatten([fake.get(id(a), a) for a in leaves], spec)
        return op(*fake_args, **fake_kwargs)

    with torch.no_grad(), tracing(None):  # otherwise in the mode of a trace around this call
        graph = make_fx(call, tracing_mode="fake")(*tensors.values()).graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    # by name: an operation that was removed and defined again may be another object
    if str(called_op(nodes[0])) != str(op):
        raise TranslatorError(f"{op} is decomposed in graphs", expected="an operation that is not")
    walk = Walk(nodes)
    inputs = dict(
        zip(graph.nodes, tensors.values(), strict=False)
    )  # a graph begins with its inputs
    read = (inputs[n].mT if n in walk.transposed else inputs[n] for n in walk.inputs)
    return walk, tuple(map(fp4_as_bytes, read))
