"""fusion-moe serve: transformers' own server, which by itself would not import this library."""

from __future__ import annotations

import typer

from .start import UNSUPPORTED, load


def serve(context: typer.Context) -> None:
    """Run transformers' server on what this library reads. Arguments of `transformers serve`."""
    load()
    from transformers.cli.transformers import app

    import fusion_moe.transformers  # noqa: F401

    try:
        app(["serve", *context.args], prog_name="fusion-moe")
    except ImportError as error:  # it says what to install
        todo = "the extra serve installs it: pip install '.[serve]' in a clone"
        typer.echo(f"fusion-moe: {error}; {todo}", err=True)
        raise typer.Exit(UNSUPPORTED) from None
