"""fusion-moe serve: transformers' own server, which by itself would not import this library."""

from __future__ import annotations

import typer

from .output import UNSUPPORTED


def serve(context: typer.Context) -> None:
    """Run `transformers serve` with these arguments: it then opens what this library reads."""
    from transformers.cli.transformers import app

    import fusion_moe.transformers  # noqa: F401

    try:
        app(["serve", *context.args], prog_name="fusion-moe")
    except ImportError as error:  # it says what to install
        typer.echo(f"fusion-moe: {error}", err=True)
        raise typer.Exit(UNSUPPORTED) from None
