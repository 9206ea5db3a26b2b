"""The registry of translators, which turn a traced call into operations of the IR.

    @translator("mylib::scale_rows")
    def scale_rows(fd, x, factor):
        if x.type.dtype != "bf16":
            raise Untranslatable(f"x is {x.type}, only bf16 is fused")
        return fd.ops.mul(x, factor)

A translator gets the FusionDefinition, then the arguments of the call as its schema has them:
tensors as IR values, symbolic integers as sizes, dtypes as the IR's names, everything else as it
is. It returns one value for each output. The types of these values are compared with the results of
the operation's fake. Translators are found by `@translator`, and through the entry-point group
`fusion_moe.translators` (a module whose import registers them). docs/translators.md teaches how to
write one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from .. import plugins
from ..errors import Error, PluginError, TranslatorError, Untranslatable
from ..ir import FusionDefinition, TensorType, Value, plain
from ..messages import log
from ..plugins import message, raised_at

BUILTIN = "fusion_moe_translators"
ENTRY_POINTS = "fusion_moe.translators"
REFUSAL = "Untranslatable(reason) for a call that it does not support"
Operation = str | OpOverload | OpOverloadPacket | CustomOpDef


@dataclass(frozen=True)
class Translator:
    """A registered translator: the operation that it is for ("aten::add.Tensor"), the function, and
    where the function is defined.

    as_stored: whether an argument that is the transposed view of a contiguous tensor is passed as
    `permute` of that tensor. version: what Inductor's caches know a user's translator by.
    """

    op: str
    function: Callable[..., Any]
    where: str
    as_stored: bool = False
    version: str = ""

    def __call__(
        self,
        fd: FusionDefinition,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        expected: Sequence[TensorType],
    ) -> tuple[Value, ...]:
        """The outputs of one call. Untranslatable if the translator raises it, or if a built-in one
        builds what a type rule refuses; TranslatorError if it fails or returns another type.
        """
        try:
            with fd.only_ops():
                result = self.function(fd, *args, **kwargs)
        except Untranslatable:
            raise
        except Exception as error:
            if isinstance(error, Error) and not self.of_user:
                raise Untranslatable(
                    error.found, expected=error.expected, where=error.where
                ) from error
            where = raised_at(error, self._is_own) or self.where
            wanted = self._parameters(error, fd, args, kwargs) or f"values, or {REFUSAL}"
            raise self.fault("failed", error, wanted, where) from error
        outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        self._check(fd, outputs, expected)
        return outputs

    def fault(self, what: str, error: Exception, expected: str, where: str) -> TranslatorError:
        """What an error says that this translator caused. One of the library says itself what it
        expected; otherwise that is `expected`.
        """
        words, todo = message(error), ""
        if isinstance(error, Error):
            place = f"{error.where}: " if error.where else ""
            words = f"{type(error).__name__}: {place}{error.found}"
            expected, todo = error.expected, error.todo
        text = f"the translator of {self.op} {what}: {words}"
        return TranslatorError(text, expected=expected, todo=todo, where=where)

    def _parameters(
        self, error: Exception, fd: FusionDefinition, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        """The parameters that the function should have, if it cannot be called with a call's; else
        "".
        """
        if not isinstance(error, TypeError):
            return ""
        try:
            inspect.signature(self.function).bind(fd, *args, **kwargs)
        except TypeError:
            schema = overload_of(self.op)._schema
            return f"the parameters fd, then the schema's with its defaults: {schema}"
        return ""

    @property
    def of_user(self) -> bool:
        """Whether a user registered it, not the library."""
        return not str(getattr(self.function, "__module__", "")).startswith(BUILTIN)

    def _is_own(self, frame: traceback.FrameSummary) -> bool:
        code = _code(self.function)
        return code is not None and frame.filename == code.co_filename

    def _check(
        self, fd: FusionDefinition, outputs: Sequence[Any], expected: Sequence[TensorType]
    ) -> None:
        types = [_returned(fd, v) for v in outputs]
        same = (
            isinstance(t, TensorType) and same_storage(t, e)
            for t, e in zip(types, expected, strict=False)
        )
        if len(types) != len(expected) or not all(same):
            raise TranslatorError(
                f"the translator of {self.op} returned {', '.join(map(str, types)) or 'nothing'}",
                expected=f"{', '.join(map(str, expected))}, as its fake returns",
                todo="return values of these shapes and dtypes: fd.ops.cast changes a dtype",
                where=self.where,
            )


def _returned(fd: FusionDefinition, v: Any) -> TensorType | str:
    """The type of what a translator returned, or a description of a result that is not a value of
    this FusionDefinition.
    """
    if isinstance(v, bool):
        return "a bool (== is identity; fd.ops.eq compares elements)"
    if not isinstance(v, Value):
        return f"a {type(v).__name__}"
    return v.type if fd.has(v) else f"a {v.type} of another FusionDefinition"


_registry: dict[str, Translator] = {}
_failed: list[PluginError] = []  # entry points that could not be loaded
_warned_unknown: set[str] = set()  # names without an operation about which a warning was issued


def translator(
    op: Operation, *, as_stored: bool = False, version: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the translator of an operation.

    Args:
        op: "namespace::name", "namespace::name.overload", or the object itself. The operation of a
            name may be registered later; if it is not when a graph is first looked through, a
            warning says so.
        as_stored: an argument of a region that is the transposed view of a contiguous tensor is
            passed as `permute` of that tensor. A translator that looks through the `permute` reads
            the tensor as it is stored; otherwise it is copied.
        version: with one, Inductor finds code in its caches that an earlier process compiled with
            a translator of the same version: change it whenever the translator, or anything that
            it calls or reads, changes. Without one nothing is cached.

    Raises:
        TranslatorError: for text that is not such a name, for an operation with several overloads
            if none is named, for a function that cannot be called, and for an operation that
            already has a translator.
    """

    if isinstance(op, FunctionType):
        raise TranslatorError(
            f"the function {op.__name__} in place of an operation",
            expected="the operation, or its name",
            todo='@fusion_moe.translator("namespace::name")',
            where="translator",
        )

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name, code = _name(op), _code(function)
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else repr(function)
        if not all(name.partition("::")):
            raise TranslatorError(
                f"{op!r} is not the name of an operation",
                expected="namespace::name[.overload]",
                where=where,
            )
        if not callable(function):
            raise TranslatorError(
                f"the translator of {name} is {function!r}", expected="a function", where=where
            )
        importlib.import_module(BUILTIN)  # so that the second to register is always the user
        if name in _registry:
            raise TranslatorError(
                f"{name} already has a translator, at {_registry[name].where}",
                expected="one for each operation",
                todo="remove one of the two; fusion_moe.definitions.translate.unregister(op) "
                "takes the "
                "first away",
                where=where,
            )
        _registry[name] = Translator(name, function, where, as_stored, version)
        return function

    return register


def unregister(op: Operation) -> None:
    """Removes the translator of an operation, given as for `translator`. Nothing happens if it has
    none; programs that are compiled already stay.
    """
    _load()
    _registry.pop(_name(op), None)


def _name(op: Operation) -> str:
    """The name of an operation as graphs have it, without the overload "default"."""
    return op.removesuffix(".default") if isinstance(op, str) else overload_of(op).name()


def overload_of(op: Operation) -> OpOverload:
    """The overload of an operation that graphs call. TranslatorError if it is no operation, or has
    several overloads and no default.
    """
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        packet, _, overload = name.partition(".")
        try:
            op = getattr(getattr(torch.ops, namespace), packet)
            return getattr(op, overload) if overload else overload_of(op)
        except (AttributeError, RuntimeError):
            raise TranslatorError(
                f"there is no operation {namespace}::{name}", expected="one that is registered"
            ) from None
    if isinstance(op, OpOverload):
        return op
    if isinstance(op, CustomOpDef):
        return op._opoverload
    known = _op_names()
    names = (
        [getattr(op, name) for name in op.overloads()] if isinstance(op, OpOverloadPacket) else []
    )
    # the others are TorchScript's
    names = [overload for overload in names if overload.name() in known]
    if not names:
        raise TranslatorError(
            f"{op!r} is not an operation",
            expected="a name, torch.ops.x.y, one of its overloads, or a custom_op",
        )
    default = [overload for overload in names if overload._overloadname == "default"]
    if len(names) > 1 and not default:
        raise TranslatorError(
            f"{op} has {len(names)} overloads", expected=f"one of {', '.join(map(str, names))}"
        )
    return (default or names)[0]


def warn_of_unknown() -> None:
    """Warns once about each user translator whose operation does not exist when a graph is first
    looked through: it may be registered after its translator.
    """
    names = _op_names()
    for t in registered():
        if t.of_user and t.op not in names and t.op not in _warned_unknown:
            _warned_unknown.add(t.op)
            near = _near(t.op, names)
            error = TranslatorError(
                f"there is no operation {t.op}",
                expected="one that is registered",
                todo=f"did you mean {' or '.join(map(repr, near[:3]))}?"
                if near
                else "import what registers it",
                where=t.where,
            )
            log.warning("%s", error)


def _near(op: str, names: Collection[str]) -> list[str]:
    """The operations that a name may have been meant for: other overloads, or similarly spelt
    names.
    """
    packet, _, overload = op.partition(".")
    if overloads := sorted(name for name in names if name.partition(".")[0] == packet):
        return difflib.get_close_matches(op, overloads, 1) if overload else overloads
    alike = difflib.get_close_matches(packet, {name.partition(".")[0] for name in names}, 1, 0.8)
    return [f"{name}.{overload}" if f"{name}.{overload}" in names else name for name in alike]


def _op_names() -> frozenset[str]:
    """The operations that graphs may call."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def _code(function: Callable[..., Any]) -> CodeType | None:
    """The code of a function, of the function in a partial, or of an object's __call__; None if it
    is not written in Python.
    """
    called = getattr(function, "func", function)
    return getattr(called, "__code__", None) or getattr(type(called).__call__, "__code__", None)


def find(op: str) -> Translator | None:
    """The translator of an operation, if it has one. The first call loads the built-in translators
    and the entry points.
    """
    _load()
    return _registry.get(op)


def registered() -> tuple[Translator, ...]:
    """All translators, by the name of their operation."""
    _load()
    return tuple(t for _, t in sorted(_registry.items()))


def why_none() -> str:
    """Why a user's operation has no translator: none was registered, or registering it failed."""
    _load()
    return "; ".join(["it has no translator", *map(str, _failed)])


@cache
def _load() -> None:
    """Loads all translators. An entry point that fails warns, and only its own translators are
    missing.
    """
    importlib.import_module(BUILTIN)
    _failed.extend(plugins.load(ENTRY_POINTS)[1])


def same_storage(a: TensorType, b: TensorType) -> bool:
    """Whether two types describe the same tensor for torch: partitions and ends are ignored;
    padding and layout count as stored.
    """
    if a.dtype != b.dtype or len(a.shape) != len(b.shape):
        return False
    return a.layout != "linear" or tuple(map(plain, a.shape)) == tuple(map(plain, b.shape))
