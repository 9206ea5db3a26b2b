"""fusion-moe bench: a model with NVFP4 experts beside the same model in bf16, on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from ..env import has_cuda
from ..errors import OptionError
from ..messages.units import amount, count, duration
from .models import quietly
from .output import FINE, Json, finish, table

if TYPE_CHECKING:
    from ..transformers.bench import Row, Times


@dataclass(frozen=True)
class Bench:
    """What was measured. of: which model; where: which machine; how: of decoding; layers: of the
    model that was measured, and of the whole; heads: the projection to the vocabulary, by batch;
    weights: bytes by contender.
    """

    of: str
    where: str
    how: str
    layers: tuple[int, int]
    rows: tuple[Row, ...]
    heads: dict[int, Times]
    weights: dict[str, int]
    exit_code: int = FINE

    def to_json(self) -> dict[str, Any]:
        """The fields of the classes here; times in seconds."""
        return {"schema": "fusion_moe.bench/1", **asdict(self)}

    def print(self, console: Console) -> None:
        """A head, a table, and sentences of what follows from it."""
        console.print(f"{self.of}\n{self.where}; {self.how}\n", soft_wrap=True)
        cells = (
            (
                _call_of(row),
                row.name,
                duration(row.times.median),
                f"{row.times.spread:.0%}",
                f"{row.tokens / row.times.median:,.1f}",
            )
            for row in self.rows
        )
        names = "", "experts", "median", "spread", "tokens/s"
        console.print(table(names, cells, right=(2, 3, 4)))
        console.print()
        for line in self._sentences():
            console.print(line, soft_wrap=True)

    def _sentences(self) -> list[str]:
        said = []
        for call in dict.fromkeys((row.of, row.tokens) for row in self.rows):
            ours, best = self._of(*call)
            said.append(f"{_call_of(ours)}: {verdict(ours, best)}")
            some, all_layers = self.layers
            if ours.of == "decode" and some < all_layers:
                head = self.heads[ours.tokens].median
                times = [(row.times.median - head) * all_layers / some for row in (ours, best)]
                rates = ", ".join(f"{ours.tokens / (t + head):,.1f}" for t in times)
                said.append(
                    f"  all {all_layers} layers, computed from these: {rates} tokens/s, "
                    f"{(times[1] + head) / (times[0] + head):.2f}x"
                )
        ours_bytes, bf16 = self.weights.values()
        said.append(
            f"weights: {amount(ours_bytes, 'B')}, in bf16 {amount(bf16, 'B')}: "
            f"{bf16 / ours_bytes:.2f}x smaller"
        )
        return said

    def _of(self, of: str, tokens: int) -> tuple[Row, Row]:
        """Ours, and the fastest other."""
        ours, *others = (row for row in self.rows if (row.of, row.tokens) == (of, tokens))
        return ours, min(others, key=lambda row: row.times.median)


def bench(
    context: typer.Context,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A model, in floats or quantized.")
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            help="In place of DIR, random weights: qwen3-30b, tiny, or a config.json to read."
        ),
    ] = "",
    layers: Annotated[int, typer.Option(min=0, help="With --config; 0: all of them.")] = 0,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences. [default: 1]")] = None,
    after: Annotated[int, typer.Option(min=1, help="Tokens before those decoded.")] = 512,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt. [default: 4096, 512 on CPUs]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Runs, of which the median counts.")] = 7,
    device: Annotated[
        str, typer.Option(help="cpu or cuda. [default: a GPU where there is one]")
    ] = "",
    json: Json = False,
) -> None:
    """Time decoding and prompts, and compare memory, with experts in NVFP4 and in bf16, in turns.

    On a GPU all decode under CUDA graphs; on CPUs nothing is compiled.
    """

    def find() -> Bench:
        if (directory is None) == (not config):
            found = "DIR and --config" if config else "neither DIR nor --config"
            raise OptionError(found, expected="one of them", where="bench")
        where = device or ("cuda" if has_cuda() else "cpu")
        tokens = prompt or (4096 if where == "cuda" else 512)
        with quietly():
            return measured(directory, config, layers, batch or [1], after, tokens, repeats, where)

    finish(context, find, json)


def measured(
    directory: Path | None,
    config: str,
    layers: int,
    batches: list[int],
    context: int,
    prompt: int,
    repeats: int,
    device: str,
) -> Bench:
    """Loads or makes a model, and measures it."""
    from ..transformers import bench as of
    from ..transformers.decoding import why_plain
    from ..transformers.loading import configuration

    if directory is None:
        sizes = of.config_of(config) if config in of.SIZES else configuration(config)
        whole, weights = sizes.num_hidden_layers, "random weights"
        contenders = of.beside(of.made(sizes, layers, device))
    else:
        contenders = of.loaded(directory, device)
        whole, weights = contenders[0].model.config.num_hidden_layers, str(directory)
    ours, model = contenders[0], contenders[-1].model
    some = model.config.num_hidden_layers
    longest = getattr(model.config, "max_position_embeddings", None) or prompt
    rows = tuple(of.compared(contenders, batches, context, min(prompt, longest), repeats))
    why = why_plain(model)
    return Bench(
        f"{type(model).__name__}, {count(some, 'layer')}"
        f"{f' of {whole}' if some < whole else ''}, {weights}",
        _machine(device),
        f"steps {f'are not compiled: {why}' if why else 'replay CUDA graphs'}; "
        f"{context} tokens before a step; median of {repeats} runs in turns",
        (some, whole),
        rows,
        {b: of.head(model, b, repeats) for b in batches} if some < whole else {},
        {ours.name: of.bytes_of(ours.model), "bf16": of.bytes_of(model)},
    )


def verdict(ours: Row, other: Row) -> str:
    """How many times as fast ours is, unless their runs overlap."""
    if ours.times.overlaps(other.times):
        return f"{ours.name} and {other.name}: inconclusive, their times overlap"
    ratio = other.times.median / ours.times.median
    return f"{ours.name} is {ratio:.2f}x as fast as {other.name}"


def _call_of(row: Row) -> str:
    of = "sequence" if row.of == "decode" else "token"
    return f"{row.of}, {count(row.tokens, of)}"


def _machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{count(torch.get_num_threads(), 'CPU thread')}, torch {torch.__version__}"
