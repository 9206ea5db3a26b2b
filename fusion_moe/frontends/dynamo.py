"""Around Dynamo: errors that reach the user as they were raised, and a function whose compiled code is its own."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from ..errors import Error


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another. Dynamo keeps what it compiles with the code of a function: this one's is its own, and goes with it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


class _PassedOn(ShortenTraceback):
    """What Dynamo hands to the user unchanged. Other errors of a backend it wraps into a BackendCompilerFailed."""

    first_useful_frame = None  # the whole traceback

    def __init__(self, message: str):
        RuntimeError.__init__(self, message)


def as_it_is(error: Error) -> Error:
    """The same error, of a class of the same name that reaches the user."""
    kind = type(error)
    passed_on = type(kind.__name__, (kind, _PassedOn), {"__module__": kind.__module__})
    return passed_on(error.found, expected=error.expected, todo=error.todo, where=error.where)
