"""`fd.ops`: one method for each row of the table of kinds. Editors and type checkers read
op_methods.pyi, which tools/ops_stub.py writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .core import OpKind, Value, no_operation
from .kinds import KINDS

Append = Callable[[OpKind, Sequence[Any], Mapping[str, Any]], tuple[Value, ...]]


class Ops:
    """`fd.ops.<kind>(*inputs, **attributes)`: appends an operation and returns its output, or a
    tuple of them.
    """

    def __init__(self, append: Append):
        self._append = append

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in KINDS:
            raise no_operation(f"no operation is called {name!r}", name, KINDS)
        kind = KINDS[name]

        def call(*inputs: Any, **attrs: Any) -> Any:
            outputs = self._append(kind, inputs, attrs)
            return outputs if len(outputs) > 1 else outputs[0]

        call.__name__, call.__doc__ = name, kind.doc
        return call

    def __dir__(self) -> list[str]:
        return sorted(KINDS)
