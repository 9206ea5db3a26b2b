"""Python's operators on values of a FusionDefinition."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import torch
from bad_calls import messages
from fusions import evaluate

from fusion_moe import FusionDefinition
from fusion_moe.errors import FusionError
from fusion_moe.ir.core import Value
from fusion_moe.ir.types import TensorType

X, Y = torch.tensor([-2.0, -0.5, 0.0, 1.0, 3.0]), torch.tensor([1.0, 2.0, 0.0, -1.0, 3.0])
FLOATS = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y,
    "-x": lambda x, y: -x,
    "abs": lambda x, y: abs(x),
    "x ** 2": lambda x, y: x**2,
    "numbers on the right": lambda x, y: ((x + 1) * 2.0 - 3.0) / 4,
    "numbers on the left": lambda x, y: 2 / (1.0 - 3 * (4 + y)),
    "numpy": lambda x, y: np.float32(2) * x + np.float64(1),
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= 0,
    ">": lambda x, y: y > 1.0,
    ">=": lambda x, y: x >= y,
    "masks": lambda x, y: (x > 0) & ~(y > 2) | (x < -1),
}


@pytest.mark.parametrize("name", FLOATS)
def test_they_are_those_of_torch(name):
    fd = FusionDefinition()
    fd.add_output(FLOATS[name](*(fd.from_pytorch(t) for t in (X, Y))))
    (found,) = evaluate(fd.fusion(), X, Y)
    torch.testing.assert_close(found, FLOATS[name](X, Y), equal_nan=True, rtol=0, atol=0)


def test_equality_is_identity():
    fd = FusionDefinition()
    x, y = (fd.from_pytorch(X) for _ in range(2))
    assert x == x != y
    assert [x in (x, y), y in (x, x), bool(x)] == [True, False, True]
    assert fd.count == 0


def test_messages_about_what_a_tensor_has(golden):
    fd = FusionDefinition()
    x = fd.from_pytorch(X)
    golden(
        messages(
            {
                "an index": lambda: x[:2],
                "unpacked": lambda: [*x],
                "a function of torch": lambda: torch.relu(x),
                "with a tensor": lambda: torch.maximum(x, torch.ones(5)),
                "of several": lambda: torch.cat([x, x]),
                "a method": lambda: x.float(),
                "an operation as a method": lambda: x.sigmoid(),
                "its shape": lambda: x.shape,
                "misspelt": lambda: fd.ops.rellu(x),
                "a method as an operation": lambda: fd.ops.float(x),
                "of several operations": lambda: fd.ops.clamp(x, 0.0, 1.0),
                "a dtype of torch": lambda: fd.ops.cast(x, dtype=torch.float32),
                "its name in torch": lambda: fd.ops.cast(x, dtype="bfloat16"),
            }
        )
    )
    assert [hasattr(x, name) for name in ("name", "float", "_x")] == [True, False, False]
    assert not hasattr(fd.ops, "rellu")
    assert copy(x).type == x.type
    assert fd.count == 0


def test_messages(golden):
    fd = FusionDefinition()
    x, other = fd.from_pytorch(X), FusionDefinition().from_pytorch(X)
    golden(
        messages(
            {
                "of another definition": lambda: x * other,
                "chained comparison": lambda: 0 < x < 1,
                "decision": lambda: 1 if x > 0 else 2,
                "torch's tensor": lambda: torch.ones(5) * x,
                "None": lambda: x + None,
                "floats as masks": lambda: x & x,
                "of no definition": lambda: -Value("v", TensorType((4,), "f32")),
            }
        )
    )
    with pytest.raises(TypeError, match="unsupported operand"):
        x @ x
    with pytest.raises(FusionError, match="another FusionDefinition"):
        2.0 * x + other
