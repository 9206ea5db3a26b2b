"""What packages add to the library: installed packages by entry points, and the hooks that they
fill.

A package names modules in an entry-point group; importing one registers what it has. The core
calls the functions of a hook at one place, and knows none of the packages:

    @plugins.quantized
    def remember(model): ...

Groups: `fusion_moe.translators` (translate.py), `fusion_moe.backends` (backends/), and
`fusion_moe.plugins`, whose modules are imported when a hook is first asked.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import PluginError
from .messages import log

GROUP = "fusion_moe.plugins"
F = TypeVar("F", bound=Callable[..., Any])


def load(group: str) -> tuple[tuple[Any, ...], tuple[PluginError, ...]]:
    """What the entry points of a group are, and the errors of those that fail. Each of these warns;
    it costs only what its own package would have added.
    """
    loaded, failed = [], []
    for entry in entry_points(group=group):
        try:
            loaded.append(entry.load())
        except Exception as error:
            owner = entry.dist.name if entry.dist else "?"
            failed.append(
                PluginError(
                    f"the entry point {entry.name} = {entry.value} of {owner} failed: "
                    f"{message(error)}",
                    expected=f"a module of the group {group} that imports",
                    todo="fix or uninstall that package",
                    where=raised_at(error, lambda frame: frame.name == "<module>"),
                )
            )
            log.warning("%s", failed[-1])
    return tuple(loaded), tuple(failed)


def message(error: Exception) -> str:
    """An error of a user's code as text. Formatting it may fail too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def raised_at(error: Exception, wanted: Callable[[traceback.FrameSummary], bool]) -> str:
    """file:line of the innermost wanted frame in which an error was raised; "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if wanted(f)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces the function `name` of a module or class by one that returns around(theirs, *args,
    **kwargs), theirs being what it replaces.
    """
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(theirs, *args, **kwargs)

    setattr(owner, name, wrapped)


# Hooks --------------------------------------------------------------------------------------------


class Hook(Generic[F]):
    """A place of the core at which functions of packages are called, in the order in which they
    registered. Calling the hook with a function registers it; iterating loads all packages.
    """

    def __init__(self) -> None:
        self._functions: list[F] = []

    def __call__(self, function: F) -> F:
        """Registers a function: a decorator."""
        self._functions.append(function)
        return function

    def __iter__(self) -> Iterator[F]:
        load_all()
        return iter(tuple(self._functions))


@functools.cache
def load_all() -> None:
    """Loads the packages that add to this one by entry points, once."""
    load(GROUP)


@dataclass(frozen=True)
class Package:
    """An optional package that `python -m fusion_moe.env` reports: the name of its distribution,
    and why it cannot be used, with what to do after "; ".
    """

    name: str
    distribution: str
    why_missing: str


@dataclass(frozen=True)
class CompiledBy:
    """How `explain` looks at what another compiler made. name: of what made it; function: what it
    was made of; look(function, args, kwargs): what our part of that compiler fuses in each graph of
    a call.
    """

    name: str
    function: Callable[..., Any]
    look: Callable[[Callable[..., Any], Any, Any], Any]


# operations() -> rows for the table of operations (OpKind of ir/core.py).
operations: Hook[Callable[[], Iterable[Any]]] = Hook()
# quantized(model): `quantize_` has replaced modules of a model.
quantized: Hook[Callable[[Any], None]] = Hook()
# converters() -> by the qualified name of a class of modules: a function (module, config) -> the
# module that replaces it; or the reason why it is not converted.
converters: Hook[Callable[[], Mapping[str, Any]]] = Hook()
# by_contents(module) -> the same function for a module of any class that holds what a package's
# modules do; None for any other.
by_contents: Hook[Callable[[Any], Any]] = Hook()
# adapt(model, places, rank, alpha, dtype) -> the adapters that a package added to weights, each
# named by a module and a projection of it; None if it has not adapted the model.
adapt: Hook[Callable[[Any, Any, int, float, Any], Sequence[Any] | None]] = Hook()
# families(directory) -> the Family (checkpoints/families.py) of a Directory, None for a class that
# the package does not know.
families: Hook[Callable[[Any], Any]] = Hook()
# training() -> how float experts of a package's models train with our operations: an imperative.
training: Hook[Callable[[], str]] = Hook()
# advice(module) -> what would make a module faster, or use it more: sentences.
advice: Hook[Callable[[Any], Iterable[str]]] = Hook()
# compiled_by(function) -> what `explain` needs of a function that another compiler made, or None.
compiled_by: Hook[Callable[[Callable[..., Any]], CompiledBy | None]] = Hook()
# noted(module) -> what `explain` says first about a model's modules, "" if nothing.
noted: Hook[Callable[[Any], str]] = Hook()
# recorded(model) -> of layers whose rows a package counts itself, by name, numbers that only grow:
# `rows` i64[E] of each expert, and ints by name.
recorded: Hook[Callable[[Any], Mapping[str, Mapping[str, Any]]]] = Hook()
# packages() -> the optional packages to report.
packages: Hook[Callable[[], tuple[Package, ...]]] = Hook()
