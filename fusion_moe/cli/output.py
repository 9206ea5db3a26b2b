"""What commands print, as text or as JSON, and the codes that they exit with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NoReturn, Protocol

import typer
from rich.console import Console
from rich.table import Table

from ..errors import Error, OptionError, UnsupportedError

FINE, PROBLEMS, USAGE, UNSUPPORTED = range(4)
STOPPED = 130  # as shells have it for Ctrl-C
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_COLUMNS = 140  # of a file, or a pipe


class Result(Protocol):
    """What a command found. exit_code: FINE or PROBLEMS."""

    @property
    def exit_code(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...

    def print(self, console: Console) -> None: ...


def finish(context: typer.Context, find: Callable[[], Result], as_json: bool) -> NoReturn:
    """Prints what `find` returns and exits with its code; an error of ours is a sentence, and one
    with --json; so is Ctrl-C.
    """
    try:
        result = find()
    except Error as error:
        if context.find_root().params.get("traceback"):
            raise
        _print_error(error, as_json)
        raise typer.Exit(_code_of(error)) from None
    except KeyboardInterrupt as stopped:  # what is written says what is left of it
        typer.echo(f"fusion-moe: {str(stopped) or 'interrupted'}", err=True)
        raise typer.Exit(STOPPED) from None
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        to = console()
        with to.capture() as shown:
            result.print(to)
        # tables pad their last column
        typer.echo("\n".join(line.rstrip() for line in shown.get().splitlines()))
    raise typer.Exit(result.exit_code)


def console() -> Console:
    """Where text goes: as wide as the terminal."""
    return Console(
        width=None if sys.stdout.isatty() else _COLUMNS, highlight=False, markup=False, emoji=False
    )


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[int] = (),
    header: bool = True,
) -> Table:
    """Columns without lines between them; right: those that are aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=header)
    for i, name in enumerate(columns):
        made.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def _code_of(error: Error) -> int:
    if isinstance(error, UnsupportedError):
        return UNSUPPORTED
    return USAGE if isinstance(error, OptionError) else PROBLEMS


def _print_error(error: Error, as_json: bool) -> None:
    if not as_json:
        typer.echo(f"fusion-moe: {' '.join(str(error).split())}", err=True)
        return
    fields = {name: getattr(error, name) for name in ("found", "expected", "todo", "where")}
    typer.echo(
        json.dumps(
            {"error": {"kind": type(error).__name__, "message": str(error), **fields}}, indent=2
        )
    )
