"""Helpers for Dynamo: errors that reach the user as they were raised, and functions with separate
compiled code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import ShortenTraceback

from ...errors import Error

_QUOTED = re.compile(r'File "(.+)", line (\d+), in (.+)\n\s*(.+)')


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another, with a code object of its own: Dynamo keeps what it compiles
    with the code object, so that it is freed with this function.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def first_break(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, str] | None:
    """Why Dynamo breaks the graph of a call first, and the line that is to blame; None if it does
    not.
    """
    try:
        torch.compile(apart(function), backend="eager", fullgraph=True, dynamic=False)(
            *args, **kwargs
        )
    # Dynamo's, or that of a size that depends on data; each quotes the user's code
    except Exception as error:
        reason, *more = (line.strip() for line in str(error).splitlines() if line.strip())
        explained = (
            line.removeprefix("Explanation: ") for line in more if line.startswith("Explanation: ")
        )
        lines = _QUOTED.findall(str(error))
        place = (
            f"{Path(lines[-1][0]).name}:{lines[-1][1]}, in {lines[-1][2]}: {lines[-1][3]}"
            if lines
            else ""
        )
        return ": ".join((reason, *islice(explained, 1))), place
    return None


class _PassedOn(ShortenTraceback):
    """An error that Dynamo passes to the user unchanged. It wraps other errors of a backend in a
    BackendCompilerFailed.
    """

    first_useful_frame = None  # the whole traceback

    def __init__(self, message: str):
        RuntimeError.__init__(self, message)


def as_it_is(error: Error) -> Error:
    """The same error, as a class of the same name that reaches the user unchanged."""
    kind = type(error)
    passed_on = type(kind.__name__, (kind, _PassedOn), {"__module__": kind.__module__})
    return passed_on(error.found, expected=error.expected, todo=error.todo, where=error.where)
