"""The work of `inspect`, which needs torch: reads a directory's headers. Also after `convert` and
`quantize`, of what they wrote.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..backends.cpu import readers as cpu
from ..backends.cuda import readers as cuda
from ..checkpoints import (
    KNOWN,
    Directory,
    Entry,
    Source,
    StoredWeight,
    all_eight_bits,
    check_scales,
    method_of,
    packing_of,
    stored_weights,
)
from ..checkpoints.comparing import errors_of
from ..encodings import PLAIN, Encoding
from ..env import has_cuda
from ..errors import CheckpointError, UnsupportedError
from ..messages import GGUF
from ..runtime import build, isa
from .inspect_result import Group, Inspection
from .models import has_tokenizer

_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS = re.compile(r"\bexperts\b")
_NO_TOKENIZER = "no tokenizer: run, eval and servers need the original model's"


def inspect_directory(
    path: Path,
    values: bool = False,
    against: Path | None = None,
    planned: Directory | None = None,
    files: Path | None = None,
) -> Inspection:
    """What there is in a directory, or would be in a planned one with the other files of a
    directory. UnsupportedError for one that is not read at all.
    """
    try:
        directory = planned or Directory.open(path)
        quantization = directory.quantization
        method = method_of(quantization, str(path))
    except CheckpointError as error:
        return Inspection(str(path), problems=(str(error),))
    entries, problems = directory.tensors, []
    in_gguf = directory.path.suffix == GGUF
    weights: Mapping[str, StoredWeight] = {}
    try:
        weights = stored_weights(entries, method, packing_of(quantization))
        _ = Source(directory, weights).layers
        if values:
            check_scales(directory, weights)
    except CheckpointError as error:
        problems.append(str(error))
    return Inspection(
        str(path),
        _strings(directory.config.get("architectures")),
        "gguf" if in_gguf else method,
        ", ".join(
            _strings([not in_gguf and quantization.get("quant_algo", quantization.get("format"))])
        ),
        ", ".join(_strings([quantization.get("scales")])),
        len({entry.file for entry in entries.values()}),
        len(entries),
        sum(entry.nbytes for entry in entries.values()),
        tuple(_groups(entries, weights)),
        tuple(errors_of(Source.open(path), Source.open(against))) if against and weights else (),
        tuple(problems),
        planned is None,
        () if has_tokenizer(files or path) else (_NO_TOKENIZER,),
    )


def _strings(value: Any) -> tuple[str, ...]:
    """Those in a list of JSON, which may be anything."""
    return (
        tuple(" ".join(one.split()) for one in value if isinstance(one, str))
        if isinstance(value, list)
        else ()
    )


def _groups(entries: Mapping[str, Entry], weights: Mapping[str, StoredWeight]) -> Iterator[Group]:
    """Encoded weights first, then what is left: plain tensors by dtype, and scales that no weight
    needs.
    """
    of: dict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
    whole = all_eight_bits(weights)
    for weight in weights.values():
        encoding, role = weight.scheme.encoding, _role(weight.name, "linear layers")
        kept = whole or role == "experts" or not weight.scheme.eight_bits
        runs = (
            kernels_for(encoding) if encoding and kept else "dequantized to bf16 when it is loaded"
        )
        format = next(iter(weight.entries.values())).kind or weight.scheme.name
        of[format, role, runs].append((weight.name, weight.nbytes))
    used = {entry.name for weight in weights.values() for entry in weight.entries.values()}
    for entry in (entry for name, entry in entries.items() if name not in used):
        dtype = entry.kind or str(entry.dtype).removeprefix("torch.")
        role = "not used here" if entry.name.endswith(KNOWN) else _role(entry.name, "all else")
        runs = (
            "decoded to floats when it is loaded"
            if role == "experts" and entry.kind
            else kernels_for(PLAIN[entry.dtype])
            if role == "experts" and entry.dtype in PLAIN and len(entry.shape) > 1
            else "-"
        )
        of[dtype, role, "torch" if role == "all else" else runs].append((entry.name, entry.nbytes))
    for (format, role, runs), stored in of.items():
        layers = {match[1] for name, _ in stored if (match := _LAYER.search(name))}
        yield Group(format, role, len(stored), len(layers), sum(size for _, size in stored), runs)


def kernels_for(encoding: Encoding) -> str:
    """What multiplies by weights in an encoding."""
    if has_cuda() and (encoding.name, "linear") in cuda.readable():
        return f"CUDA, {torch.cuda.get_device_name()}"
    try:
        cpu.reader_of(encoding.name)
    except UnsupportedError:
        return "plain torch: no kernel reads it"
    isa_level = isa.selected()
    if build.find_compiler():
        return f"C++, {isa_level}"
    if cpu.came(isa_level, encoding.name):
        return f"prebuilt C++, {isa_level}, plain torch around it: no compiler"
    return "plain torch: no compiler"


def is_expert(name: str) -> bool:
    """Whether a tensor of this name is the weight of experts."""
    return bool(_EXPERTS.search(name)) and not name.endswith("bias")


def _role(name: str, otherwise: str) -> str:
    return "experts" if is_expert(name) else otherwise
