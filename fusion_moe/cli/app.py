"""The application: its commands, what is said before them, and how wrong usage is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from .bench import bench
from .compare import compare
from .convert import convert
from .doctor import doctor
from .evaluate import evaluate
from .explain import explain
from .inspect import inspect
from .output import Result, command, say
from .plan import plan
from .quantize import quantize
from .run import run
from .serve import serve
from .start import FINE, STOPPED, USAGE
from .verify import verify

_UsageError: Any = typer.BadParameter.__base__  # typer has no name for it, which may be click's


class _Commands(TyperGroup):
    """Says wrong usage in a sentence, as commands say errors."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            code = USAGE
            text = error.format_message()
            if "\n" in text:  # help, where there is no command
                typer.echo(text, err=True)
            else:
                command = getattr(error.ctx, "command_path", "fusion-moe")
                say(f"{_sentence(error)}; {command} --help says what there is")
        except typer.Abort:
            code = STOPPED
            say("interrupted")
        sys.exit(code if isinstance(code, int) else FINE)


def _sentence(error: Any) -> str:
    """What is wrong, with the value that was found, which pydantic's messages leave out."""
    text = error.format_message().rstrip(".").replace("Value error, ", "")
    if errors := getattr(error.__cause__, "errors", None):
        text = text.replace("Input should", f"{errors()[0]['input']!r} should")
        text = text.partition(", unable to parse")[0]
    return f"{text[0].lower()}{text[1:]}"


app = typer.Typer(
    cls=_Commands,
    name="fusion-moe",
    help="Checkpoints of mixture-of-experts models, and what this machine runs of them.",
    epilog="Exit codes: 0 fine, 1 problems, 2 usage, 3 unsupported, 130 stopped by Ctrl-C.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fusion_moe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error comes from, for bug reports.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of all commands."""


def _add(find: Callable[..., Result], *examples: str, name: str | None = None) -> None:
    """Adds a command, with examples of its arguments, which are not wrapped."""
    epilog = "\n".join(["\b", "Examples:", *(f"  fusion-moe {line}" for line in examples)])
    app.command(name, epilog=epilog)(command(find))


_add(run, 'run DIR "Why is the sky blue?"', "run DIR -i")
_add(bench, "bench DIR", "bench --config qwen3-30b --layers 4")
_add(inspect, "inspect Qwen3-30B-A3B-NVFP4", "inspect --values --json DIR | jq .problems")
_add(convert, "convert DIR DIR-modelopt", "convert DIR DIR-bf16 --to dense --dtype bfloat16")
_add(
    quantize,
    "quantize Qwen3-30B-A3B Qwen3-30B-A3B-NVFP4",
    "quantize DIR DIR-INT4 --to int4 --skip '*.layers.0.*'",
)
_add(evaluate, "eval DIR --text FILE", "eval DIR --text FILE --against FLOAT_DIR", name="eval")
_add(explain, "explain DIR", "explain DIR --tokens 2048 --gpu H100")
_add(compare, "compare before.json after.json")
_add(
    plan,
    "plan DIR --gpu H100 --gpu-memory 20GiB --ram 128",
    "plan --train --config qwen3-30b --tokens 16384 --rank 8 --chunked-loss --gpu 24GB",
)
_add(verify, "verify DIR", "verify DIR --adapter OUT/adapter")
_add(doctor, "doctor", "doctor --json")
_add(serve, "serve DIR --port 8123", "serve DIR -- --cb-num-blocks 64")
