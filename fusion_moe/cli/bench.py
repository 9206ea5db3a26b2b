"""fusion-moe bench: a model with experts in few bits beside the same in bf16, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from ..messages import amount, check_checkpoint, count, duration, exists, ratio
from .models import Device, a_model, check_device, device_of, quietly
from .output import Result, table
from .quantize import To
from .start import load

if TYPE_CHECKING:
    from rich.console import Console

    from ..integrations.transformers.bench import Contender, Row, Times


SIZES = "tiny", "qwen3-30b"  # of transformers.bench
MODES = "eager", "inductor", "fusion_moe", "thunder", "thunderfx"  # the same
FIRST, NEXT = "first token", "between tokens"  # of rows of modes
_BAR = 30  # columns
_BUSY = 0.5  # a spread that a machine at rest does not have


@dataclass(frozen=True)
class Bench(Result):
    """What was measured. of: which model; where: which machine; how: of decoding; layers: of the
    model that was measured, and of the whole; heads: the projection to the vocabulary, by batch;
    weights: bytes by contender, and what they would be of the whole.
    """

    schema = "fusion_moe.bench/3"
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
                duration(row.timed.median),
                f"{row.timed.spread:.0%}",
                "" if row.of == FIRST else f"{row.tokens / row.timed.median:,.1f}",
                self._bar(row),
            )
            if row.times
            else (_call_of(row), row.name, "-", "", "", "")
            for row in self.rows
        )
        names = (
            "",
            "mode and experts" if self.rows[0].mode else "experts",
            "median",
            "spread",
            "tokens/s",
            "",
        )
        console.print(table(names, cells, right=(2, 3, 4)))
        console.print()
        for line in self._sentences():
            console.print(line, soft_wrap=True)

    def _bar(self, row: Row) -> str:
        """As long as its time, beside the slowest way of the same call."""
        slowest = max(r.timed.median for r in self._timed() if _call_of(r) == _call_of(row))
        return "=" * round(_BAR * row.timed.median / slowest)

    def _timed(self) -> list[Row]:
        return [row for row in self.rows if row.times]

    def _sentences(self) -> Iterator[str]:
        some, whole = self.layers
        yield from dict.fromkeys(f"{row.name}: {row.why}" for row in self.rows if row.why)
        for call in dict.fromkeys((row.of, row.tokens) for row in self._timed()):
            ours, best = self._of(*call)
            if best is None:
                continue
            yield f"{_call_of(ours)}: {verdict(ours, best)}"
            if ours.of in ("decode", NEXT) and some < whole:
                head = self.heads[ours.tokens].median
                times = [(row.timed.median - head) * whole / some + head for row in (ours, best)]
                a, b = (f"{ratio(ours.tokens / t)} tokens/s" for t in times)
                yield _computed(whole, a, b, times[1] / times[0])
        if max((row.timed.spread for row in self._timed()), default=0) > _BUSY:
            yield f"a spread above {_BUSY:.0%}: measure again when nothing else runs here"
        if peaks := [f"{row.name} {amount(row.peak, 'B')}" for row in self.rows if row.peak]:
            yield f"memory beside weights, at the peak: {', '.join(dict.fromkeys(peaks))}"
        ours_bytes, bf16 = self.weights[0].values()
        yield (
            f"weights: {amount(ours_bytes, 'B')}, in bf16 {amount(bf16, 'B')}: "
            f"{bf16 / ours_bytes:.2f}x smaller"
        )
        if some < whole:
            ours_bytes, bf16 = self.weights[1].values()
            sizes = amount(ours_bytes, "B"), amount(bf16, "B")
            yield _computed(whole, *sizes, bf16 / ours_bytes)

    def _of(self, of: str, tokens: int) -> tuple[Row, Row | None]:
        """Ours, or the first, and the fastest other."""
        rows = [row for row in self._timed() if (row.of, row.tokens) == (of, tokens)]
        ours = next((row for row in rows if row.mode == "fusion_moe"), rows[0])
        others = [row for row in rows if row is not ours]
        return ours, min(others, key=lambda row: row.timed.median, default=None)


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
    after: Annotated[
        int | None, typer.Option(min=1, help="Tokens before those decoded. [default: 512]")
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a prompt. [default: 4096, 512 on CPUs and with --mode]"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Runs, of which the median counts.")] = 7,
    mode: Annotated[
        str,
        typer.Option(
            help="Compilers to compare, with commas between them: eager, inductor, fusion_moe, "
            "thunder (thunder.jit), thunderfx."
        ),
    ] = "",
    device: Device = "",
) -> Bench:
    """Time decoding and prompts beside the same model in bf16. Compares memory too.

    In turns. On a GPU all decode under CUDA graphs; on CPUs nothing is compiled.

    With --mode, each compiler named has prompts and steps, on CPUs too: fusion_moe the experts in
    few bits, all others the model in bf16. The time until the first token of --prompt tokens, and
    between those after it.
    """
    modes = check_modes(mode, after)
    if (directory is None) == (not config):
        actual = "DIR and --config" if config else "neither DIR nor --config"
        raise OptionError(actual, expected="one of them", where="bench")
    check_device(device, "bench")
    if directory is not None:
        check_checkpoint(directory)
    elif config not in SIZES and not exists(Path(config)):
        expected = f"{', '.join(SIZES)}, or a file or directory"
        raise OptionError(f"--config {config}", expected=expected, where="bench")
    load()
    where = device_of(device, "bench")
    tokens = prompt or (4096 if where == "cuda" and not modes else 512)
    with quietly():
        from ..integrations.transformers import bench as of
        from ..integrations.transformers.decoding import why_plain

        contenders, whole, weights = _contenders(directory, config, to, layers, where)
        ours, model = contenders[0], contenders[-1].model
        text = model.config.get_text_config()
        some = text.num_hidden_layers
        tokens = min(tokens, getattr(text, "max_position_embeddings", None) or tokens)
        batches, before = batch or [1], after or 512
        if modes:
            before = tokens
            rows = tuple(
                of.compared_modes(of.in_modes(contenders, modes), batches, tokens, repeats)
            )
        else:
            rows = tuple(of.compared(contenders, batches, before, tokens, repeats))
        heads = {b: of.head(model, b, repeats) for b in batch or [1]} if some < whole else {}
        why = why_plain(model)
    held = {ours.name: ours.model, "bf16": model}
    return Bench(
        f"{type(model).__name__}, {count(some, 'layer')}"
        f"{f' of {whole}' if some < whole else ''}, {weights}",
        _machine(where),
        f"{_how(modes, why)}; {before} tokens before a step; median of {repeats} runs in turns",
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


def check_modes(mode: str, after: int | None) -> list[str]:
    """ "a, b" of --mode -> ["a", "b"], each once.

    OptionError for a name that is not in MODES, and for --after beside --mode: only the comparison
    without modes reads it.
    """
    modes = list(dict.fromkeys(filter(None, mode.replace(" ", "").split(","))))
    if unknown := [name for name in modes if name not in MODES]:
        actual = f"--mode {','.join(unknown)}"
        raise OptionError(actual, expected=", ".join(MODES), where="bench")
    if modes and after is not None:
        actual = "--after with --mode"
        todo = "pass --prompt: in modes, steps follow the prompt"
        raise OptionError(actual, expected="one of them", todo=todo, where="bench")
    return modes


def _how(modes: Sequence[str], why: str) -> str:
    """What runs steps; why: they are no CUDA graphs."""
    if not modes:
        return f"steps are not compiled: {why}" if why else "steps replay CUDA graphs"
    graphs = "no step is a CUDA graph" if why else "inductor and fusion_moe replay CUDA graphs"
    return f"{graphs}{f': {why}' if why else ''}"


def verdict(ours: Row, other: Row) -> str:
    """How many times as fast ours is, unless their runs overlap."""
    if ours.timed.overlaps(other.timed):
        return f"{ours.name} and {other.name}: inconclusive, their times overlap"
    factor = other.timed.median / ours.timed.median
    return f"{ours.name} is {factor:.2f}x as fast as {other.name}"


def _computed(layers: int, ours: str, bf16: str, factor: float) -> str:
    return f"  all {layers} layers, computed from these: {ours}, in bf16 {bf16}: {factor:.2f}x"


def _call_of(row: Row) -> str:
    of = "token" if row.of == "prompt" else "sequence"
    return f"{row.of}, {count(row.tokens, of)}"


def _machine(device: str) -> str:
    import torch

    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{count(torch.get_num_threads(), 'CPU thread')}, torch {torch.__version__}"
