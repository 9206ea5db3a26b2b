"""Helpers for Dynamo: errors that reach the user as they were raised, and functions with separate compiled code."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from ..errors import Error


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another. Dynamo stores compiled code with a function's code: this one has its own, which is freed with it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


class _PassedOn(ShortenTraceback):
    """An error that Dynamo passes to the user unchanged. It wraps other errors of a backend in a BackendCompilerFailed."""

    first_useful_frame = None  # the whole traceback

    def __init__(self, message: str):
        RuntimeError.__init__(self, message)


def as_it_is(error: Error) -> Error:
    """The same error, as a class of the same name that reaches the user unchanged."""
    kind = type(error)
    passed_on = type(kind.__name__, (kind, _PassedOn), {"__module__": kind.__module__})
    return passed_on(error.found, expected=error.expected, todo=error.todo, where=error.where)
