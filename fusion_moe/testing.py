"""For tests of translators: `check_translator(op, *args)` compares one with its operation, alone
and fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from . import options
from .compile import run
from .definitions.translate import Operation, overload_of
from .errors import TranslatorError
from .frontends.inductor.compile_graph import compile_calls
from .frontends.inductor.dynamo import apart
from .frontends.inductor.fusion_pass import FusionPass
from .frontends.reference_semantics import compared, drawn, found, same
from .frontends.regions import Found
from .plugins import message

__all__ = ["check_translator"]

_K = 16  # in-features of the product with which the operation is fused: the fewest possible
_PRODUCTS = (torch.float16, torch.bfloat16, torch.float32)
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def check_translator(
    op: Operation, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> None:
    """Calls an operation and compares the result of its body with its fake, with its translator run
    in plain torch, and with the translator compiled: alone, and fused with a grouped product whose
    result is the first float tensor [..., N] among the positional arguments.

    It does so with the given arguments; with random floats of the same shapes; and with random
    floats of 0, 1 and 3 more rows in every tensor that has as many rows as the first one, if the
    operation takes them.

    Args:
        op: the operation, or its name.
        rtol: relative tolerance, as in torch.testing.assert_close.
        atol: absolute tolerance.

    Raises:
        TranslatorError: says what differs or fails.
        Untranslatable: the translator refuses the given call.
    """
    overload, call = overload_of(op), (args, kwargs)
    near = {"rtol": rtol, "atol": atol}
    # which would keep more precision than the operation
    with torch.no_grad(), options.override(contract_rounding=False):
        _check_alone(overload, call, near)
        taken = [other for other in _others(call) if _takes(overload, other, near)]
        _check_fused(overload, [call, *taken], near)


def _takes(op: OpOverload, call: _Call, near: Mapping[str, Any]) -> bool:
    """Compares a call other than the given one. False if the operation does not accept it."""
    try:
        _check_alone(op, call, near)
    except TranslatorError:
        raise
    except Exception:  # from its body or its fake; or the translator refuses
        return False
    return True


def _check_alone(op: OpOverload, call: _Call, near: Mapping[str, Any]) -> None:
    translated = compared(op, *call, **near)
    try:
        got = run(translated.fusion, translated.inputs)
    except Exception as error:
        refused = f"the translator of {op} returned a program that does not run: {message(error)}"
        raise TranslatorError(refused, where=found(op).where) from error
    same(found(op), "compiled alone", got, translated.want, **near)


def _check_fused(op: OpOverload, calls: Sequence[_Call], near: Mapping[str, Any]) -> None:
    """Compares calls in which an argument is the result of a product, if a product can have such a
    result.
    """
    at = next(
        (
            i
            for i, a in enumerate(calls[0][0])
            if isinstance(a, Tensor) and a.dtype in _PRODUCTS and a.dim() > 1
        ),
        None,
    )
    if at is None:
        return
    seen: list[Found] = []
    x = calls[0][0][at]
    weight = torch.ops.fusion_moe.nvfp4_quantize(
        drawn(x.new_empty(2, x.shape[-1], _K, dtype=torch.float32))
    )
    rows = _rows(calls[0])
    resized = [i for i, t in enumerate(tree_leaves(calls[0])) if _has_rows(t, rows)]

    def fused(a: Tensor, ends: Tensor, call: _Call) -> Any:
        y = torch.ops.fusion_moe.nvfp4_grouped_mm(a, *weight, ends)
        args, kwargs = call
        args = (*args[:at], y, *args[at + 1 :])
        leaves = tree_leaves((args, kwargs))
        for i in resized:  # automatic dynamic shapes give each tensor a symbol of its own
            torch._check(leaves[i].shape[0] == leaves[resized[0]].shape[0])
        return op(*args, **kwargs)

    def backend(model: Any, inputs: Sequence[Any]) -> Any:
        return compile_calls(FusionPass(options.current(), found=seen.append), model, inputs)

    compiled = torch.compile(apart(fused), backend=backend)
    for call in calls:
        x = call[0][at]
        count = x.shape[:-1].numel()
        a = drawn(x.new_empty(*x.shape[:-1], _K))
        ends = torch.tensor([count // 2, count], dtype=torch.int32, device=x.device)
        got = compiled(a, ends, call)
        for refused in (x for graph in seen for x in graph.not_fused if x.broken):
            raise TranslatorError(refused.why)
        same(
            found(op),
            "fused with a product",
            tree_leaves(got),
            tree_leaves(fused(a, ends, call)),
            **near,
        )


def _others(call: _Call) -> list[_Call]:
    """Calls with random floats: of the same shapes, and with other numbers of rows."""
    rows = _rows(call)
    sizes = [rows, *(n for n in (0, 1, rows + 3) if n != rows)]
    return [
        tree_map(lambda a, n=n: _resized(a, rows, n) if isinstance(a, Tensor) else a, call)
        for n in sizes
    ]


def _rows(call: _Call) -> int:
    """The number of rows of the first tensor."""
    tensors = [t for t in tree_leaves(call) if isinstance(t, Tensor)]
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 0


def _has_rows(t: Any, rows: int) -> bool:
    return isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == rows


def _resized(t: Tensor, rows: int, to: int) -> Tensor:
    """A tensor of `rows` rows resized to `to`. Integers may count or index rows: their maximum is
    lowered by the number of rows removed.
    """
    if _has_rows(t, rows):
        t = t[torch.arange(to, device=t.device) % rows] if rows else t.new_zeros(to, *t.shape[1:])
    if t.dtype in (torch.int32, torch.int64) and t.numel() and to < rows:
        t = t.clamp(max=max(0, int(t.max()) + to - rows))
    return drawn(t)
