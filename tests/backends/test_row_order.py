"""order="row" on CPUs: a row has the same bits whatever other rows there are, and whether gradients
are wanted. What cannot promise that refuses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from cover import few
from cpu_tiers import TIERS
from row_order import changed, tokens
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.errors import OptionError, UnsupportedError
from fusion_moe.nn import Experts, add_lora_
from fusion_moe.runtime import build

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("amx"), pytest.mark.slow]
EXPERTS, SLOTS, HIDDEN, INNER = 4, 2, 288, 96  # no whole number of a kernel's runs of K
COUNTS = (1, 3, 9, 24, 60, 250)  # of other rows
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer(
    encoding: str, hidden: int = HIDDEN, inner: int = INNER, experts: int = EXPERTS
) -> Experts:
    g = torch.Generator().manual_seed(0)
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    floats = [torch.randn(shape, generator=g) / 8 for shape in shapes]
    return Experts(*(quantize(w.bfloat16(), ENCODINGS[encoding]) for w in floats))


def batch(dtype: torch.dtype, hidden: int = HIDDEN, experts: int = EXPERTS):
    slots = min(SLOTS, experts)
    return lambda count, seed: tokens(count, experts, slots, hidden, dtype, seed)


def forward(layer: Experts):
    def call(*rows: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return [layer(*rows)]

    return call


def with_gradients(layer: Experts):
    """Results, and gradients of rows and of the router's weights."""

    def call(x: Tensor, ids: Tensor, w: Tensor) -> Sequence[Tensor]:
        given = [t.detach().requires_grad_() for t in (x, w)]
        y = layer(given[0], ids, given[1])
        return [y.detach(), *torch.autograd.grad(y, given, torch.cos(torch.arange(HIDDEN) + y * 0))]

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_a_row_does_not_depend_on_others(tier, dtype):
    with options.override(order="row", cpu_isa=tier):
        assert not changed(forward(layer("nvfp4")), batch(dtype), COUNTS)


def test_in_free_order_it_does():
    """Or the test above tests nothing."""
    with options.override(order="free", cpu_isa=TIERS[0]):
        assert changed(forward(layer("nvfp4")), batch(torch.float32), COUNTS)


@pytest.mark.parametrize("encoding", few(["mxfp4", "int4", "fp8", "bf16"], 2))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_with_weights_of_any_encoding(encoding, dtype):
    with options.override(order="row"):
        assert not changed(forward(layer(encoding, 384, 128)), batch(dtype, 384), COUNTS)


@pytest.mark.parametrize("experts", few([1, 4, 64], 2))
@pytest.mark.parametrize("encoding", few([n for n, e in ENCODINGS.items() if e.axis == -1], 2))
def test_among_any_number_of_rows(encoding, experts):
    """Up to thousands, and so from one row for an expert to all rows."""
    counts = 4095, *random.Random(f"{encoding} {experts}").sample(range(1, 4095), 5)
    made, rows = layer(encoding, 384, 128, experts), batch(torch.bfloat16, 384, experts)
    with options.override(order="row"):
        assert not changed(forward(made), rows, counts)


def test_where_only_some_blocks_have_scales_in_range():
    made = layer("nvfp4")
    least, next_one = (torch.tensor(2.0**e).to(torch.float8_e4m3fn) for e in (-9, -8))
    made.gate_up_proj_scale.data[1, 40:43] = least
    made.down_proj_scale.data[2, ::50] = least
    made.down_proj_scale.data[3] = next_one
    with options.override(order="row"):
        for dtype in DTYPES[:2]:
            assert not changed(forward(made), batch(dtype), COUNTS)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_gradients_of_rows(dtype):
    with options.override(order="row"):
        assert not changed(with_gradients(layer("nvfp4")), batch(dtype), COUNTS)


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_forward_of_training_has_the_bits_of_inference(dtype, adapters):
    """Which saves other values, and so may have other kernels; by one token at a time."""
    made = layer("nvfp4")
    if adapters:
        add_lora_(made, rank=4)
        for name, p in made.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(p, std=0.05)
    x, ids, w = batch(dtype)(40, 0)
    with options.override(order="row"):
        trained = made(x.requires_grad_(), ids, w.requires_grad_())
        assert trained.requires_grad
        alone = [forward(made)(x[i : i + 1], ids[i : i + 1], w[i : i + 1])[0] for i in range(40)]
    assert torch.equal(trained, torch.cat(alone))


def test_explain_says_it():
    rows = batch(torch.bfloat16)(5, 0)
    with options.override(order="row"):
        text = str(fusion_moe.explain(layer("nvfp4"), *rows))
    assert "for cpu, no row changes another one's bits" in text


def test_targets_that_cannot_promise_it_refuse():
    made, rows = layer("nvfp4"), batch(torch.bfloat16)(5, 0)
    sentence = "the target 'reference' with order='row'.*one of cpu, cuda, or order='free'"
    how = options.override(order="row", target="reference")
    with how, pytest.raises(UnsupportedError, match=sentence):
        made(*rows)


def test_nothing_runs_in_plain_torch(monkeypatch):
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(build, "warn_of_no_compiler", lambda: None)
    made, rows = layer("nvfp4", 64, 32), batch(torch.bfloat16, 64)(5, 0)
    sentence = "order='row' for .*, which has no kernel here"
    with options.override(order="row"), pytest.raises(UnsupportedError, match=sentence):
        made(*rows)


def test_other_orders_are_refused():
    with pytest.raises(OptionError, match="option order = 'rows'.*one of free, row"):
        options.override(order="rows").__enter__()
