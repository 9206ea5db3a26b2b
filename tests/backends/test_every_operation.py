"""Every operation of the IR has a kernel on a CPU or a GPU, or docs/ir.md says why it has none."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest

from fusion_moe.backends import TARGETS, emit
from fusion_moe.compile import lower
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.kinds import KINDS
from fusion_moe.options import Options
from tests.ir.test_what_verifies import programs

pytestmark = [pytest.mark.once, pytest.mark.slow]
DOCS = Path(__file__).parents[2] / "docs/ir.md"
TRIED = 40  # programs of an operation


def by_kernels(fusion: Fusion, target: str) -> bool:
    """Whether nothing of a program is computed in plain torch. None stores a value in several
    parts.
    """
    if any(v.type.quantized for v in fusion.outputs):
        return False
    segments = lower(fusion, TARGETS[target], Options()).segments
    kernels = [emit(segment, TARGETS[target]) for segment in segments]
    return all(kernel.backend != "reference" for kernel in kernels)


def test_every_operation_has_a_kernel_or_a_reason():
    without = {
        name
        for name in KINDS
        if not any(
            by_kernels(fusion, target)
            for fusion in islice(programs(name), TRIED)
            for target in ("cpu", "cuda")
        )
    }
    (section,) = re.findall(r"## Operations without a kernel.*", DOCS.read_text(), re.DOTALL)
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert without == {name for row in rows for name in re.findall(r"`(\w+)`", row)}
