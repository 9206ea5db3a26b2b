"""Digests of what compiled code depends on: equal in all processes that would compile the same code, and different otherwise.

They are part of Inductor's cache keys. Code is compared as instructions and constants: `marshal` writes equal code differently,
depending on what else holds its constants; line numbers do not count.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), torch.dtype)
_LIBRARY = Path(__file__).parents[1]


class _Unknown(Exception):
    """A value without a fingerprint."""


@functools.cache
def of_library() -> str:
    """A digest of all source files of the library."""
    return _of_files(_LIBRARY)


def of_function(function: Callable[..., Any]) -> str | None:
    """A digest of a translator: of the source files of its package, its code, its defaults, and the values that it closes over.

    In a notebook there are no files; then the global values that it reads count. None, that is no fingerprint, if one of these values is
    neither plain data nor a function, class or module.
    """
    try:
        return _digest(_of_value(function, set()))
    except (_Unknown, RecursionError):
        return None


def _of_value(value: Any, seen: set[int]) -> Iterator[str]:
    """A value as text, piece by piece; functions by their code, classes and modules by their name."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, (tuple, list, dict, set, frozenset)):
        yield f"{type(value).__name__} {len(value)}"
        items = value.items() if isinstance(value, dict) else value
        parts = ["".join(_of_value(v, seen)) for v in items]
        yield from sorted(parts) if isinstance(value, (set, frozenset)) else parts
    elif isinstance(value, CodeType):
        yield f"code {value.co_code!r} {value.co_names} {value.co_varnames} {value.co_cellvars} {value.co_freevars} {value.co_flags}"
        yield from _of_value(value.co_consts, seen)
    elif isinstance(value, FunctionType):
        yield f"function {value.__qualname__}"
        if id(value) not in seen:
            seen.add(id(value))
            yield from _of_function(value, seen)
    elif isinstance(value, ModuleType):
        yield f"module {value.__name__}"
    elif isinstance(value, (type, BuiltinFunctionType)):
        yield f"{value.__module__}.{value.__qualname__}"
    else:
        raise _Unknown(repr(value))


def _of_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield from _of_value((function.__code__, function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        yield from _of_value(cell.cell_contents, seen)
    yield (sources := _of_package(function.__module__))
    if not sources:
        for name in _names(function.__code__):
            if name in function.__globals__:
                yield from _of_value(function.__globals__[name], seen)


def _names(code: CodeType) -> list[str]:
    """The global names that code and its inner functions may read."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


@functools.cache
def _of_package(module: str) -> str:
    """A digest of the source files of a module's package; of the module's file if it is in no package; "" in a notebook."""
    if module.split(".")[0] == "torch":  # Inductor's keys contain its version
        return "torch"
    package, own = (Path(getattr(sys.modules.get(name), "__file__", None) or "") for name in (module.split(".")[0], module))
    if package.name == "__init__.py":
        return _of_files(package.parent)
    return _of_files(own) if own.is_file() else ""


def _of_files(root: Path) -> str:
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".cu", ".h", ".cuh"))
    return _digest(f"{p.relative_to(root)} {hashlib.sha256(p.read_bytes()).hexdigest()}" for p in files)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
