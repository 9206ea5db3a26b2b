"""fusion-moe run: text from a model on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import OptionError
from ..messages import bytes_of, check_checkpoint, check_writable
from .models import Device, check_device, check_tokenizer, device_of, local, quietly
from .output import Result
from .start import load

RECORDS = ".trace.json", ".json", ".html", ".txt"  # forms of a run, by the ends of a file's name


def run(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A directory with a tokenizer, or a model's name on the Hub."
        ),
    ],
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to answer, or go on from.")
    ] = "",
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Chat: a prompt a line, until an empty one.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="The most to write.")] = 256,
    length: Annotated[
        int, typer.Option(min=2, help="Tokens of the whole conversation, with -i.")
    ] = 4096,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0: the likeliest token. [default: what the model's files say]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of sampling.")] = 0,
    device: Device = "",
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="How much of GPU 0, such as 20GiB: experts beyond it stay in memory."),
    ] = None,
    offload_folder: Annotated[
        Path | None,
        typer.Option(help="On a disk, for experts that memory has no room for either."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="A file for what the run did: .html, .json, .trace.json or .txt."),
    ] = None,
    json: bool = False,
) -> Result:
    """Answer a prompt, or chat. Ctrl-C ends an answer; experts in floats are rounded to NVFP4 while
    they are read.

    Says how much memory weights need, then how many tokens a second, by which kernels. On a GPU the
    first step takes a while: it is compiled, and replayed as a CUDA graph from then on.
    """
    if bool(prompt) == interactive:
        actual = "a prompt and -i" if prompt else "no prompt"
        raise OptionError(actual, expected="a prompt, or -i for a chat", where="run")
    check_device(device, "run")
    if gpu_memory is not None:
        bytes_of(gpu_memory, "--gpu-memory")
        if device == "cpu":
            raise OptionError("--gpu-memory with --device cpu", expected="one of them", where="run")
    elif offload_folder:
        raise OptionError("--offload-folder alone", expected="--gpu-memory too", where="run")
    if record:  # where it cannot be written, nothing is read
        check_writable(record, "a run", RECORDS)
    directory = local(directory)
    check_checkpoint(directory)
    check_tokenizer(directory)
    load()
    import torch

    from .run_model import Talk, line, recorded

    where = device_of("cuda", "run --gpu-memory") if gpu_memory else device_of(device, "run")
    torch.manual_seed(seed)
    with quietly():
        how: dict[str, Any] = {}
        if gpu_memory is not None:
            how = {"max_memory": {0: gpu_memory}, "experts_device": "auto", "kv_tokens": length}
            how["offload_folder"] = offload_folder
        talk = Talk.open(directory, where, how, temperature, out=not json)
        with recorded(talk, record):
            if not interactive:
                talk.answer(prompt, tokens, None)
            while interactive and (text := line("" if json else "> ")):
                print(talk.answer(text, tokens, length), file=sys.stderr)
    return talk.ended(str(record or ""))
