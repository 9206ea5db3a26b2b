"""What commands print, as text or as JSON, and the codes that they exit with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from ..errors import Error, OptionError, UnsupportedError
from .start import FINE, PROBLEMS, STOPPED, UNSUPPORTED, USAGE

if TYPE_CHECKING:  # takes as long to import as all that is needed to check arguments
    from rich.console import Console
    from rich.table import Table

_COLUMNS = 140  # of a file, or a pipe
_json_of = partial(dumps, indent=2)
_OPTIONS = (
    Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
    Parameter(
        "json",
        Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--json", help="Print JSON.")],
    ),
)


@dataclass(frozen=True)
class Result:
    """What a command found. schema: of its JSON."""

    schema: ClassVar[str]

    @property
    def exit_code(self) -> int:
        """The command's exit code: FINE or PROBLEMS."""
        return FINE

    def to_json(self) -> dict[str, Any]:
        """The fields, and those of the classes in them."""
        return {"schema": self.schema, **asdict(self)}

    def print(self, console: Console) -> None:
        """Prints the result as text."""
        raise NotImplementedError


def command(find: Callable[..., Result]) -> Callable[..., None]:
    """A function as a command: prints what it returns, as JSON with the option --json, and exits
    with that result's code. An error of ours is a sentence, or JSON too; Ctrl-C is a sentence.
    """
    taken = signature(find, eval_str=True).parameters

    @wraps(find)
    def run(context: typer.Context, json: bool, **arguments: Any) -> None:
        if "json" in taken:  # it prints while it runs
            arguments["json"] = json
        try:
            for path in arguments.values():
                if isinstance(path, Path):
                    _check_name(path)
            result = find(**arguments)
        except Error as error:
            if context.find_root().params.get("traceback"):
                raise
            _print_error(error, json)
            raise typer.Exit(_code_of(error)) from None
        except KeyboardInterrupt as stopped:  # what is written says what is left of it
            say(str(stopped) or "interrupted")
            raise typer.Exit(STOPPED) from None
        typer.echo(_json_of(result.to_json()) if json else _text_of(result))
        raise typer.Exit(result.exit_code)

    # typer reads both
    parameters = {**taken, **{option.name: option for option in _OPTIONS}}
    run.__signature__ = Signature([*parameters.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    return run


def _check_name(path: Path) -> None:
    """OptionError for a path that the system takes for no file, or lets this user not look for."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OptionError(
            f"a path of {len(str(path)):,} characters: {why}",
            expected="a file or a folder that this user may name",
            where=f"{str(path)[:40]}..." if len(str(path)) > 43 else str(path),
        ) from None


def say(message: str) -> None:
    """A sentence on stderr, as all that is no result."""
    typer.echo(f"fusion-moe: {' '.join(message.split())}", err=True)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[int] = (),
    header: bool = True,
) -> Table:
    """Columns without lines between them; right: those that are aligned to the right."""
    from rich.table import Table

    result = Table(box=None, pad_edge=False, header_style="bold", show_header=header)
    for i, name in enumerate(columns):
        result.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*map(str, row))
    return result


def _text_of(result: Result) -> str:
    """As wide as the terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _COLUMNS
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as shown:
        result.print(console)
    # tables pad their last column
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def _code_of(error: Error) -> int:
    if isinstance(error, UnsupportedError):
        return UNSUPPORTED
    return USAGE if isinstance(error, OptionError) else PROBLEMS


def _print_error(error: Error, as_json: bool) -> None:
    if not as_json:
        say(str(error))
        return
    fields = {name: getattr(error, name) for name in ("found", "expected", "todo", "where")}
    texts = {"kind": type(error).__name__, "message": str(error), **fields}
    typer.echo(_json_of({"error": texts}))
