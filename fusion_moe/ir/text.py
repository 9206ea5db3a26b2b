"""A Fusion as Python code that builds it again, and the inverse. `parse` reads the text as data:
nothing in it is executed.

    def fusion(fd):
        m = fd.define_size('m')
        g = fd.define_groups('g', 4)
        i0 = fd.define_tensor(shape=[m, 64], dtype="bf16")
        i1 = fd.define_tensor(shape=[4], dtype="i32")
        t0 = fd.ops.ends(i1, rows=m, groups=g)  # i32[4]@ends(g)
        ...
        fd.add_output(t0)

Run by Python with `fd` a FusionDefinition (and NAMES in scope), it builds the same Fusion. Inputs
are called i0, i1, ... and results t0, t1, ... in order, whatever their values' names are: equal
programs have equal text, which is the key of every cache.
"""

from __future__ import annotations

import ast
import operator
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..errors import Error, ParseError
from . import sizes
from .builder import FusionDefinition
from .core import Fusion, Op, Operand, Value
from .kinds import KINDS
from .types import Groups, Rows, TensorType

NAMES: Mapping[str, Any] = {"ceildiv": sizes.ceildiv, "inf": float("inf"), "nan": float("nan")}
_parsing = threading.Lock()  # CPython 3.11 fails if two threads do
_COMMENT = "  # "
_MOST_NESTED = 200  # more than the terms of a size
_BUILDERS = ("define_size", "define_groups", "define_tensor", "add_output")
_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


def text(fusion: Fusion) -> str:
    """The Fusion as `def fusion(fd)`, with types after the operations."""
    return "\n".join(["def fusion(fd):", *("    " + line for line in _lines(fusion))])


def one_line(fusion: Fusion) -> str:
    """The same text in one line, without types and without ": for graphs, whose compilers write it
    into comments and C++ strings.
    """
    line = "; ".join(line.split(_COMMENT, 1)[0] for line in _lines(fusion))
    return f"def fusion(fd): {line}".replace('"', "'")


def _lines(fusion: Fusion) -> list[str]:
    names = value_names(fusion)
    inputs = [(names[v], _tensor(v.type, fusion.role(v))) for v in fusion.inputs]
    return [
        *(f"{s} = fd.define_size({s!r})" for s in fusion.symbols),
        *(f"{g} = fd.define_groups({_partition(g)})" for g in _groups(fusion)),
        *(f"{name} = fd.define_tensor({described})" for name, described in inputs),
        *(op_text(op, names) for op in fusion.ops),
        *(f"fd.add_output({names[v]})" for v in fusion.outputs),
    ]


def value_names(fusion: Fusion) -> dict[Value, str]:
    """The name of each value in the text of the fusion."""
    results = [v for op in fusion.ops for v in op.outputs]
    return {v: f"i{n}" for n, v in enumerate(fusion.inputs)} | {
        v: f"t{n}" for n, v in enumerate(results)
    }


def op_text(op: Op, names: Mapping[Value, str]) -> str:
    """One operation as a line of Python, followed by its types."""

    def name(v: Operand) -> str:
        return names.get(v, v.name) if isinstance(v, Value) else repr(v)

    args = [name(v) for v in op.inputs] + [f"{k}={_attr(v)}" for k, v in op.attrs.items()]
    types = ", ".join(str(v.type) for v in op.outputs)
    return (
        f"{', '.join(map(name, op.outputs))} = "
        f"fd.ops.{op.kind.name}({', '.join(args)}){_COMMENT}{types}"
    )


def _tensor(type: TensorType, role: str) -> str:
    parts = [f"shape=[{', '.join(map(str, type.shape))}]", f'dtype="{type.dtype}"']
    parts += [f'layout="{type.layout}"'] * (type.layout != "linear") + [f"ends={type.ends}"] * (
        type.ends is not None
    )
    return ", ".join(parts + [f'role="{role}"'] * (role != "argument"))


def _partition(groups: Groups) -> str:
    stride = "" if groups.stride is None else f", stride={groups.stride}"
    return f"{groups.name!r}, {groups.count}{stride}"


def _attr(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_attr, value))}]"
    return repr(value)


def _groups(fusion: Fusion) -> list[Groups]:
    results = [
        g
        for v in fusion.values
        for g in [*v.type.partitions(), *([v.type.ends] if v.type.ends else [])]
    ]
    return list(dict.fromkeys(results))


@lru_cache(maxsize=512)
def parse(source: str) -> Fusion:
    """The verified Fusion in a text that `text` printed; for anything else, a ParseError with the
    line.
    """
    try:
        return _built(_statements(source))
    except RecursionError:
        raise ParseError(
            "an expression too deep to read", expected="def fusion(fd), as a Fusion prints it"
        ) from None


def _statements(source: str) -> list[ast.stmt]:
    try:
        with _parsing:
            return ast.parse(source).body
    except (SyntaxError, ValueError, MemoryError) as error:
        raise ParseError(
            f"not Python ({error})", expected="def fusion(fd), as a Fusion prints it"
        ) from None


def _built(body: Sequence[ast.stmt]) -> Fusion:
    if (
        len(body) != 1
        or not isinstance(body[0], ast.FunctionDef)
        or not ast.unparse(body[0]).startswith("def fusion(fd):\n")
    ):
        raise ParseError(
            f"{len(body)} statements",
            expected="one function, def fusion(fd), as a Fusion prints it",
        )
    fd, names = FusionDefinition(), dict(NAMES)
    for statement in body[0].body:
        try:
            _run(statement, fd, names)
        except (ParseError, RecursionError):
            raise
        except Exception as error:  # any error of the types or the builder
            raise ParseError(
                f"{ast.unparse(statement)}: {error}", where=f"line {statement.lineno}"
            ) from None
    try:
        return fd.fusion()
    except Error as error:
        raise ParseError(f"a program that does not verify: {error}") from None


def _run(statement: ast.stmt, fd: FusionDefinition, names: dict[str, Any]) -> None:
    line, target = f"line {statement.lineno}", None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    if not isinstance(statement, (ast.Assign, ast.Expr)) or not isinstance(
        statement.value, ast.Call
    ):
        raise ParseError(
            ast.unparse(statement), expected="a call of fd, or names assigned from one", where=line
        )
    call = statement.value
    args = [_data(a, names, line) for a in call.args]
    result = _method(call.func, fd, line)(
        *args, **{str(k.arg): _data(k.value, names, line) for k in call.keywords}
    )
    if isinstance(target, ast.Tuple):
        names.update(zip(_target_names(target.elts, line), result, strict=True))
    elif target is not None:
        names.update(zip(_target_names([target], line), [result], strict=True))


def _target_names(nodes: Sequence[ast.expr], line: str) -> list[str]:
    if all(isinstance(n, ast.Name) for n in nodes):
        return [n.id for n in nodes if isinstance(n, ast.Name)]
    raise ParseError(", ".join(map(ast.unparse, nodes)), expected="names", where=line)


def _method(node: ast.expr, fd: FusionDefinition, line: str) -> Any:
    path = ast.unparse(node).split(".")
    if path[0] == "fd" and len(path) == 2 and path[1] in _BUILDERS:
        return getattr(fd, path[1])
    if path[:2] == ["fd", "ops"] and len(path) == 3 and path[2] in KINDS:
        return getattr(fd.ops, path[2])
    raise ParseError(
        f"a call of {'.'.join(path)}",
        expected=f"fd.ops.<operation> or one of fd.{', fd.'.join(_BUILDERS)}",
        where=line,
    )


def _data(node: ast.expr, names: Mapping[str, Any], line: str, depth: int = 0) -> Any:
    """A literal, a name defined before, a list, or a size written with + - * / % and ceildiv."""
    if depth > _MOST_NESTED:
        raise ParseError(
            "an expression too deep to read", expected=f"at most {_MOST_NESTED} levels", where=line
        )
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return tuple(_data(e, names, line, depth + 1) for e in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_data(node.operand, names, line, depth + 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sides = [_data(side, names, line, depth + 1) for side in (node.left, node.right)]
        if all(isinstance(side, (int, sizes.Size, Groups, Rows)) for side in sides):
            return _OPERATORS[type(node.op)](*sides)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "ceildiv":
        return sizes.ceildiv(*(_data(a, names, line, depth + 1) for a in node.args))
    raise ParseError(
        ast.unparse(node), expected="a literal, a name defined before, or a size", where=line
    )
