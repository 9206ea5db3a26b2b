"""Judges the nvFuser definitions of a Fusion without a GPU: what they print, what that rebuilds,
and what it means.

The meaning is the interpreter's, which shares no code with the IR.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from interpreter import interpret, round_trip
from launched import keep

from fusion_moe.backends import TARGETS
from fusion_moe.compile import lower
from fusion_moe.encodings import Quantized
from fusion_moe.errors import UnsupportedError
from fusion_moe.integrations.nvfuser.definition import define
from fusion_moe.integrations.nvfuser.launch import arguments
from fusion_moe.integrations.nvfuser.library import DTYPES, installed
from fusion_moe.ir.core import Fusion, Value
from fusion_moe.options import Options
from fusion_moe.schedule.segment import Segment

HAS_NVFUSER = installed()
NVFUSER_TARGETS = ("sm_90", "sm_100")
KEPT: list[Path] = []  # the folder of --keep-definitions, if it was given


def judge(
    fusion: Fusion, inputs: Sequence[Any], targets: Sequence[str] = NVFUSER_TARGETS
) -> dict[str, list[Segment]]:
    """Judges every segment that nvFuser takes, on the inputs it gets in the whole; returns the
    segments for each target.
    """
    env, found = fusion.bind(inputs), {}
    for name in targets:
        try:
            lowered = lower(fusion, TARGETS[name], Options())
        except UnsupportedError:  # 4-bit activations below capability 10.0
            continue
        made: dict[Value, Any] = dict(zip(lowered.stages[-1][1].inputs, inputs, strict=True))
        found[name] = list(lowered.segments)
        for segment in lowered.segments:
            given = [made[v] for v in segment.fusion.inputs]
            outputs = segment.fusion.evaluate(*given, sizes=env)
            if segment.kind == "nvfuser":
                judge_segment(segment.fusion, given, outputs, env)
                for folder in KEPT:
                    keep(segment.fusion, name, env, folder)
            made.update(zip(segment.fusion.outputs, outputs, strict=True))
    return found


def judge_segment(
    fusion: Fusion, inputs: Sequence[Any], outputs: Sequence[Any], env: dict[str, int]
) -> None:
    """The definition prints, rebuilds, has the dtypes of the types, and its text means what the
    segment means.
    """
    definition = define(fusion)
    dtypes = round_trip(definition.fd)
    assert dtypes == [
        "Float4_e2m1fn" if v.type.dtype == "u8" else DTYPES[v.type.dtype] for v in fusion.outputs
    ]
    if any(t.numel() == 0 for t in inputs):
        return  # never launched
    halves = {
        op.attrs["dtype"]
        for op in fusion.ops
        if op.kind.name == "cast" and _of_product(op.values[0], fusion)
    }
    given = arguments(definition, inputs, env)
    found = interpret(
        str(definition.fd),
        given,
        cutlass_dtype=DTYPES[halves.pop()] if len(halves) == 1 else "BFloat16",
    )
    for got, want, v in zip(found, outputs, fusion.outputs, strict=True):
        assert not isinstance(want, Quantized)
        compare(got.view(torch.uint8) if v.type.dtype == "u8" else got, want, fusion)


def compare(got: torch.Tensor, want: torch.Tensor, fusion: Fusion) -> None:
    """Integers exactly; floats within their roundings, and those of the weights and products where
    there are any.
    """
    assert got.dtype == want.dtype
    if not want.is_floating_point() or want.element_size() == 1:
        got, want = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (got, want))
        assert torch.equal(got, want)
        return
    eps = max(torch.finfo(want.dtype).eps, 1e-5)  # the text has six digits of each constant
    products = sum(op.kind.role == "grouped" for op in fusion.ops)
    # each rounds its weights and its result to 16 bits; a quantized activation may then take the
    # next code
    if products:
        eps = (
            2.0**-7 * products * (8 if any(op.kind.name == "quantize" for op in fusion.ops) else 1)
        )
    finite = want.double()[want.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    torch.testing.assert_close(
        got.double(), want.double(), rtol=2 * eps, atol=2 * eps * largest, equal_nan=True
    )


def _of_product(v: Value, fusion: Fusion) -> bool:
    return v in fusion.producers and fusion.producers[v].kind.role == "grouped"
