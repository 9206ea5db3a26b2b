"""Digests of what compiled code depends on: equal in all processes that would compile the same
code, and different otherwise.

They are part of Inductor's cache keys. A user's function counts as it is in memory, with the values
that it reads, since its file may have changed after its import; files count too, for what is found
by a computed name. Code is compared as instructions and constants: `marshal` writes equal code
differently, depending on what else holds its constants; line numbers do not count.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._ops import OperatorBase

from ..definitions.translate import BUILTIN

_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    range,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    torch.dtype,
)
_LIBRARY = Path(__file__).parents[1]
_BY_NAME = ("torch", _LIBRARY.name, BUILTIN)  # keys contain torch's version, and `of_library`
_STANDARD = Path(functools.__file__).parent
# what these return is in no digest
_STATE = ("os", "posix", "sys", "io", "_io", "pathlib", "importlib", "subprocess", "random", "time")
# builtins that read what no name in the code tells
_ANYTHING = ("eval", "exec", "globals", "__import__")
_COMPUTED = frozenset({"getattr", "vars", "__dict__"})  # with a module: likewise
_OF_CLASSES = (
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotations__",
)
Names = frozenset[str]


class NoFingerprint(Exception):
    """A value that a digest cannot tell from others; the message describes it."""


@functools.cache
def of_library() -> str:
    """A digest of all source files of the library, its translators included."""
    translators = importlib.import_module(BUILTIN).__file__
    assert translators is not None
    return _digest([_of_files(_LIBRARY), _of_files(Path(translators).parent)])


def of_function(function: Callable[..., Any]) -> str:
    """A digest of a translator: its code, its defaults, and the values that it closes over or reads
    from modules.

    Functions and classes among these values count in the same way, and with their source files.
    Those of torch, of this library and of the standard library count by their names. NoFingerprint
    if a value is neither plain data nor a function, class or module, or is read from the
    environment.
    """
    try:
        return _digest(_of_value(function, frozenset(), set()))
    except RecursionError:
        raise NoFingerprint("values that contain themselves") from None


def _of_value(value: Any, names: Names, seen: set[Any]) -> Iterator[str]:
    """A value as text, piece by piece. names: those in the code that reads it."""
    kind: Any = type(value)
    if kind in _PLAIN:
        yield f"{kind.__name__} {value!r}"
    elif kind in (tuple, list, dict, set, frozenset):
        yield f"{kind.__name__} {len(value)}"
        items = value.items() if isinstance(value, dict) else value
        parts = ["".join(_of_value(v, names, seen)) for v in items]
        yield from sorted(parts) if isinstance(value, (set, frozenset)) else parts
    elif kind is CodeType:
        if any(step.opname == "IMPORT_NAME" for step in dis.get_instructions(value)):
            raise NoFingerprint(f"an import inside of {value.co_name}")
        yield (
            f"code {value.co_code!r} {value.co_names} {value.co_varnames} {value.co_cellvars} "
            f"{value.co_freevars} {value.co_flags}"
        )
        yield from _of_value(
            (value.co_consts, getattr(value, "co_exceptiontable", b"")), names, seen
        )
    elif isinstance(value, OperatorBase):
        yield f"operation {value}"
    elif isinstance(value, (FunctionType, BuiltinFunctionType, type, ModuleType)):
        yield from _of_definition(value, names, seen)
    elif kind in _MADE_OF:
        yield kind.__name__
        yield from _of_value(tuple(getattr(value, part) for part in _MADE_OF[kind]), names, seen)
    else:
        raise NoFingerprint(f"a value of type {kind.__module__}.{kind.__qualname__}")


_MADE_OF = {
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    type(functools.cache(lambda: None)): ("__wrapped__",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    slice: ("start", "stop", "step"),
}


def _of_definition(value: Any, names: Names, seen: set[Any]) -> Iterator[str]:
    """A function, class or module: its name, and what defines it unless its name does."""
    module = value.__name__ if isinstance(value, ModuleType) else str(value.__module__)
    yield f"{type(value).__name__} {module} {getattr(value, '__qualname__', '')}"
    if (id(value), names) in seen:
        return
    seen.add((id(value), names))
    if isinstance(value, FunctionType):
        yield from _of_function(value, seen)
    elif isinstance(value, BuiltinFunctionType) and not isinstance(
        value.__self__, (ModuleType, type(None))
    ):
        yield from _of_value(value.__self__, names, seen)
    elif not _counts_by_name(module):
        yield _of_source(module)
        if isinstance(value, type):
            parts = {name: v for name, v in vars(value).items() if name not in _OF_CLASSES}
            yield from _of_value((type(value), value.__bases__, parts), names, seen)
        elif isinstance(value, ModuleType):
            if names & _COMPUTED or "__getattr__" in vars(value):
                raise NoFingerprint(f"computed names in the module {module}")
            yield from _of_value(
                {name: vars(value)[name] for name in sorted(names & vars(value).keys())},
                names,
                seen,
            )


def _of_function(function: FunctionType, seen: set[Any]) -> Iterator[str]:
    names = _names(function.__code__)
    try:
        closed = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise NoFingerprint(
            f"a variable of {function.__qualname__} that is not assigned yet"
        ) from None
    yield from _of_value((closed, vars(function)), names, seen)
    # a decorator may give a function another module
    where = (str(function.__module__), str(function.__globals__.get("__name__")))
    if all(_counts_by_name(module) for module in where):
        return
    yield from map(_of_source, where)
    yield from _of_value(
        (function.__code__, function.__defaults__, function.__kwdefaults__), names, seen
    )
    read = {**vars(builtins), **function.__globals__}
    for name in sorted(names & read.keys()):
        if name in _ANYTHING and read[name] is getattr(builtins, name, None):
            raise NoFingerprint(f"what {name}() finds")
        try:
            yield from _of_value((name, read[name]), names, seen)
        except NoFingerprint as why:
            raise NoFingerprint(f"{name}: {why}") from None


def _names(code: CodeType) -> Names:
    """All names that code and its inner functions have for globals, attributes and imports."""
    return frozenset(code.co_names).union(
        *[_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    )


def _counts_by_name(module: str) -> bool:
    """Whether what a module defines is the same wherever a key is the same. NoFingerprint if that
    depends on the environment.
    """
    root = module.split(".")[0]
    if root in _BY_NAME:
        return True
    file = getattr(sys.modules.get(root), "__file__", None)
    if root not in sys.stdlib_module_names or (file and not Path(file).is_relative_to(_STANDARD)):
        return False
    if root in _STATE:
        raise NoFingerprint(f"the module {root}")
    return True


def _of_source(module: str) -> str:
    """A digest of a module's file; "" in a notebook."""
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    return _of_files(file) if file.is_file() else ""


def _of_files(root: Path) -> str:
    files = (
        [root]
        if root.is_file()
        else sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".cu", ".h", ".cuh"))
    )
    return _digest(
        f"{p.relative_to(root)} {hashlib.sha256(p.read_bytes()).hexdigest()}" for p in files
    )


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
