"""Activations of experts that are variants of SwiGLU, found by their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fusion_moe.nn.convert.gates import Swiglu, swiglu_of


class Gate(nn.Module):
    """silu(gate) * up"""

    has_gate, is_concatenated = True, True

    def __init__(self, act_fn=F.silu):
        super().__init__()
        self.act_fn = act_fn
        self.gate_up_proj = nn.Parameter(torch.empty(2, 32, 16))

    def halves(self, y):
        return y.chunk(2, -1) if self.is_concatenated else (y[..., ::2], y[..., 1::2])

    def _apply_gate(self, y):
        gate, up = self.halves(y)
        return self.act_fn(gate) * up


class Clamped(Gate):
    swiglu_limit = 10.0

    def _apply_gate(self, y):
        gate, up = self.halves(y)
        return self.act_fn(gate.clamp(max=self.swiglu_limit)) * up.clamp(
            -self.swiglu_limit, self.swiglu_limit
        )


class GptOss(Gate):
    is_concatenated, alpha, limit = False, 1.702, 7.0

    def _apply_gate(self, y):
        gate, up = self.halves(y)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class UpClampedFromAbove(Clamped):
    def _apply_gate(self, y):
        gate, up = self.halves(y)
        return self.act_fn(gate.clamp(max=self.swiglu_limit)) * up.clamp(max=self.swiglu_limit)


class LimitByNoName(Gate):
    def _apply_gate(self, y):
        return super()._apply_gate(y.clamp(max=1000.0))


class Gelu(Gate):
    def __init__(self):
        super().__init__(F.gelu)


class NeedsMore(Gate):
    def _apply_gate(self, y):
        return super()._apply_gate(y) * self.gate_up_proj[0, 0, :8]


class Ungated(Gate):
    has_gate = False


CASES = {
    Gate: Swiglu(0, None, 1.0, 0.0),
    Clamped: Swiglu(0, 10.0, 1.0, 0.0),
    GptOss: Swiglu(1, 7.0, 1.702, 1.0),
    UpClampedFromAbove: None,
    LimitByNoName: None,
    Gelu: None,
    Ungated: None,
}


@pytest.mark.parametrize("gate", CASES, ids=lambda c: c.__name__)
def test_found(gate):
    assert swiglu_of(gate()) == CASES[gate]


@pytest.mark.parametrize("without_memory", [lambda: torch.device("meta"), FakeTensorMode])
def test_weights_without_memory(without_memory):
    for number, (gate, want) in enumerate(CASES.items()):
        with without_memory():
            # a class of its own: nothing is remembered of it
            module = type(gate.__name__, (gate,), {"number": number})()
            assert swiglu_of(module) == want
        assert swiglu_of(module) == want


def test_what_needs_weights_is_another_activation():
    with torch.device("meta"):
        module = NeedsMore()
    assert swiglu_of(module) is None


def test_functions_of_one_class_with_other_numbers_are_told_apart():
    class Scaled(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            return F.silu(x) * self.by

    assert swiglu_of(Gate(Scaled(1.0))) == Swiglu(0, None, 1.0, 0.0)
    assert swiglu_of(Gate(Scaled(2.0))) is None


def test_numbers_of_an_instance_count():
    module = Clamped()
    module.swiglu_limit = 3.0
    assert swiglu_of(module) == Swiglu(0, 3.0, 1.0, 0.0)


class OfConfig(Gate):
    """Its numbers are not its own."""

    def __init__(self, limit):
        super().__init__()
        self.config = {"limit": limit}

    def _apply_gate(self, y):
        gate, up = self.halves(y)
        limit = self.config["limit"]
        return self.act_fn(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def test_nothing_is_remembered_of_another_module():
    assert swiglu_of(OfConfig(1e6)) == Swiglu(0, None, 1.0, 0.0)
    assert swiglu_of(OfConfig(7.0)) is None
