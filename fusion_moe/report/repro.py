"""A script that runs one fusion by itself."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..encodings import find
from ..ir import DTYPES, FLOATS, Fusion, Groups, Op, Value, plain, storage_shape, value
from ..layouts import ends_from_sizes
from .cost import forms
from .data import FusionReport

_SCRIPT = '''"""{id} of a report: rebuilt, run on random inputs, compared with the reference."""

from fusion_moe import options, run
from fusion_moe.ir.text import parse
from fusion_moe.report.repro import random_inputs

PROGRAM = """
{program}
"""

if __name__ == "__main__":
    fusion = parse(PROGRAM)
    inputs = [t.to("{device}") for t in random_inputs(fusion, seed=0, sizes={sizes})]
    with options.override(target="{target}"):
        found = run(fusion, inputs)
    for i, (got, want) in enumerate(zip(found, fusion.evaluate(*inputs), strict=True)):
        difference = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
        print(f"output {{i}}: {{fusion.outputs[i].type}}, largest difference {{difference:.3g}}")
'''


def script(fusion: FusionReport, target: str) -> str:
    """The text of the script for a fusion. `target` is a target whose programs can run on this
    machine.
    """
    device = "cpu" if target in ("cpu", "reference") else "cuda"
    return _SCRIPT.format(
        id=fusion.id,
        program=fusion.programs["translated"],
        sizes=dict(fusion.sizes),
        target=target,
        device=device,
    )


# scales from 1/8 to 8
_BYTES = {"u8": (0, 256), "f8e4m3": (0x28, 0x48), "f8e5m2": (0x30, 0x48), "f8e8m0": (124, 131)}


def random_inputs(fusion: Fusion, seed: int, sizes: dict[str, int] | None = None) -> list[Tensor]:
    """Random inputs of a fusion's types that its operations accept: ids of groups, increasing ends,
    slots that are a permutation.

    sizes: numbers for its symbols; without it, each is 8.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    env = dict.fromkeys(fusion.symbols, 8) | (sizes or {})
    with torch.device("cpu"):  # whatever the default device is
        return [_random(v, fusion, env, generator) for v in fusion.inputs]


def _random(v: Value, fusion: Fusion, env: dict[str, int], generator: torch.Generator) -> Tensor:
    shape = storage_shape(v.type, env)
    if v.type.dtype in FLOATS:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32)
        return (numbers.abs() / 100 if _is_matrix_scale(v, fusion) else numbers).to(
            DTYPES[v.type.dtype]
        )
    if v.type.dtype in _BYTES:
        low, high = _BYTES[v.type.dtype]
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator).view(
            DTYPES[v.type.dtype]
        )
    if v.type.dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    return _integers(v, fusion, env, generator).to(DTYPES[v.type.dtype])


def _is_matrix_scale(v: Value, fusion: Fusion) -> bool:
    """Whether a value is the scale of whole matrices of a weight."""
    packs = [r for r in fusion.readers.get(v, ()) if r.kind.name == "pack"]
    return any(find(r.attrs["encoding"]).parts[r.values.index(v)].of_matrix for r in packs)


def _integers(v: Value, fusion: Fusion, env: dict[str, int], generator: torch.Generator) -> Tensor:
    shape = storage_shape(v.type, env)
    if (op := _reader(v, fusion, "ends", 0)) is not None:
        return _ends(op.attrs["groups"], value(op.attrs["rows"], env), env, generator)
    if (op := _reader(v, fusion, "route", 0)) is not None:
        return torch.randint(0, value(op.attrs["groups"].count, env), shape, generator=generator)
    if _reader(v, fusion, "combine", 1) or _reader(v, fusion, "invert", 0):
        return torch.randperm(prod(shape), generator=generator).view(shape)
    read = _reader(v, fusion, "index_select", 1) or _reader(v, fusion, "index_put_accumulate", 1)
    limit = value(plain(read.values[0].type.shape[read.attrs.get("dim", 0)]), env) if read else 4
    return torch.randint(0, max(limit, 1), shape, generator=generator)


def _ends(groups: Groups, rows: int, env: dict[str, int], generator: torch.Generator) -> Tensor:
    of = torch.randint(0, value(groups.count, env), (rows,), generator=generator)
    return ends_from_sizes(torch.bincount(of, minlength=value(groups.count, env)))


def _reader(v: Value, fusion: Fusion, kind: str, place: int) -> Op | None:
    """The first operation of a kind that reads a value, or the result of shape or pointwise
    operations on it, as input number `place`.
    """
    readers = (
        op
        for form in forms(v, fusion, lambda op: op.kind.role in ("shape", "pointwise"))
        for op in fusion.readers.get(form, ())
        if op.kind.name == kind and op.inputs[place] is form
    )
    return next(readers, None)
