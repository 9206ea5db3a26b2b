"""fusion-moe plan: what of a model fits where, if experts are offloaded, by the headers of its
files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arch import lookup
from ..errors import OptionError
from ..messages import amount, bytes_of, check_checkpoint, ratio
from .output import Result
from .start import load

if TYPE_CHECKING:
    from rich.console import Console

    from ..offload.plan import Plan

_GIB = re.compile(r"\d+(\.\d+)?")
# bytes that the drivers of these GPUs show
_MEMORY = {"H100": 81559 << 20, "H200": 143771 << 20}


@dataclass(frozen=True)
class Planned(Result):
    """A plan for a directory, and the tokens per second that it would give one sequence. asked:
    whether the GPU was named.
    """

    schema = "fusion_moe.plan/2"
    directory: str
    gpu: str
    plan: Plan
    tokens_per_second: float
    asked: bool = True

    def to_json(self) -> dict[str, Any]:
        """The fields, and of the plan also what follows from them."""
        return {**super().to_json(), "whole": self.plan.whole, "resident": self.plan.resident}

    def print(self, console: Console) -> None:
        """Where what is, and what to expect."""
        console.print(str(self.plan), soft_wrap=True)
        what = "" if self.plan.whole else ", if all experts are used equally often"
        from ..offload.plan import DISK

        disk = f" and a disk of {amount(DISK, 'B')}/s" if self.plan.in_files else ""
        console.print(
            f"\nabout {ratio(float(f'{self.tokens_per_second:.3g}'))} tokens/s for one sequence on "
            f"an {self.gpu}{'' if self.asked else ', the default of --gpu,'} "
            f"beside a server's CPU{disk}{what}; nothing was measured here",
            soft_wrap=True,
        )


def plan(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with config.json and safetensors.")
    ],
    gpu: Annotated[str, typer.Option(help="H100 or H200. [default: H100]")] = "",
    gpu_memory: Annotated[
        str | None, typer.Option(help="How much of its memory, such as 20GiB. [default: all]")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="The host's memory, in GiB, or as 128GiB. [default: any]")
    ] = None,
    offload_folder: Annotated[
        Path | None, typer.Option(help="On a disk, for what --ram has no room for.")
    ] = None,
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens whose keys and values there is room for.")
    ] = 8192,
) -> Planned:
    """What of a model fits on a GPU, and how fast that would be. The rest stays in memory.

    Reads headers only, and needs no GPU.
    """
    asked, known = bool(gpu), lookup(gpu or "H100")
    gpu = known.name if known else gpu
    if gpu not in _MEMORY:
        raise OptionError(
            f"--gpu = {gpu!r}",
            expected=f"one of {', '.join(_MEMORY)}: how fast experts are copied to others was not "
            "measured",
            todo="--gpu H100 --gpu-memory 24GiB says what fits in the memory of another",
            where="plan",
        )
    memory = _MEMORY[gpu] if gpu_memory is None else bytes_of(gpu_memory, "--gpu-memory")
    held = None if ram is None else bytes_of(f"{ram}GiB" if _GIB.fullmatch(ram) else ram, "--ram")
    check_checkpoint(directory)
    load()
    from ..checkpoints import Directory
    from ..offload import folder as folders, machine as machines, plan as plans

    model = plans.Model.of_directory(Directory.open(directory))
    disk = None if offload_folder is None else folders.free(offload_folder, "plan")
    result = plans.make(model, memory, held, disk=disk, kv_tokens=kv_tokens, where="plan")
    return Planned(str(directory), gpu, result, 1 / result.seconds(machines.EXPECTED[gpu]), asked)
