"""fusion-moe serve: transformers' own server, on what this library reads."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from ..errors import OptionError, UnsupportedError
from ..messages import check_checkpoint, install
from .models import Device, a_model, check_device, check_tokenizer, device_of
from .output import Result
from .start import load


def serve(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A model and its tokenizer, local.")
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Further options of `transformers serve`."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port.")] = 8000,
    device: Device = "",
    continuous_batching: Annotated[
        bool,
        typer.Option(
            "--continuous-batching", help="Several requests in a step, sampled as the first."
        ),
    ] = False,
) -> Result:
    """Answer OpenAI's clients, by transformers' server.

    At /v1/completions, /v1/chat/completions and /v1/responses, with one model. An answer ends with
    the model's context at the latest, and when its client has left. Ctrl-C ends the server within
    two seconds.
    """
    check_device(device, "serve")
    check_checkpoint(directory)
    check_tokenizer(directory)
    _check_address(host, port)
    load()
    from transformers.cli import serve as of_transformers

    if not of_transformers.is_serve_available():
        raise UnsupportedError("FastAPI, uvicorn or openai is missing", todo=install("serve"))
    from .server import serve as run

    device = device_of(device, "serve")
    options = ["--device", device, "--host", host, "--port", str(port)]
    options += ["--continuous-batching"] if continuous_batching else []
    options += _of_memory() if continuous_batching and device == "cpu" else []
    with a_model(directory):
        run(directory, [*options, *(more or ())])


def _of_memory() -> list[str]:
    """Half of the memory that is free, for the cache: transformers takes its share of all there is,
    also of what others hold, 0.6 and, before 5.24, 0.9.
    """
    from psutil import virtual_memory  # accelerate brings it

    now = virtual_memory()
    return ["--cb-max-memory-percent", f"{now.available / now.total / 2:.3f}"]


def _check_address(host: str, port: int) -> None:
    """OptionError where nothing can listen."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asked.bind(address)
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"{host}:{port}: {getattr(error, 'strerror', None) or error}",
            expected="an address of this machine, and a port that is free",
            where="serve",
        ) from None
