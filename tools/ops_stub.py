"""Writes fusion_moe/ir/op_methods.pyi: the signatures and docs of `fd.ops` that editors show, from
the table of kinds.

.venv/bin/python tools/ops_stub.py
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fusion_moe.ir
from fusion_moe.ir.core import OpKind
from fusion_moe.ir.kinds import KINDS

STUB = Path(fusion_moe.ir.__path__[0]) / "op_methods.pyi"
HEAD = '''"""`fd.ops` for type checkers and editors. Written by tools/ops_stub.py."""

from collections.abc import Callable, Sequence
from typing import Any, overload

from .core import Operand, Value
from .sizes import AnySize
from .types import Dim, Groups

class Ops:
    def __init__(self, append: Callable[..., tuple[Value, ...]]) -> None: ...
'''
Parameter = inspect.Parameter


def stub() -> str:
    """The text of the stub."""
    return HEAD + "\n".join(line for kind in KINDS.values() for line in method(kind)) + "\n"


def method(kind: OpKind) -> Iterator[str]:
    """One kind: its operands by position, as values or in one list where there may be any number;
    its attributes.
    """
    parameters = list(inspect.signature(kind.infer).parameters.values())
    operands = [p for p in parameters if p.name not in kind.signature.attributes]
    attributes = [attribute(p) for p in parameters if p not in operands]
    if kind.signature.operands is None:
        yield "    @overload"
        yield from definition(kind, [*(operand(p) for p in operands), *attributes])
        yield "    @overload"
        attributes = ["operands: Sequence[Operand]", "/", *attributes]
        operands = []
    given = [operand(p) for p in operands]
    yield from definition(kind, [*given, "/", *attributes] if given else attributes)


def definition(kind: OpKind, parameters: list[str]) -> Iterator[str]:
    """A method with its docstring, in lines of at most 100 columns."""
    returned = {1: "Value", None: "Any"}.get(
        kind.outputs
    ) or f"tuple[{', '.join(['Value'] * (kind.outputs or 0))}]"
    given = ["self", *parameters]
    line = f"    def {kind.name}({', '.join(given)}) -> {returned}:"
    yield from (
        [line]
        if len(line) <= 100
        else [f"    def {kind.name}(", *wrapped(given), f"    ) -> {returned}:"]
    )
    lines = "\n\n".join(textwrap.fill(p, 86) for p in kind.doc.split("\n\n")).split("\n")
    lines[0] = f'"""{lines[0]}'
    yield from textwrap.indent(
        "\n".join([*lines, '"""'] if len(lines) > 1 else [lines[0] + '"""']), " " * 8
    ).split("\n")


def wrapped(parameters: list[str]) -> list[str]:
    """Parameters in lines, which break between them."""
    text = textwrap.fill(", ".join(p.replace(" ", "\0") for p in parameters) + ",", 91)
    return textwrap.indent(text.replace("\0", " "), " " * 8).split("\n")


def operand(p: Parameter) -> str:
    """A tensor, or where the rule takes Any, a number too."""
    return (
        f"{'*' if p.kind is Parameter.VAR_POSITIONAL else ''}{p.name}: "
        f"{'Operand' if p.annotation == 'Any' else 'Value'}"
    )


def attribute(p: Parameter) -> str:
    """Plain data; a list will do for a tuple."""
    written: Any = p.annotation.replace("tuple[", "Sequence[").replace(", ...]", "]")
    return f"{p.name}: {written}" + ("" if p.default is Parameter.empty else f" = {p.default!r}")


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
