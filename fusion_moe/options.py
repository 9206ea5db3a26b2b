"""Every option of the library: its name, type, default and meaning. Nothing else reads the
environment.

An option is read from `FUSION_MOE_<NAME>` when this module is imported (an empty variable counts as
not set; a variable that belongs to no option warns and changes nothing), and can be set for a block
of code:

    with fusion_moe.options.override(target="reference"):
        model(x)
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import dataclasses
import functools
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .errors import OptionError, did_you_mean, need_one_of

T = TypeVar("T")
_PREFIX = "FUSION_MOE_"
_MOST = 10**6  # seconds: functions that wait for a process accept little more
_KINDS = {bool: "a bool, as text 1 or 0", int: f"an int from 1 to {_MOST}", str: "a non-empty str"}


def _option(
    default: Any,
    doc: str,
    *,
    in_keys: bool = True,
    words: tuple[str, ...] | None = None,
    one_of: tuple[str, ...] | None = None,
) -> Any:
    """words: what a text may list, separated by commas; one_of: what it may be; None: any text."""
    return dataclasses.field(
        default=default, metadata={"doc": doc, "words": words, "one_of": one_of}, compare=in_keys
    )


def _cache_home(environ: Mapping[str, str] = os.environ) -> str:
    """The folder for a user's caches; a temporary folder for a user without a home."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification has relative ones ignored
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            base = Path(tempfile.gettempdir())
    return str(base / "fusion_moe")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options. Those that change what is compiled take part in equality and in the cache keys
    of compiled programs.
    """

    target: str = _option(
        "auto", "what to compile for: 'auto' follows the tensors' device, or the name of a target"
    )
    contract_rounding: bool = _option(
        True,
        "keep float32 inside a fused kernel where the program rounds to a narrower type and back",
    )
    fuse: bool = _option(
        True, "if 0, each operation of a program is a kernel of its own: to compare with"
    )
    order: str = _option(
        "free",
        "the order of a row's sums in products: 'free' may depend on the batch, 'row' depends on "
        "the weight alone, so that no other row changes a row's bits",
        one_of=("free", "row"),
    )
    router_gradient: bool = _option(
        True,
        "gradients of routing weights by way of the product "
        "before, so that its result is not saved",
    )
    check: bool = _option(
        False,
        "compare passes exactly and kernels within rounding, on the real "
        "inputs; users' translators on drawn ones",
    )
    cpu_isa: str = _option(
        "auto",
        "instructions that CPU kernels use: 'auto' is the best ISA level of "
        "the machine, or the name of an ISA level",
    )
    cuda_variant: str = _option(
        "auto",
        "the kernel of CUDA's grouped products: 'auto' is by "
        "sizes, or the name of one, which must fit",
    )
    cuda_arch: str = _option(
        "auto",
        "the GPU that CUDA kernels are for: 'auto' is the one at hand; the name of a known one, or "
        "a compute capability ('8.0'), whose PTX and limits a newer GPU then runs",
    )
    order_weights: bool = _option(
        True,
        "weights in the order of CUDA's kernels from a module's first call there on, "
        "without prepare_; others in each call of many rows",
    )
    keep_weights: bool = _option(
        False,
        "eager calls that read weights in another layout than the target's keep copies in that "
        "while the weights live and torch counts no write: not through .data",
    )
    background_compile: bool = _option(
        False,
        "calls of new sizes on a GPU run kernels for any size while their own compile; "
        "results may differ in the last bits",
        in_keys=False,
    )
    compile_ahead: bool = _option(
        True,
        "a call on a GPU that compiles kernels also starts those for other sizes, "
        "on threads of low priority",
        in_keys=False,
    )
    native_calls: bool = _option(
        True,
        "calls with known specialization keys without Python, once their library is compiled",
        in_keys=False,
    )
    cache_dir: str = _option(_cache_home(), "the folder that keeps compiled kernels", in_keys=False)
    dump: str = _option(
        "",
        "a folder to write every stage, source and binary of what is compiled to; '' is none",
        in_keys=False,
    )
    log: str = _option(
        "",
        "what is written to stderr, separated by commas: 'passes', 'segments', 'choice', "
        "'compile', 'launch'",
        in_keys=False,
        words=("passes", "segments", "choice", "compile", "launch"),
    )
    bisect_limit: int = _option(
        _MOST, "how many regions of compiled graphs are fused, in the order in which they are found"
    )
    cuda_debug: str = _option(
        "",
        "of CUDA's kernels, separated by commas: 'lineinfo' for profilers, 'ptxas' reports "
        "registers and spills on stderr, 'sass' is written to the folder of the option dump, "
        "'timeline' has tiles marked for record",
        in_keys=False,
        words=("lineinfo", "ptxas", "sass", "timeline"),
    )
    compile_seconds: int = _option(
        300, "how long a C++ compiler may take for one kernel before it is killed", in_keys=False
    )

    def replace(self, **changes: Any) -> Options:
        """These options with some changed; names and types are checked."""
        return dataclasses.replace(
            self, **{name: _checked(name, value) for name, value in changes.items()}
        )

    @property
    def row_order(self) -> bool:
        """Whether a row's bits may depend on nothing but that row and the weights."""
        return self.order == "row"

    def compared(self) -> dict[str, Any]:
        """The values of the options that change what is compiled or computed, by name."""
        return {name: getattr(self, name) for name, field in _FIELDS.items() if field.compare}

    def key(self) -> str:
        """`compared` as text, a dict as Python writes it, for cache keys and for programs that
        carry their options; `from_key` reads it.

        The values of real options need no ", which compilers of graphs do not escape.
        """
        return _key(self)


_FIELDS = {f.name: f for f in dataclasses.fields(Options)}
_VARIABLES = {f"{_PREFIX}{name.upper()}": name for name in _FIELDS}


@functools.lru_cache(maxsize=64)
def _key(options: Options) -> str:
    return repr(options.compared())


def _checked(name: str, value: Any) -> Any:
    """`value` as the option's type; text from the environment is parsed."""
    field = _FIELDS.get(name)
    if field is None:
        raise OptionError(
            f"unknown option {name!r}",
            expected=f"one of {', '.join(_FIELDS)}",
            todo=did_you_mean(name, _FIELDS),
        )
    wanted = type(field.default)
    if wanted is bool and isinstance(value, str):
        value = {"1": True, "true": True, "0": False, "false": False}.get(value.lower(), value)
    if wanted is int and isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not _fits(value, field.default):
        raise OptionError(
            f"option {name} = {value!r}", expected=f"{_KINDS[wanted]} ({field.metadata['doc']})"
        )
    if one_of := field.metadata["one_of"]:
        need_one_of(f"option {name}", value, one_of)
    for word in value.split(",") if field.metadata["words"] and value else ():
        need_one_of(f"option {name}", word, field.metadata["words"])
    return value


def _fits(value: Any, default: Any) -> bool:
    if type(default) is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST
    return isinstance(value, type(default)) and (value != "" or default == "")


def ignored(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A warning for each `FUSION_MOE_*` variable that belongs to no option: it changes nothing."""
    for name in environ:
        if name.startswith(_PREFIX) and name not in _VARIABLES:
            todo = did_you_mean(name, _VARIABLES) or f"fusion_moe reads {', '.join(_VARIABLES)}"
            yield (
                f"the environment variable {name} is ignored: fusion_moe has no such option; {todo}"
            )


def from_environment(environ: Mapping[str, str] = os.environ) -> Options:
    """The defaults, changed by the `FUSION_MOE_*` variables that are not empty.

    A variable that belongs to no option is ignored with a warning, since it may be meant for
    another version; an invalid value raises.
    """
    for text in ignored(environ):
        warnings.warn(text, stacklevel=2)
    results = {}
    for variable, name in _VARIABLES.items():
        if value := environ.get(variable):
            try:
                results[name] = _checked(name, value)
            except OptionError as error:
                raise error.at(f"the environment variable {variable}") from None
    return dataclasses.replace(Options(), **results)


class _Module(types.ModuleType):
    """Refuses `options.target = "cpu"`, which would change nothing, and misspelled names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS:
            raise OptionError(
                f"options.{name} = {value!r}",
                expected=f"with fusion_moe.options.override({name}={value!r}):",
                todo=f"for a whole process, set {_PREFIX}{name.upper()} before it starts",
            )
        if not hasattr(self, name):
            try:
                _checked(name, value)
            except OptionError as error:
                raise error.at(f"options.{name} = {value!r}") from None
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Module
_of_process = from_environment()
_current: contextvars.ContextVar[Options] = contextvars.ContextVar(
    "fusion_moe_options", default=_of_process
)


def current() -> Options:
    """The options in force: the process's, or those of the innermost `override`."""
    return _current.get()


def words(name: str) -> list[str]:
    """What an option that is a list of words lists here."""
    return getattr(current(), name).split(",")


def log(topic: str, message: str, *values: object) -> None:
    """Writes `message % values` to stderr if the option `log` lists the topic."""
    if current().log and topic in words("log"):
        print(f"fusion_moe {topic}: {message % values}", file=sys.stderr, flush=True)


def variable() -> tuple[contextvars.ContextVar[Options], Options]:
    """The context variable of the options in force, and the value that it has if nothing has
    changed them.
    """
    return _current, _of_process


def from_key(key: str) -> Options:
    """The options that `Options.key` wrote; what keys leave out is as in force here. OptionError
    for any other.
    """
    return dataclasses.replace(current(), **_read(key))


@functools.lru_cache(maxsize=64)
def _read(key: str) -> dict[str, Any]:
    try:
        result = ast.literal_eval(key)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        result = None
    if not isinstance(result, dict):
        raise OptionError(f"options {key!r}", expected="a dict, as Options.key writes it")
    # a key comes with an exported graph, from anywhere: it may not say where files are written
    for name in result:
        need_one_of(
            "an option's name", name, (name for name, field in _FIELDS.items() if field.compare)
        )
    return {name: _checked(name, value) for name, value in result.items()}


def using(options: Options) -> contextlib.AbstractContextManager[None]:
    """Puts exactly these options in force inside a `with` block, whatever was in force before."""
    return during(_current, options)


@contextlib.contextmanager
def during(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Gives a context variable a value inside a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[Options]:
    """Changes options inside a `with` block, for this thread: `override(target="reference")`.
    OptionError for an unknown name; a bad value raises here, or where it is used.
    """
    changed = current().replace(**changes)
    with using(changed):
        yield changed
