"""Weights in few bits that are read as FP8: what requantizing rounds, which numbers kernels read,
and that state dicts never see it.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from bad_calls import messages

import fusion_moe
from fusion_moe import NVFP4Config, options, prepare_
from fusion_moe.encodings import (
    FP8,
    FP8_E8M0,
    INT4,
    MXFP4,
    NVFP4,
    Quantized,
    dequantize,
    find,
    quantize,
)
from fusion_moe.encodings.requantized import requantizable, requantize
from fusion_moe.errors import OptionError
from fusion_moe.nn import Experts, add_lora_, merge_lora_, update_weights_
from fusion_moe.nn.frozen import adaptable

E, H, I, T, SLOTS = 4, 160, 192, 6, 2


def module(encoding=NVFP4, activation_format: str = "bf16", scale: float = 1) -> Experts:
    g = torch.Generator().manual_seed(0)
    gate_up, down = (
        torch.randn(E, *shape, generator=g) * 0.1 * scale for shape in ((2, I, H), (H, I))
    )
    up = quantize(gate_up, encoding)
    joined = Quantized(
        *(t if part.of_matrix else t.flatten(1, 2) for part, t in up.named()), encoding=encoding
    )
    return Experts(joined, quantize(down, encoding), activation_format)


def inputs(tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=g).bfloat16()
    return (
        x,
        torch.randint(0, E, (tokens, SLOTS), generator=g),
        torch.rand(tokens, SLOTS, generator=g),
    )


def of_numbers(experts: Experts) -> Experts:
    """The same experts with requantized weights as the only ones they have."""
    parts = [
        Quantized(*experts.requantized_of(p).parts, encoding=FP8_E8M0) for p in ("gate_up", "down")
    ]
    return Experts(*parts, experts.activation_format)


# Requantizing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spread", "exact"), [(0, True), (14, True), (16, False), (30, False)])
def test_mxfp4_is_exact_where_a_block_spans_few_powers_of_two(spread, exact):
    """By scales of one block of 128 x 128 that are 2^0 and 2^-spread; others are exact."""
    scales = torch.full((256, 10), 127, dtype=torch.uint8)
    scales[3, 2] = 127 - spread
    codes = torch.full((256, 160), 0x77, dtype=torch.uint8)  # 6
    codes[3, 32:48] = 0x11  # 0.5
    w = Quantized(codes, scales.view(torch.float8_e8m0fnu), encoding=MXFP4)
    made, count = requantize(w)
    assert count[:2].tolist() == [6 if exact or spread < 12 else 5, 6]
    assert torch.equal(dequantize(made), dequantize(w)) == (count[0] == 6)
    assert (count[2] == 0) == (count[0] == 6)


@pytest.mark.parametrize("encoding", [NVFP4, INT4], ids=lambda e: e.name)
def test_other_scales_are_rounded_once_more(encoding):
    g = torch.Generator().manual_seed(0)
    w = quantize(torch.randn(2, 256, 320, generator=g), encoding)
    made, (exact, blocks, error, weight) = requantize(w)
    assert made.encoding == FP8_E8M0
    assert (exact, blocks) == (0, 2 * 2 * 3)
    assert 0.015 < (error / weight).sqrt() < 0.03
    assert (dequantize(made) - dequantize(w)).norm() ** 2 == pytest.approx(float(error), rel=1e-4)


def test_gate_and_up_share_no_block():
    w = torch.ones(1, 2 * 96, 128)
    w[:, 96:] = 2.0**-12
    made, count = requantize(quantize(w, MXFP4), runs=2)
    assert torch.equal(dequantize(made), w)
    assert count[:2].tolist() == [2, 2]


def test_what_cannot_be_requantized():
    assert [e.name for e in (NVFP4, MXFP4, INT4, FP8, find("bf16")) if requantizable(e)] == [
        "nvfp4",
        "mxfp4",
        "int4",
    ]
    experts = module(FP8)
    prepare_(experts, weights="fp8")  # FP8 is read as it is
    assert experts.weights == "packed"
    assert experts.reading is None


def test_rows_that_must_not_depend_on_the_batch():
    with options.override(order="row"):
        prepare_(module(), weights="fp8")
        with pytest.raises(OptionError, match='weights = "both" with order = "row"'):
            prepare_(module(), weights="both")


def test_explain_says_what_was_rounded():
    experts = module()
    prepare_(experts, weights="both")
    report = fusion_moe.explain(experts, *inputs())
    assert report.requantized.startswith("1 x weights in nvfp4")
    assert "rounded once more" in " ".join(str(report).split())
    assert fusion_moe.explain(module(), *inputs()).requantized == ""


# The policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [NVFP4, MXFP4, INT4], ids=lambda e: e.name)
def test_products_read_what_was_requantized(encoding):
    experts = module(encoding, "fp8")
    prepare_(experts, weights="fp8")
    with options.override(target="reference"):
        assert torch.equal(experts(*inputs()), of_numbers(experts)(*inputs()))
    experts.activation_format = "bf16"
    assert torch.equal(experts(*inputs()), of_numbers(experts)(*inputs()))  # by kernels


def test_both_reads_by_the_number_of_rows(monkeypatch):
    monkeypatch.setattr(adaptable, "FROM", 3)
    experts, packed = module(), module()
    prepare_(experts, weights="both")
    assert torch.equal(experts(*inputs(5)), packed(*inputs(5)))
    assert torch.equal(experts(*inputs(6)), of_numbers(experts)(*inputs(6)))
    experts.activation_format = "fp8"  # which has no use beside packed weights
    assert torch.equal(experts(*inputs(5)), packed(*inputs(5)))
    with options.override(target="reference"):
        assert torch.equal(experts(*inputs(6)), of_numbers(experts)(*inputs(6)))
    experts.activation_format = "bf16"
    prepare_(experts, weights="packed")
    assert torch.equal(experts(*inputs(6)), packed(*inputs(6)))
    assert not experts._non_persistent_buffers_set & experts._buffers.keys()


@pytest.mark.parametrize("weights", ["fp8", "both"])
def test_state_dicts_have_what_was_loaded(weights):
    experts, packed = module(), module()
    prepare_(experts, weights=weights)
    found, wanted = experts.state_dict(), packed.state_dict()
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(t.view(torch.uint8), found[n].view(torch.uint8)) for n, t in wanted.items()
    )
    other = {name: t.clone() for name, t in wanted.items()}
    other["down_decode_scale"] *= 2
    before = [t.data_ptr() for t in experts.requantized_of("down").parts]
    experts.load_state_dict(other)
    packed.load_state_dict(other)
    prepare_(packed, weights="fp8")
    assert [t.data_ptr() for t in experts.requantized_of("down").parts] == before
    for p in ("gate_up", "down"):
        assert all(
            map(torch.equal, experts.requantized_of(p).parts, packed.requantized_of(p).parts)
        )


def test_weights_that_change_are_requantized_again():
    g = torch.Generator().manual_seed(5)
    new = {"down_proj": torch.randn(E, H, I, generator=g)}
    experts, packed = module(), module()
    prepare_(experts, weights="fp8")
    for each in (experts, packed):
        update_weights_(each, new)
    prepare_(packed, weights="fp8")
    assert torch.equal(experts(*inputs()), packed(*inputs()))
    model = torch.nn.ModuleDict({"experts": experts})
    add_lora_(model, rank=4)
    torch.nn.init.normal_(model["experts"].down_lora.B)
    with_adapter = experts(*inputs())
    merge_lora_(model, requantize=True)
    error = (experts(*inputs()) - with_adapter).float().norm() / with_adapter.float().norm()
    assert error < 0.2
    assert torch.equal(experts(*inputs()), of_numbers(experts)(*inputs()))


@pytest.mark.parametrize("way", ["written", "set", "for a call", "tied"])
def test_weights_that_change_by_torch_are_requantized_again(way):
    experts, other = module(), module(scale=3)
    prepare_(experts, weights="fp8")
    prepare_(other, weights="fp8")
    first, wanted = experts(*inputs()), other(*inputs())
    new, made = dict(other.named_parameters()), experts.requantized_of("down").parts
    if way == "for a call":
        assert torch.equal(torch.func.functional_call(experts, new, inputs()), wanted)
        assert torch.equal(experts(*inputs()), first)
        return
    if way == "tied":
        tied = copy.deepcopy(experts)
        tied._parameters.update(experts._parameters)
        update_weights_(tied, other.state_dict())
    for name, t in new.items() if way != "tied" else ():
        if way == "written":
            experts.get_parameter(name).copy_(t)
        else:
            setattr(experts, name, t)
    assert torch.equal(experts(*inputs()), wanted)
    again = experts.requantized_of("down").parts
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in made]


def test_weights_that_stay_are_not_requantized_again(monkeypatch):
    experts = module()
    prepare_(experts, weights="both")
    experts.order()
    monkeypatch.setattr(Experts, "renew", None)
    experts(*inputs())
    experts.reform(integers=True)
    experts.half()(*inputs())


def test_copies_and_casts_stay_requantized():
    experts = module()
    prepare_(experts, weights="fp8")
    wanted = experts(*inputs())
    for other in (copy.deepcopy(experts), copy.deepcopy(experts).half().bfloat16()):
        assert torch.equal(other(*inputs()), wanted)


def test_compiled():
    experts = module()
    prepare_(experts, weights="fp8")
    compiled = torch.compile(experts, backend="fusion_moe", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs()), experts(*inputs()), rtol=2**-6, atol=2**-6)


def test_what_it_says(caplog):
    model = torch.nn.Sequential(module(), module(MXFP4))
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        prepare_(model[0], weights="both")
        prepare_(model[1], weights="fp8")
    of_nvfp4, of_mxfp4 = (r.getMessage() for r in caplog.records)
    assert "1 x weights in nvfp4" in of_nvfp4
    assert "rounded once more, by 0.02" in of_nvfp4
    assert of_nvfp4.endswith("depend on how many rows are computed together")
    assert "1 x weights in mxfp4" in of_mxfp4
    assert of_mxfp4.endswith("exactly")


def test_refusals(golden):
    cases = {
        "what has one scale": lambda: requantize(quantize(torch.ones(128, 128), FP8)),
        "another way": lambda: prepare_(module(), weights="fp4"),
        "another way of a config": lambda: NVFP4Config(weights="int8"),
    }
    golden(messages(cases))
