"""The option `check`: whether every pass and the segmentation keep a program's results bit for bit, on the inputs at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import FusionError
from ..ir.core import Fusion, Value
from ..segment import Segment


def check_stages(stages: Sequence[tuple[str, Fusion]], segments: Sequence[Segment], tensors: Sequence[Any], env: Mapping[str, int]) -> None:
    """FusionError with the first stage whose outputs are not bit for bit those of the stage before it."""
    want = stages[0][1].pure.evaluate(*tensors, sizes=env)
    for name, fusion in stages[1:]:
        _compare(name, fusion.pure.evaluate(*tensors, sizes=env), want)
    _compare("split", _run(segments, stages[-1][1], tensors, env), want)


def _run(segments: Sequence[Segment], fusion: Fusion, tensors: Sequence[Any], env: Mapping[str, int]) -> tuple[Any, ...]:
    made: dict[Value, Any] = dict(zip(fusion.inputs, tensors, strict=True))
    for s in segments:
        made.update(zip(s.outputs, s.fusion.evaluate(*(made[v] for v in s.inputs), sizes=env), strict=True))
    return tuple(made[v] for v in fusion.outputs)


def _compare(stage: str, got: Sequence[Any], want: Sequence[Any]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if not torch.equal(_bits(a), _bits(b)):
            raise FusionError(
                f"output {i} after {stage} differs",
                expected="the same bits as before it",
                todo="this is a bug in fusion_moe",
                where=stage,
            )


def _bits(x: torch.Tensor) -> torch.Tensor:
    """x as bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    return x.contiguous().unsqueeze(-1).view(torch.uint8)
