"""Finds the translator at fault if what translators returned does not compile: passes and kernels
know no translators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch.fx import Node

from ..definitions import translate
from ..errors import TranslatorError
from ..plugins import message
from .nodes import call_of, is_call, op_name
from .walk import Walk


def of_users(walk: Walk) -> list[Node]:
    """The calls in a walk whose translators did not come with the library."""
    return [
        n
        for n in walk.nodes
        if is_call(n) and (t := translate.find(op_name(n))) is not None and t.of_user
    ]


def attribute_failure(
    walk: Walk, compile: Callable[[Walk], None]
) -> Mapping[Node, TranslatorError]:
    """The users' calls without which the rest compiles, with the error for each: only those at
    fault if they can be told apart, else all.

    compile: raises the failure. The result is empty if the rest fails too.
    """
    users = of_users(walk)
    if not users or _error(walk, users, compile) is not None:
        return {}
    whole = _error(walk, (), compile)
    found = {n: _error(walk, [m for m in users if m is not n], compile) for n in users}
    alone = {n: error for n, error in found.items() if error is not None}
    return {
        n: _at_fault(n, error)
        for n, error in (alone or dict.fromkeys(users, whole)).items()
        if error is not None
    }


def _error(
    walk: Walk, without: Collection[Node], compile: Callable[[Walk], None]
) -> Exception | None:
    """The error when a walk is compiled without some of its calls, whose results become inputs."""
    kept = [n for n in walk.nodes if call_of(n) not in without]
    again = Walk(kept) if kept else None
    try:
        if again is not None and not again.refused:
            compile(again)
    except Exception as error:
        return error
    return None


def _at_fault(n: Node, error: Exception) -> TranslatorError:
    translator = translate.find(op_name(n))
    assert translator is not None
    fault = TranslatorError(
        f"the translator of {translator.op} returned operations that do not compile: "
        f"{message(error)}",
        expected="operations that compile",
        todo="raise Untranslatable(reason) for calls that it does not support",
        where=translator.where,
    )
    fault.__cause__ = error
    return fault
