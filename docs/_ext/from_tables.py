"""Pages of reference from the tables that the code itself reads: `<!-- from tables: NAME -->` in a
page becomes Markdown.

NAME is a function here, called with the words after it. Nothing that it writes is kept in the
repository, so a page says below `<!-- outside of the site -->` how to see it; the site has that
paragraph not. Outside of it one page is printed by

    python docs/_ext/from_tables.py docs/reference/options.md
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch

import fusion_moe
from fusion_moe import backends, errors, options
from fusion_moe.definitions import operations as op_definitions
from fusion_moe.definitions import translate
from fusion_moe.encodings import ENCODINGS
from fusion_moe.ir import kinds
from fusion_moe.ir.core import OpKind
from fusion_moe.layouts import LAYOUTS

MARK = re.compile(r"^<!-- from tables: (?P<name>\w+)(?P<words>[^>]*) -->$", re.MULTILINE)
OUTSIDE = re.compile(r"^<!-- outside of the site -->\n(?:.+\n)+\n", re.MULTILINE)


def document(of: Any) -> list[str]:
    """A docstring as Markdown: paragraphs that are indented, and doctests, are code."""
    while isinstance(of, partial):
        of = of.func
    paragraphs = inspect.cleandoc(of.__doc__ or "").split("\n\n")
    return [f"```text\n{p}\n```" if p.startswith((" ", ">>>")) else p for p in paragraphs if p]


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        for row in (head, ("---",) * len(head), *rows)
    )


def code(text: object) -> str:
    return f"`{text}`"


# The tables ---------------------------------------------------------------------------------------


def operations() -> Iterator[str]:
    """torch.ops.fusion_moe, from the table of specs and the translators, which say what each
    computes.
    """
    for spec in op_definitions.SPECS.values():
        schema = getattr(torch.ops.fusion_moe, spec.name).default._schema
        found = translate.find(f"{op_definitions.NAMESPACE}::{spec.name}")
        assert found is not None
        yield f"## {spec.name}"
        yield f"```text\n{_one_argument_a_line(schema)}\n```"
        yield from document(found.function)
        yield "\n".join(f"- {fact}" for fact in _facts(spec))


def _one_argument_a_line(schema: torch._C.FunctionSchema) -> str:
    name, _, rest = str(schema).partition("(")
    arguments, _, results = rest.rpartition(") -> ")
    return f"{name}(\n    " + ",\n    ".join(arguments.split(", ")) + f"\n) -> {results}"


def _facts(spec: op_definitions.Spec) -> Iterator[str]:
    if spec.rows:
        yield f"One program for any number of rows of {', '.join(map(code, spec.rows))}."
    if spec.flatten and spec.rows.get(spec.flatten):
        yield f"Leading dimensions of `{spec.flatten}` are kept."
    if spec.k_major:
        yield f"{', '.join(map(code, spec.k_major))}: K must run fastest in memory."
    yield "Has a derivative." if spec.differentiable else "Has no derivative."
    if spec.autocast:
        floats = (
            f"; {', '.join(map(code, spec.weights))} too, where `weight_format` is a float's"
            if spec.weights
            else ""
        )
        yield f"Cast by `torch.autocast`: {', '.join(map(code, spec.autocast))}{floats}."


def programs() -> Iterator[str]:
    """The operations that take a program as text."""
    for name in sorted(
        {
            name.partition("::")[2]
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("fusion_moe::")
        }
    ):
        if name.partition(".")[0] not in op_definitions.SPECS:
            yield f"### {name}"
            schema = getattr(torch.ops.fusion_moe, name).default._schema
            yield f"```text\n{_one_argument_a_line(schema)}\n```"


def ir_operations() -> Iterator[str]:
    """The table of kinds, by file."""
    for file in (
        kinds.pointwise,
        kinds.shape,
        kinds.router,
        kinds.rows,
        kinds.quantized,
        kinds.grouped,
    ):
        yield f"## {file.__name__.rpartition('.')[2]}.py"
        yield from document(file)
        yield from table(
            ("operation", "role", "derivative", "meaning"), (_kind(kind) for kind in file.TABLE)
        )


def _kind(kind: OpKind) -> tuple[str, ...]:
    said = kind.infer if _own_document(kind.infer) else kind.evaluate
    meaning = " ".join(_own_document(said).split())
    return (
        code(f"{kind.name}({', '.join(_parameters(kind))})"),
        kind.role,
        "yes" if kind.grad else "no",
        meaning,
    )


def _own_document(of: Any) -> str:
    while isinstance(of, partial):
        of = of.func
    return of.__doc__ or "" if inspect.isfunction(of) else ""


def _parameters(kind: OpKind) -> Iterator[str]:
    for name, parameter in inspect.signature(kind.infer).parameters.items():
        many = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        if name not in kind.signature.attributes:
            yield f"{many}{name}"
        else:
            default = "" if name in kind.signature.required else f"={parameter.default!r}"
            yield f"{name}: {_type_name(kind.signature.attributes[name])}{default}"


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return re.sub(r"\b[\w.]+\.(\w+)", r"\1", str(hint))


def switches() -> Iterator[str]:
    """The options: the fields of fusion_moe.options.Options."""
    rows = (
        (
            code(f.name),
            code(f"FUSION_MOE_{f.name.upper()}"),
            type(f.default).__name__,
            _default(f),
            f.metadata["doc"],
        )
        for f in dataclasses.fields(options.Options)
    )
    yield from table(("option", "environment variable", "type", "default", "what it does"), rows)


def _default(field: Any) -> str:
    """As it is without any variable: the cache folder depends on the user."""
    return "`~/.cache/fusion_moe`" if field.name == "cache_dir" else code(repr(field.default))


def targets() -> Iterator[str]:
    rows = (
        (
            code(t.name),
            t.device or "any",
            _capability(t.capability),
            ", ".join(t.activation_formats),
            _ran_on(t),
        )
        for t in backends.TARGETS.values()
    )
    yield from table(("target", "device", "compute capability", "activations", "has run on"), rows)


def _capability(of: tuple[int, int] | None) -> str:
    return ".".join(map(str, of)) if of else ""


def _ran_on(of: backends.Target) -> str:
    if of.device != "cuda":
        return "CPUs" if of.device else "CPUs, GPUs"
    return ", ".join(map(_capability, of.ran_on)) or "**never run**"


def error_classes() -> Iterator[str]:
    found = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, errors.Error) and c is not errors.Error
    ]
    rows = (
        (
            code(c.__name__),
            ", ".join(code(b.__name__) for b in c.__bases__ if b is not errors.Error),
            _sentence(c),
        )
        for c in found
    )
    yield from table(("error", "also a", "raised for"), rows)


def _sentence(of: type) -> str:
    return " ".join(inspect.cleandoc(of.__doc__ or "").split())


def weight_formats() -> Iterator[str]:
    rows = (
        (code(e.name), ", ".join(code(p.name) for p in e.parts), f"{e.weight_bits:g}")
        for e in ENCODINGS.values()
    )
    yield from table(("weight_format", "parts", "bits per weight"), rows)


def weight_layouts() -> Iterator[str]:
    yield from table(
        ("layout", "what it is"),
        (
            (code(name), (inspect.getdoc(type(of)) or "").partition(" See the head")[0])
            for name, of in LAYOUTS.items()
        ),
    )


# Python -------------------------------------------------------------------------------------------

SAID_ELSEWHERE = {"__version__"}


def api(module: str, *names: str) -> Iterator[str]:
    """The names of a module's __all__, or those given, in the words of their docstrings. What
    fusion_moe itself has is said there.
    """
    of = importlib.import_module(module)
    known = (
        set() if of is fusion_moe else {id(_of(fusion_moe, name)) for name in fusion_moe.__all__}
    )
    for name in sorted(names or of.__all__, key=str.casefold):
        value = _of(of, name)
        if isinstance(value, ModuleType) or name in SAID_ELSEWHERE:
            continue
        if id(value) in known:
            yield f"`{module}.{name}` is `fusion_moe.{name}`."
        else:
            yield (
                f"```{{eval-rst}}\n.. {_directive(value)}:: {module}.{name}\n   "
                f"{_directive_option(value)}\n```"
            )


def _of(module: Any, name: str) -> Any:
    return getattr(module, name)


def _directive(value: Any) -> str:
    if isinstance(value, type):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if callable(value) else "py:data"  # a value has no docstring of its own


def _directive_option(value: Any) -> str:
    return (
        ":members:"
        if isinstance(value, type)
        else ""
        if callable(value)
        else f":type: {type(value).__name__}"
    )


# Sphinx -------------------------------------------------------------------------------------------

GENERATED: Mapping[str, Callable[..., Iterator[str]]] = {
    f.__name__: f
    for f in (
        operations,
        programs,
        ir_operations,
        switches,
        targets,
        error_classes,
        weight_formats,
        weight_layouts,
        api,
    )
}


def filled(text: str) -> str:
    """A page with what its marks ask for, and without what is said where they are empty."""
    return MARK.sub(
        lambda mark: "\n\n".join(GENERATED[mark["name"]](*mark["words"].split())),
        OUTSIDE.sub("", text),
    )


def read(app: Any, page: str, source: list[str]) -> None:
    source[0] = filled(source[0])


def always(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Pages with marks are read at each build: what they are made of is no file of the site."""
    return [
        page
        for page in env.found_docs
        if MARK.search(env.doc2path(page).read_text(encoding="utf-8"))
    ]


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("env-get-outdated", always)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(filled(Path(name).read_text(encoding="utf-8")))
