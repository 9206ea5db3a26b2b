"""fusion-moe plan: what of a model fits where, if experts are offloaded, to run it or to train
adapters, by the headers of its files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arch import lookup
from ..errors import OptionError
from ..messages import amount, bytes_of, check_checkpoint, ratio
from .bench import SIZES
from .output import Result
from .start import FINE, PROBLEMS, load

if TYPE_CHECKING:
    from rich.console import Console

    from ..offload.plan import Model, Plan
    from ..offload.train_plan import TrainPlan

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
        """Writes the plan and the tokens a second to expect to the terminal: what is on the GPU, in
        memory, in files.
        """
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


@dataclass(frozen=True)
class TrainPlanned(Result):
    """A plan for training adapters. of: a directory, or the name of a configuration; gpu: whose
    speed is expected.
    """

    schema = "fusion_moe.train_plan/1"
    of: str
    gpu: str
    plan: TrainPlan

    @property
    def exit_code(self) -> int:
        """1 where it does not fit, else 0."""
        return FINE if self.plan.plan else PROBLEMS

    def to_json(self) -> dict[str, Any]:
        """The fields, and the speed that follows from them."""
        return {**super().to_json(), "tokens_per_second": self.plan.tokens_per_second}

    def print(self, console: Console) -> None:
        """Memory by part, speed, and what to do."""
        console.print(f"{self.of}, {self.plan}", soft_wrap=True)
        if self.plan.plan:
            console.print(f"as fast as an {self.gpu}; nothing was measured here", soft_wrap=True)


def plan(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="A directory with config.json and safetensors."),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="H100 or H200, or 24GB of another. [default: H100]")
    ] = "",
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
        int | None,
        typer.Option(min=0, help="Tokens whose keys and values there is room for. [default: 8192]"),
    ] = None,
    config: Annotated[
        str, typer.Option(help="With --train, in place of DIR: the sizes of qwen3-30b or tiny.")
    ] = "",
    train: Annotated[bool, typer.Option("--train", help="Plan LoRA on all experts.")] = False,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With --train: tokens of a forward pass. [default: 4096]"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, help="With --train: LoRA's. [default: 16]")
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="With --train: gradient checkpointing. [default: checkpointing]",
        ),
    ] = None,
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="With --train: logits in chunks of tokens.")
    ] = False,
    adam_8bit: Annotated[
        bool, typer.Option("--adam-8bit", help="With --train: an optimizer with moments in 8 bits.")
    ] = False,
    activation_offloading: Annotated[
        bool,
        typer.Option(
            "--activation-offloading",
            help="With --train: what checkpointing keeps is in the host's memory.",
        ),
    ] = False,
    link: Annotated[
        float | None, typer.Option(help="With --train: GB/s to the GPU. [default: 50]")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="With --train: what whole steps reach. [default: the GPU's]"),
    ] = None,
) -> Result:
    """What of a model fits on a GPU, and how fast that would be. The rest stays in memory.

    Reads headers only, and needs no GPU.
    """
    asked, known, of_gpu = bool(gpu), lookup(gpu or "H100"), "--gpu-memory"
    if gpu and gpu[0].isdigit():
        of_gpu = of_gpu if gpu_memory else "--gpu"
        gpu, gpu_memory, asked, known = "", gpu_memory or gpu, False, lookup("H100")
    gpu = known.name if known else gpu
    if gpu not in _MEMORY:
        raise OptionError(
            f"--gpu = {gpu!r}",
            expected=f"one of {', '.join(_MEMORY)}: how fast experts are copied to others was not "
            "measured",
            todo="--gpu H100 --gpu-memory 24GiB says what fits in the memory of another",
            where="plan",
        )
    memory = _MEMORY[gpu] if gpu_memory is None else bytes_of(gpu_memory, of_gpu)
    held = None if ram is None else bytes_of(f"{ram}GiB" if _GIB.fullmatch(ram) else ram, "--ram")
    if (directory is None) != bool(config) or config not in ("", *SIZES) or (config and not train):
        raise OptionError(
            f"DIR {directory or 'missing'}, --config {config or 'missing'}",
            expected=f"a directory or, with --train, --config of {', '.join(SIZES)}",
            where="plan",
        )
    of_step: dict[str, Any] = {
        "tokens": tokens,
        "rank": rank,
        "checkpointing": checkpointing,
        "chunked_loss": chunked_loss or None,
        "adam_8bit": adam_8bit or None,
        "activation_offloading": activation_offloading or None,
    }
    others = {"kv_tokens": kv_tokens} if train else {**of_step, "link": link, "tflops": tflops}
    if ignored := [
        f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None
    ]:
        raise OptionError(
            f"{' '.join(ignored)} {'with' if train else 'without'} --train",
            expected="--train, which plans a step that trains adapters"
            if not train
            else "no --train, which plans a step without keys and values",
            where="plan",
        )
    link = 50.0 if link is None else link
    if not (0 < link < inf and (tflops is None or 0 < tflops < inf)):
        raise OptionError(
            f"--link {link} --tflops {tflops}", expected="numbers above 0", where="plan"
        )
    if directory is not None:
        check_checkpoint(directory)
    load()
    from ..offload import folder as folders, machine as machines, plan as plans, train_plan

    of, (model, sizes) = config or str(directory), _model(directory, config, train)
    disk = None if offload_folder is None else folders.free(offload_folder, "plan")
    if train:
        step = train_plan.Step(**{k: v for k, v in of_step.items() if v is not None})
        speed = link * 1e9, tflops * 1e12 if tflops else train_plan.FLOPS[gpu]
        made = train_plan.plan(model, sizes, memory, step, held, *speed, disk)
        return TrainPlanned(of, gpu, made)
    kv_tokens = plans.KV_TOKENS if kv_tokens is None else kv_tokens
    result = plans.make(model, memory, held, disk=disk, kv_tokens=kv_tokens, where="plan")
    return Planned(of, gpu, result, 1 / result.seconds(machines.EXPECTED[gpu]), asked)


def _model(directory: Path | None, config: str, train: bool) -> tuple[Model, Mapping[str, Any]]:
    """The sizes of a model, and its configuration. train: experts in floats are rounded."""
    from ..checkpoints import Directory
    from ..offload import plan as plans, train_plan

    if directory is None:
        from ..integrations.transformers.bench import SIZES as ALL_SIZES

        return train_plan.of_sizes(ALL_SIZES[config]), ALL_SIZES[config]
    opened = Directory.open(directory)
    return plans.Model.of_directory(opened, rounds=train), opened.config
