"""Type rules of pointwise operations accept what the reference computes, and nothing else: every
kind, dtype and number.
"""

from __future__ import annotations

import math

import pytest
import torch

from fusion_moe import FusionDefinition
from fusion_moe.errors import Error
from fusion_moe.ir.kinds import KINDS, pointwise
from fusion_moe.ir.types import DTYPES, STORED

NUMBERS = (True, 0, -1, 2, 300, 2**40, 1e30, 1e300, 0.5, -0.0, math.inf, math.nan)
NAMES = [kind.name for kind in pointwise.TABLE if kind.name != "cast"]


def rule(name, operands):
    """The dtype that the rule gives, None if it refuses."""
    fd = FusionDefinition()
    values = [fd.define_tensor(shape=[3], dtype=o) if isinstance(o, str) else o for o in operands]
    try:
        return getattr(fd.ops, name)(*values).type.dtype
    except Error:
        return None


def reference(name, operands):
    """The dtype of what the reference computes of tensors and numbers."""
    values = [torch.ones(3, dtype=DTYPES[o]) if isinstance(o, str) else o for o in operands]
    (found,) = KINDS[name].evaluate(*values)
    return {v: k for k, v in DTYPES.items()}[found.dtype]


def operands_of(name):
    """Operands of every dtype, and of every dtype with each number at each place."""
    count = KINDS[name].signature.operands or 2
    lead = ["bool"] * (name == "where")
    count -= len(lead)
    for dtype in DTYPES:
        yield [*lead, *[dtype] * count]
        for at in range(count) if count > 1 else ():
            yield from ([*lead, *(n if i == at else dtype for i in range(count))] for n in NUMBERS)


# torch's are, of integers, another function, or none
FLOATS_ALONE = ("silu", "pow", "floor", "round")
MASKS_ALONE = ("logical_and", "logical_or", "logical_not")  # torch's look at whether a number is 0


@pytest.mark.parametrize("name", [n for n in NAMES if n not in (*FLOATS_ALONE, *MASKS_ALONE)])
def test_what_torch_computes_in_one_dtype_is_accepted(name):
    """Without promotion: of tensors of one dtype, to that dtype or to a mask."""
    # that is stored, and computed with in none
    for dtype in [d for d in DTYPES if d not in STORED]:
        operands = next(o for o in operands_of(name) if o[-1] == dtype)
        try:
            found = reference(name, operands)
        except (RuntimeError, TypeError):
            continue
        if found in (dtype, "bool"):
            assert rule(name, operands) == found, operands


@pytest.mark.parametrize("name", ["minimum", "maximum", "lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in STORED])
def test_numbers_are_rounded_to_the_dtype_of_the_tensors(name, dtype):
    """A number that a rule accepts means a tensor filled with it."""
    x = torch.tensor([0, 1, 0.1, 2, 5]).to(DTYPES[dtype])
    for number in (*NUMBERS, 0.1, 1 + 2**-12, 1e38):
        if rule(name, [dtype, number]) is not None:
            filled = torch.full(
                (), number, dtype=torch.float64 if isinstance(number, float) else torch.int64
            ).to(DTYPES[dtype])
            (found,), (want,) = (
                KINDS[name].evaluate(x, number),
                KINDS[name].evaluate(x, filled.expand(5)),
            )
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_arithmetic_is_that_of_float32_and_rounded_once(name, dtype):
    """The number is not rounded before."""
    x = torch.linspace(-3, 3, 257).to(DTYPES[dtype])
    for number in (0.1, 70.3):
        (found,), (want,) = KINDS[name].evaluate(x, number), KINDS[name].evaluate(x.float(), number)
        torch.testing.assert_close(found, want.to(DTYPES[dtype]), rtol=0, atol=0)
