"""What modules with quantized weights say of a call that does not fit, in the words of who calls
them; nothing is computed before.
"""

from __future__ import annotations

import pytest
import torch
from bad_calls import messages
from torch import nn

from fusion_moe import options
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.errors import OptionError
from fusion_moe.nn import (
    CustomExperts,
    NVFP4Experts,
    NVFP4GroupedLinear,
    QuantizedLinear,
    quantize_,
)
from fusion_moe.nn.frozen.experts import quantize_gate_up

E, H, I, T, K = 4, 64, 32, 6, 2


class Gate(nn.Module):
    """What is between the products of CustomExperts."""

    has_gate = is_concatenated = True

    def _apply_gate(self, y):
        gate, up = y.chunk(2, -1)
        return gate.relu() * up


GATE_UP, DOWN = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
X, IDS, W = torch.randn(T, H), torch.zeros(T, K, dtype=torch.int64), torch.rand(T, K)
OFFS = torch.tensor([1, 2, 4, 6], dtype=torch.int32)
EXPERTS = NVFP4Experts.from_float(GATE_UP, DOWN)
CUSTOM = CustomExperts(quantize_gate_up(GATE_UP), quantize(DOWN, NVFP4), Gate())
GROUPED = NVFP4GroupedLinear.from_float(GATE_UP)
LINEAR = QuantizedLinear(quantize(GATE_UP[0], NVFP4))


def with_gradient(experts):
    experts.gate_up_decode_scale.requires_grad_()
    try:
        experts(X, IDS, W).sum().backward()
    finally:
        experts.gate_up_decode_scale.requires_grad_(False)


def calls_of(experts):
    """Bad calls of a module of experts."""
    return {
        "other features": lambda: experts(torch.randn(T, 128), IDS, W),
        "features of one row, flattened": lambda: experts(torch.randn(T * H), IDS, W),
        "a scalar": lambda: experts(X[0, 0], IDS, W),
        "float64": lambda: experts(X.double(), IDS, W),
        "integers": lambda: experts(X.int(), IDS, W),
        "x elsewhere": lambda: experts(X.to("meta"), IDS.to("meta"), W.to("meta")),
        "ids elsewhere": lambda: experts(X, IDS.to("meta"), W),
        "ids in float": lambda: experts(X, IDS.float(), W),
        "ids in int16": lambda: experts(X, IDS.short(), W),
        "ids and weights in each other's place": lambda: experts(X, W, IDS),
        "weights of other experts a token": lambda: experts(X, IDS, W[:, :1]),
        "ids of other tokens": lambda: experts(X, IDS[:3], W[:3]),
        "ids of one dimension": lambda: experts(X, IDS[:, 0], W[:, 0]),
    }


BAD = {
    **{f"experts: {name}": bad for name, bad in calls_of(EXPERTS).items()},
    **{f"custom experts: {name}": bad for name, bad in calls_of(CUSTOM).items()},
    "grouped: other features": lambda: GROUPED(torch.randn(T, 128), OFFS),
    "grouped: float64": lambda: GROUPED(X.double(), OFFS),
    "grouped: x elsewhere": lambda: GROUPED(X.to("meta"), OFFS),
    "grouped: long ends": lambda: GROUPED(X, OFFS.long()),
    "grouped: other groups": lambda: GROUPED(X, OFFS[:3]),
    "linear: other features": lambda: LINEAR(torch.randn(T, 128)),
    "linear: float64": lambda: LINEAR(X.double()),
    "linear: x elsewhere": lambda: LINEAR(X.to("meta")),
    "packed weights asked to train": lambda: EXPERTS.requires_grad_(),
    "a packed weight's scale asked to train": lambda: with_gradient(EXPERTS),
    "an unknown activation format": lambda: NVFP4Experts.from_float(GATE_UP, DOWN, "nvfp5"),
    "an unknown activation format of a layer": lambda: NVFP4GroupedLinear.from_float(
        GATE_UP, None, "fp4"
    ),
    "an unknown place of the scale": lambda: NVFP4Experts.from_float(
        GATE_UP, DOWN, scale_on="inputs"
    ),
    "weights of one expert": lambda: NVFP4Experts.from_float(GATE_UP[0], DOWN[0]),
    "weights as x @ weight takes them": lambda: NVFP4Experts.from_float(GATE_UP.mT, DOWN.mT),
    "weights of numpy": lambda: NVFP4Experts.from_float(GATE_UP.numpy(), DOWN.numpy()),
    "weights of integers": lambda: NVFP4Experts.from_float(GATE_UP.int(), DOWN),
    "weights whose K no block divides": lambda: NVFP4Experts.from_float(
        GATE_UP[..., :60], DOWN[:, :60]
    ),
    "a name in place of a model": lambda: quantize_("model"),
    "the result of quantize_ in place of a model": lambda: quantize_(None),
}


@pytest.fixture(autouse=True)
def in_plain_torch():
    with options.override(target="reference"):
        yield


def test_messages(golden):
    golden(messages(BAD))


@pytest.mark.parametrize(
    ("target", "todo"),
    [("cdua", "did you mean 'cuda'"), ("h100", "for a GPU, target='cuda', or .* gpu='h100'")],
)
def test_an_unknown_target_says_what_may_be_meant(target, todo):
    with (
        options.override(target=target),
        pytest.raises(OptionError, match=f"target '{target}'; expected one of .*; {todo}"),
    ):
        EXPERTS(X, IDS, W)


def test_the_calls_that_these_change_are_good():
    for experts in (EXPERTS, CUSTOM):
        assert experts(X, IDS, W).shape == experts(X.T.contiguous().T, IDS, W).shape == (T, H)
    assert GROUPED(X, OFFS).shape == LINEAR(X).shape == (T, 2 * I)
    assert not any(p.requires_grad for p in EXPERTS.requires_grad_(False).parameters())
