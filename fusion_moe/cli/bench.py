"""fusion-moe bench: a model with experts in few bits beside the same in bf16, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from ..messages.paths import check_checkpoint, exists
from ..messages.units import amount, count, duration, ratio
from .models import Device, a_model, check_device, device_of, quietly
from .output import Result, table
from .quantize import To
from .start import load

if TYPE_CHECKING:
    from rich.console import Console

    from ..integrations.transformers.bench import Contender, Row, Times


SIZES = "tiny", "qwen3-30b"  # of transformers.bench
_BAR = 30  # columns
_BUSY = 0.5  # a spread that a machine at rest does not have


@dataclass(frozen=True)
class Bench(Result):
    """What was measured. of: which model; where: which machine; how: of decoding; layers: of the
    model that was measured, and of the whole; heads: the projection to the vocabulary, by batch;
    weights: bytes by contender, and what they would be of the whole.
    """

    schema = "fusion_moe.bench/2"
    of: str
    where: str
    how: str
    layers: tuple[int, int]
    rows: tuple[Row, ...]
    heads: dict[int, Times]
    weights: tuple[dict[str, int], dict[str, int]]

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
                self._bar(row),
            )
            for row in self.rows
        )
        names = "", "experts", "median", "spread", "tokens/s", ""
        console.print(table(names, cells, right=(2, 3, 4)))
        console.print()
        for line in self._sentences():
            console.print(line, soft_wrap=True)

    def _bar(self, row: Row) -> str:
        """As long as its time, beside the slowest way of the same call."""
        slowest = max(r.times.median for r in self.rows if _call_of(r) == _call_of(row))
        return "=" * round(_BAR * row.times.median / slowest)

    def _sentences(self) -> Iterator[str]:
        some, whole = self.layers
        for call in dict.fromkeys((row.of, row.tokens) for row in self.rows):
            ours, best = self._of(*call)
            yield f"{_call_of(ours)}: {verdict(ours, best)}"
            if ours.of == "decode" and some < whole:
                head = self.heads[ours.tokens].median
                times = [(row.times.median - head) * whole / some + head for row in (ours, best)]
                a, b = (f"{ratio(ours.tokens / t)} tokens/s" for t in times)
                yield _computed(whole, a, b, times[1] / times[0])
        if max(row.times.spread for row in self.rows) > _BUSY:
            yield f"a spread above {_BUSY:.0%}: measure again when nothing else runs here"
        ours_bytes, bf16 = self.weights[0].values()
        yield (
            f"weights: {amount(ours_bytes, 'B')}, in bf16 {amount(bf16, 'B')}: "
            f"{bf16 / ours_bytes:.2f}x smaller"
        )
        if some < whole:
            ours_bytes, bf16 = self.weights[1].values()
            sizes = amount(ours_bytes, "B"), amount(bf16, "B")
            yield _computed(whole, *sizes, bf16 / ours_bytes)

    def _of(self, of: str, tokens: int) -> tuple[Row, Row]:
        """Ours, and the fastest other."""
        ours, *others = (row for row in self.rows if (row.of, row.tokens) == (of, tokens))
        return ours, min(others, key=lambda row: row.times.median)


def bench(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A model, in floats or quantized.")
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            help="In place of DIR, random weights: qwen3-30b, tiny, or a config.json to read."
        ),
    ] = "",
    to: Annotated[To, typer.Option(help="The format of experts in floats.")] = "nvfp4",
    layers: Annotated[int, typer.Option(min=0, help="With --config; 0: all of them.")] = 0,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences; may be repeated. [default: 1]")
    ] = None,
    after: Annotated[int, typer.Option(min=1, help="Tokens before those decoded.")] = 512,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt. [default: 4096, 512 on CPUs]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Runs, of which the median counts.")] = 7,
    device: Device = "",
) -> Bench:
    """Time decoding and prompts beside the same model in bf16. Compares memory too.

    In turns. On a GPU all decode under CUDA graphs; on CPUs nothing is compiled.
    """
    if (directory is None) == (not config):
        found = "DIR and --config" if config else "neither DIR nor --config"
        raise OptionError(found, expected="one of them", where="bench")
    check_device(device, "bench")
    if directory is not None:
        check_checkpoint(directory)
    elif config not in SIZES and not exists(Path(config)):
        expected = f"{', '.join(SIZES)}, or a file or directory"
        raise OptionError(f"--config {config}", expected=expected, where="bench")
    load()
    where = device_of(device, "bench")
    tokens = prompt or (4096 if where == "cuda" else 512)
    with quietly():
        from ..integrations.transformers import bench as of
        from ..integrations.transformers.decoding import why_plain

        contenders, whole, weights = _contenders(directory, config, to, layers, where)
        ours, model = contenders[0], contenders[-1].model
        text = model.config.get_text_config()
        some = text.num_hidden_layers
        tokens = min(tokens, getattr(text, "max_position_embeddings", None) or tokens)
        rows = tuple(of.compared(contenders, batch or [1], after, tokens, repeats))
        heads = {b: of.head(model, b, repeats) for b in batch or [1]} if some < whole else {}
        why = why_plain(model)
    held = {ours.name: ours.model, "bf16": model}
    return Bench(
        f"{type(model).__name__}, {count(some, 'layer')}"
        f"{f' of {whole}' if some < whole else ''}, {weights}",
        _machine(where),
        f"steps {f'are not compiled: {why}' if why else 'replay CUDA graphs'}; "
        f"{after} tokens before a step; median of {repeats} runs in turns",
        (some, whole),
        rows,
        heads,
        (
            {name: of.bytes_of(m, 1) for name, m in held.items()},
            {name: of.bytes_of(m, whole / some) for name, m in held.items()},
        ),
    )


def _contenders(
    directory: Path | None, config: str, to: str, layers: int, device: str
) -> tuple[Sequence[Contender], int, str]:
    """A model that is loaded or made, in all ways; how many layers the whole one has; where the
    weights are from.
    """
    from ..checkpoints import Directory
    from ..integrations.transformers import bench as of
    from ..integrations.transformers.loading import configuration
    from ..nn.config import CONFIGS

    if directory is not None:
        Directory.open(directory)  # says what is wrong with it
        with a_model(directory):
            contenders = of.loaded(directory, device, to)
        return (
            contenders,
            contenders[0].model.config.get_text_config().num_hidden_layers,
            str(directory),
        )
    with a_model(Path(config)):
        sizes = of.config_of(config) if config in of.SIZES else configuration(config)
    whole = sizes.get_text_config().num_hidden_layers
    # the rule that is fastest to compute: numbers are random anyway
    contenders = of.beside(of.made(sizes, layers, device), to=CONFIGS[to](scales="max"))
    return contenders, whole, "random weights"


def verdict(ours: Row, other: Row) -> str:
    """How many times as fast ours is, unless their runs overlap."""
    if ours.times.overlaps(other.times):
        return f"{ours.name} and {other.name}: inconclusive, their times overlap"
    factor = other.times.median / ours.times.median
    return f"{ours.name} is {factor:.2f}x as fast as {other.name}"


def _computed(layers: int, ours: str, bf16: str, factor: float) -> str:
    return f"  all {layers} layers, computed from these: {ours}, in bf16 {bf16}: {factor:.2f}x"


def _call_of(row: Row) -> str:
    of = "sequence" if row.of == "decode" else "token"
    return f"{row.of}, {count(row.tokens, of)}"


def _machine(device: str) -> str:
    import torch

    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{count(torch.get_num_threads(), 'CPU thread')}, torch {torch.__version__}"
