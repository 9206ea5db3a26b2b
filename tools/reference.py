"""Writes what pages of docs/ quote from the code, between `<!-- from the code: NAME -->` and
`<!-- end -->`: tables that the code itself reads, and docstrings. A test finds pages that are not
current.

    python tools/reference.py

NAME is a function here, called with the words after it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch

import fusion_moe
from fusion_moe import backends, errors, options
from fusion_moe.definitions import operations as op_definitions, translate
from fusion_moe.encodings import ENCODINGS
from fusion_moe.ir import kinds
from fusion_moe.ir.core import OpKind
from fusion_moe.layouts import LAYOUTS

DOCS = Path(__file__).parents[1] / "docs"
MARK = re.compile(
    r"^(?P<begin><!-- from the code: (?P<name>\w+)(?P<words>[^>]*) -->\n)(?:.*?\n)??"
    r"(?P<end><!-- end -->)$",
    re.MULTILINE | re.DOTALL,
)


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
            code(_default(f.name, f.default)),
            f.metadata["doc"],
        )
        for f in dataclasses.fields(options.Options)
    )
    yield from table(("option", "environment variable", "type", "default", "what it does"), rows)


def _default(name: str, value: object) -> str:
    """As it is without any variable: the cache folder depends on the user."""
    return repr("~/.cache/fusion_moe" if name == "cache_dir" else value)


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
CODE = re.compile(r"(``?[^`]+``?)")
# what means something in prose, if it touches words
SPECIAL = re.compile(
    r"(\\|(?<!\w)_(?=\w)|(?<=\w)_(?!\w)|\*(?=\S)|(?<=\S)\*|<(?=\w)|^#)", re.MULTILINE
)
ITEM = re.compile(r"(?P<names>\w+(?:, \w+)*): ")
SECTION = re.compile(r"(Args|Returns|Raises|Attributes):$")


def api(module: str, *names: str) -> Iterator[str]:
    """The names of a module's __all__, or those given, in the words of their docstrings. What
    fusion_moe itself has is said there.
    """
    of = importlib.import_module(module)
    known = (
        set()
        if of is fusion_moe
        else {id(getattr(fusion_moe, name)) for name in fusion_moe.__all__}
    )
    for name in sorted(names or of.__all__, key=str.casefold):
        value = getattr(of, name)
        if isinstance(value, ModuleType) or name in SAID_ELSEWHERE:
            continue
        if id(value) in known:
            yield f"`{module}.{name}` is `fusion_moe.{name}`."
            continue
        yield f"### {module}.{name}"
        if not callable(value):  # a value has no docstring of its own
            yield _of_value(value)
            continue
        yield _signature(name, value)
        yield from described(value)
        for member, of_it in vars(value).items() if isinstance(value, type) else ():
            if not member.startswith("_"):
                yield from _member(member, of_it)


def _of_value(value: Any) -> str:
    """What a constant is: itself if that is short, its keys, or its name."""
    kind, name = type(value).__name__, getattr(value, "name", None)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return f"A {kind} with the keys {', '.join(code(key) for key in value)}."
    if isinstance(value, int | str | tuple) and len(repr(value)) <= 100:
        return f"`{value!r}`"
    return f"The `{kind}` called `{name}`." if isinstance(name, str) else f"A value of `{kind}`."


def _member(name: str, of: Any) -> Iterator[str]:
    """A method or a property that has a docstring, with what is said of it."""
    function = of.fget if isinstance(of, property) else getattr(of, "__func__", of)
    function = getattr(function, "func", function)  # of a cached property
    if not inspect.isfunction(function) or not function.__doc__:
        return
    if of is function or isinstance(of, (classmethod, staticmethod)):
        yield f"**{_escaped(name)}**"
        yield _signature(name, function)
    else:
        yield f"**{_escaped(name)}**: `{inspect.signature(function).return_annotation}`"
    yield from described(function)


def _signature(name: str, of: Any) -> str:
    """As it is written: annotations are text."""
    try:
        said = inspect.signature(of)
    except (TypeError, ValueError):
        return f"```py\n{name}\n```"
    lines, kind = list[str](), None
    for parameter in said.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            lines.append("*")
        kind = parameter.kind
        lines.append(_parameter(parameter))
    result = said.return_annotation
    arrow = "" if result in (said.empty, None, "None") else f" -> {_type_name(result)}"
    short = f"{name}({', '.join(lines)}){arrow}"
    if len(short) > 100:
        short = f"{name}(\n    " + ",\n    ".join(lines) + f",\n){arrow}"
    return f"```py\n{short}\n```"


def _parameter(of: inspect.Parameter) -> str:
    stars = {of.VAR_POSITIONAL: "*", of.VAR_KEYWORD: "**"}.get(of.kind, "")
    said = f"{stars}{of.name}"
    if of.annotation is not of.empty:
        written = of.annotation if isinstance(of.annotation, str) else _type_name(of.annotation)
        said += f": {written}"
    if of.default is of.empty:
        return said
    default = _default(of.name, of.default)
    return f"{said} = {'...' if default.startswith('<') else default}"


def described(of: Any) -> Iterator[str]:
    """A docstring as Markdown: `Args:` and the like begin lists; other indented paragraphs and
    doctests are code. In prose, a line that begins with parameters of the function or class,
    `target, gpu: ...`, begins an item too.
    """
    try:
        parameters: Collection[str] = inspect.signature(of).parameters
    except (TypeError, ValueError):
        parameters = ()
    lines = (inspect.getdoc(of) or "").splitlines()
    for filled, run in groupby(lines, lambda line: bool(line.strip())):
        paragraph = list(run)
        if not filled:
            continue
        if SECTION.match(paragraph[0]):
            yield f"{paragraph[0]}"
            yield "\n".join(_section(paragraph[1:]))
        elif paragraph[0].startswith((" ", ">>>")):
            yield "\n".join(["```text", *paragraph, "```"])
        else:
            said = [_item(names, text) for names, text in items(paragraph, parameters) if text]
            yield "\n".join(
                f"\n{one}"
                if one.startswith("- `") and i and not said[i - 1].startswith("- `")
                else one
                for i, one in enumerate(said)
            )


def _section(lines: list[str]) -> Iterator[str]:
    """Its items, or prose."""
    depth = len(lines[0]) - len(lines[0].lstrip())
    entries: list[list[str]] = []
    for line in lines:
        if line[depth:].startswith(" ") and entries:
            entries[-1].append(line.strip())
        else:
            entries.append([line.strip()])
    for first, *rest in entries:
        named = ITEM.match(first)
        names = named["names"] if named else ""
        yield _item(names, "\n".join([first[named.end() :] if named else first, *rest]))


def _item(names: str, text: str) -> str:
    if not names:
        return _escaped(text)
    said = ", ".join(code(name) for name in names.split(", "))
    return f"- {said}: {_escaped(text)}".replace("\n", "\n  ")


def items(paragraph: list[str], parameters: Collection[str]) -> Iterator[tuple[str, str]]:
    """The prose before the first parameter, then what is said of each: (names, text)."""
    names, lines = "", list[str]()
    for line in paragraph:
        found = ITEM.match(line)
        if found and set(found["names"].split(", ")) <= set(parameters):
            yield names, "\n".join(lines)
            names, lines, line = found["names"], [], line[found.end() :]
        lines.append(line if line.lstrip().startswith("- ") else line.strip())
    yield names, "\n".join(lines)


def _escaped(prose: str) -> str:
    """What stands between backticks, over the end of a line too, is code; all else is itself."""
    return "".join(
        f"`{' '.join(part.strip('`').split())}`" if i % 2 else SPECIAL.sub(r"\\\1", part)
        for i, part in enumerate(CODE.split(prose))
    )


# Pages --------------------------------------------------------------------------------------------

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
    """A page with what its marks ask for."""
    return MARK.sub(
        lambda mark: (
            mark["begin"]
            + "\n"
            + "\n\n".join(GENERATED[mark["name"]](*mark["words"].split()))
            + "\n\n"
            + mark["end"]
        ),
        text,
    )


def pages() -> dict[Path, str]:
    """Those with marks, as they should be."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
    return {page: filled(text) for page, text in texts.items() if MARK.search(text)}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
