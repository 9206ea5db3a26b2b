"""Queries about single nodes of an FX graph: is it a call, of which operation, with which results,
from which line; and of where the values of symbolic sizes can be read.
"""

from __future__ import annotations

import ast
import linecache
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import OpOverload
from torch.fx import Node


def call_of(n: Node) -> Node:
    """The call whose result a getitem takes; any other node unchanged."""
    return n.args[0] if n.target is operator.getitem else n  # type: ignore[return-value]


def with_parts(n: Node) -> list[Node]:
    """The call that a node of a graph is, or is a result of, and all getitem nodes that unpack its
    results. They move together.
    """
    call = call_of(n)
    return [call, *(u for u in call.users if u.target is operator.getitem)]


def is_call(n: Node) -> bool:
    """Whether a node calls an operation."""
    return n.op == "call_function" and isinstance(n.target, OpOverload)


def called_op(n: Node) -> OpOverload | None:
    """The operation that a node calls. If it writes into its arguments, it is an argument of a call
    that copies these.
    """
    if is_call(n):
        return n.target  # type: ignore[return-value]
    functionalized = n.op == "call_function" and n.target in (
        auto_functionalized,
        auto_functionalized_v2,
    )
    return n.args[0] if functionalized else None  # type: ignore[return-value]


def writes(n: Node) -> bool:
    """Whether a node calls an operation that writes into its arguments."""
    op = called_op(n)
    return op is not None and op._schema.is_mutable


def op_name(n: Node) -> str:
    """The name of a call's operation, under which translators are registered."""
    op = called_op(n)
    assert op is not None
    return op.name()


def is_torchs(n: Node) -> bool:
    """Whether a call is of one of torch's own operations, which the graph's compiler could fuse
    too.
    """
    return op_name(n).split("::")[0] in ("aten", "prims")


def has_tensors(n: Node) -> bool:
    """Whether a node has results, and all of them are tensors."""
    val = n.meta.get("val")
    return bool(tensors(val)) and len(tensors(val)) == (
        len(val) if isinstance(val, (tuple, list)) else 1
    )


def tensors(val: Any) -> list[torch.Tensor]:
    """The tensors among the results of a node."""
    return [
        v
        for v in (val if isinstance(val, (tuple, list)) else (val,))
        if isinstance(v, torch.Tensor)
    ]


def device_of(n: Node) -> torch.device:
    """The device of a call's results."""
    return tensors(call_of(n).meta["val"])[0].device


def is_view(n: Node) -> bool:
    """Whether a call of a torch operation returns memory of its input."""
    return any(r.alias_info is not None for r in n.target._schema.returns)  # type: ignore[union-attr]


_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in '
    r"(?P<function>.+)\n\s*(?P<code>.*)"
)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def frame_of(n: Node) -> re.Match[str] | None:
    """The frame of the user's program that a node comes from: its file, line, function and code.
    None if the trace has none.
    """
    frames = list(_FRAME.finditer(n.meta.get("stack_trace") or ""))
    own = [m for m in frames if not m["file"].startswith(_LIBRARIES)] or frames
    return own[-1] if own else None


def source_of(n: Node) -> str:
    """The line of the user's program that a node comes from: "model.py:31, in forward: y =
    self.up(x)". Empty if the trace has none.
    """
    frame = frame_of(n)
    return (
        (
            f"{Path(frame['file']).name}:{frame['line']}, in {frame['function']}: "
            f"{frame['code'].strip()}"
        )
        if frame
        else ""
    )


def function_around(file: str, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function around a line; None outside of functions and Python files."""
    around = [f for f in _functions(file) if f.lineno <= line <= (f.end_lineno or f.lineno)]
    return max(around, key=lambda f: f.lineno, default=None)


@lru_cache(maxsize=64)
def _functions(file: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return tuple(n for n in ast.walk(tree) if isinstance(n, kinds))


# Dynamo's names of inputs: parts of modules, arguments, globals of a Python module
_PARTS = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
_ARGUMENT = re.compile(r"L\['args'\](?P<place>\[\d+\])|L\['kwargs'\]\['(?P<name>[^']+)'\]")
_GLOBAL = re.compile(r"G\['(?P<name>[^']+)'\](\.(?P<of>.+))?")


def users_name(n: Node) -> str:
    """An input of a Dynamo graph as the user names it: "experts.gate_up", "args[0]"."""
    name = getattr(getattr(n, "_dynamo_source", None), "name", "")
    name = str(name() if callable(name) else name)  # a property since torch 2.11
    if parts := _PARTS.findall(name):
        return ".".join(parts)
    if argument := _ARGUMENT.fullmatch(name):
        return argument["name"] or f"args{argument['place']}"
    if named := _GLOBAL.fullmatch(name):
        return named["of"] or named["name"]
    return n.name


@dataclass(frozen=True)
class SizeSource:
    """Where a size can be read: a node that is the size, or a dimension of a tensor."""

    node: Node
    dim: int | None


def size_sources(nodes: Sequence[Node]) -> dict[Any, list[SizeSource]]:
    """Where each symbolic size can be read."""
    sources: dict[Any, list[SizeSource]] = {}
    for n in nodes:
        val = n.meta.get("val")
        dims: Iterable[tuple[int | None, Any]] = (
            enumerate(val.shape) if isinstance(val, torch.Tensor) else [(None, val)]
        )
        for dim, size in dims:
            if isinstance(size, torch.SymInt):
                sources.setdefault(size.node.expr, []).append(SizeSource(n, dim))
    return sources
