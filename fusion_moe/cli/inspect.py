"""fusion-moe inspect: what a directory holds, by its headers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..checkpoints import (
    KNOWN,
    Directory,
    Entry,
    StoredWeight,
    check_scales,
    experts_of,
    layers_of_experts,
    method_of,
    stored_weights,
)
from ..encodings import BF16, F16, F32
from ..errors import CheckpointError, printable
from ..messages.progress import progress
from .machine import kernels_for
from .output import FINE, PROBLEMS, Json, bytes_of, count, finish, table

_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS = re.compile(r"\bexperts\b")
_PLAIN = {encoding.element.dtype: encoding for encoding in (BF16, F16, F32)}


@dataclass(frozen=True)
class Group:
    """Tensors that are stored in one way. weights: matrices, or plain tensors; layers: that have
    some; runs: what multiplies by them.
    """

    format: str
    of: str
    weights: int
    layers: int
    bytes: int
    runs: str


@dataclass(frozen=True)
class Range:
    """What the scales of one kind hold. largest, smallest: but for zeros; zeros: how many of
    `scales`.
    """

    format: str
    part: str
    scales: int
    zeros: int
    smallest: float
    largest: float


@dataclass(frozen=True)
class Inspection:
    """What was found. method: `quant_method`, "" if nothing is quantized."""

    directory: str
    architectures: tuple[str, ...] = ()
    method: str = ""
    algorithm: str = ""
    files: int = 0
    tensors: int = 0
    bytes: int = 0
    groups: tuple[Group, ...] = ()
    ranges: tuple[Range, ...] = ()
    problems: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        """1 with problems."""
        return PROBLEMS if self.problems else FINE

    def to_json(self) -> dict[str, Any]:
        """The fields of the classes here."""
        return {"schema": "fusion_moe.inspect/1", **asdict(self)}

    def print(self, console: Console) -> None:
        """A head, a table of formats, one of scales, problems."""
        console.print(printable(self.directory), soft_wrap=True)
        if self.files:
            quantized = (
                (f"quantized by {self.method}{f', {self.algorithm}' if self.algorithm else ''}")
                if self.method
                else "not quantized"
            )
            counts = (
                f"{count(self.tensors, 'tensor')} in {count(self.files, 'file')}, "
                f"{bytes_of(self.bytes)}"
            )
            console.print(
                printable(
                    f"{', '.join(self.architectures) or 'no architecture'}; {quantized}; {counts}"
                ),
                soft_wrap=True,
            )
            rows = (
                (g.format, g.of, g.weights, g.layers, bytes_of(g.bytes), g.runs)
                for g in self.groups
            )
            console.print()
            console.print(
                table(
                    ("format", "of", "weights", "layers", "bytes", "runs here"),
                    rows,
                    right=(2, 3, 4),
                )
            )
        if self.ranges:
            rows = (
                (r.format, r.part, r.scales, r.zeros, f"{r.smallest:.4g}", f"{r.largest:.4g}")
                for r in self.ranges
            )
            console.print()
            console.print(
                table(
                    ("format", "scale", "numbers", "zeros", "smallest", "largest"),
                    rows,
                    right=(2, 3, 4, 5),
                )
            )
        console.print()
        for problem in self.problems:
            console.print(f"problem: {' '.join(problem.split())}", soft_wrap=True)
        if not self.problems:
            console.print("no problems")


def inspect(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with config.json and safetensors.")
    ],
    values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Read all scales too: their ranges, and numbers that no quantizer writes.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """What a directory holds: its weights by format, bytes, what multiplies by them here, problems.
    Reads headers alone.
    """
    finish(context, lambda: inspection(directory, values), json)


def inspection(path: Path, values: bool = False) -> Inspection:
    """What there is in a directory. UnsupportedError for one that is not read at all."""
    try:
        directory = Directory.open(path)
        quantization = directory.quantization
        method = method_of(quantization, str(path))
    except CheckpointError as error:
        return Inspection(str(path), problems=(str(error),))
    entries, problems = directory.tensors, []
    weights: Mapping[str, StoredWeight] = {}
    ranges: tuple[Range, ...] = ()
    try:
        weights = stored_weights(entries, method)
        layers_of_experts(
            [*weights, *(name.removesuffix(".weight") for name in entries)],
            experts_of(directory.config),
        )
        if values:
            ranges = tuple(
                _ranges(directory, progress(weights.values(), "reading scales", len(weights)))
            )
            check_scales(directory, weights)
    except CheckpointError as error:
        problems.append(str(error))
    return Inspection(
        str(path),
        _strings(directory.config.get("architectures")),
        method,
        ", ".join(_strings([quantization.get("quant_algo")])),
        len({entry.file for entry in entries.values()}),
        len(entries),
        sum(entry.nbytes for entry in entries.values()),
        tuple(_groups(entries, weights)),
        ranges,
        tuple(problems),
    )


def _strings(said: Any) -> tuple[str, ...]:
    """Those in a list of JSON, which may be anything."""
    return (
        tuple(" ".join(one.split()) for one in said if isinstance(one, str))
        if isinstance(said, list)
        else ()
    )


def _groups(entries: Mapping[str, Entry], weights: Mapping[str, StoredWeight]) -> Iterator[Group]:
    """Encoded weights first, then what is left: plain tensors by dtype, and scales that no weight
    needs.
    """
    of: dict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
    for weight in weights.values():
        encoding = weight.scheme.encoding
        runs = (
            "dequantized to bf16 when it is loaded" if encoding is None else kernels_for(encoding)
        )
        of[weight.scheme.name, _role(weight.name, "linear layers"), runs].append(
            (weight.name, weight.nbytes)
        )
    used = {entry.name for weight in weights.values() for entry in weight.entries.values()}
    for entry in (entry for name, entry in entries.items() if name not in used):
        dtype = str(entry.dtype).removeprefix("torch.")
        role = (
            "what no weight needs" if entry.name.endswith(KNOWN) else _role(entry.name, "all else")
        )
        runs = (
            kernels_for(_PLAIN[entry.dtype])
            if role == "experts" and entry.dtype in _PLAIN and len(entry.shape) > 1
            else "-"
        )
        of[dtype, role, "torch" if role == "all else" else runs].append((entry.name, entry.nbytes))
    for (format, role, runs), stored in of.items():
        layers = {found[1] for name, _ in stored if (found := _LAYER.search(name))}
        yield Group(format, role, len(stored), len(layers), sum(size for _, size in stored), runs)


def _role(name: str, otherwise: str) -> str:
    return "experts" if _EXPERTS.search(name) and not name.endswith("bias") else otherwise


def _ranges(directory: Directory, weights: Iterable[StoredWeight]) -> Iterator[Range]:
    """Of the scales of each format, by part, in the order of files."""
    least: dict[tuple[str, str], float] = {}
    most: dict[tuple[str, str], float] = {}
    numbers, zeros = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for weight in weights:
        for part in weight.scheme.parts[1:]:
            key, scale = (
                (weight.scheme.name, part.part),
                part.to_part(directory.read(weight.entries[part.part].name)).float(),
            )
            used = scale[scale != 0]
            numbers[key] += scale.numel()
            zeros[key] += scale.numel() - used.numel()
            if used.numel():
                least[key] = min(least.get(key, float("inf")), used.min().item())
                most[key] = max(most.get(key, float("-inf")), used.max().item())
    for key, scales in numbers.items():
        yield Range(*key, scales, zeros[key], least.get(key, 0.0), most.get(key, 0.0))
