"""prepare_: weights in the order of a target's kernels, on the CPU, where the reference decodes
every order.
"""

from __future__ import annotations

import pytest
import torch
from experts import experts

import fusion_moe
from fusion_moe.encodings import NVFP4, Quantized
from fusion_moe.errors import NonFiniteError, ShapeError
from fusion_moe.layouts import LAYOUTS, W16X64, W16x64
from fusion_moe.nn import NVFP4GroupedLinear

E, H, I = 3, 128, 64


def call(module, hidden: int = H) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return module(
        torch.randn(7, hidden, generator=g).bfloat16(),
        torch.randint(0, E, (7, 2), generator=g),
        torch.rand(7, 2, generator=g),
    )


def same_bytes(a, b) -> bool:
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True)
    )


def test_every_byte_comes_back():
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 32, 2).view(2, 64, 256)
    scales = (
        torch.arange(256, dtype=torch.uint8).repeat(2, 8).view(2, 64, 32)[:, :, :32].contiguous()
    )
    there = W16X64.pack(codes, scales.view(torch.float8_e4m3fn), encoding=NVFP4)
    assert not same_bytes(there, (codes, scales))
    assert sorted(there[1].view(torch.uint8).flatten().tolist()) == sorted(
        scales.flatten().tolist()
    )
    assert same_bytes(W16X64.unpack(*there, encoding=NVFP4), (codes, scales))


def test_scales_that_are_numbers_keep_their_order():
    """As bf16x2 of the kernels: byte * 16 + 0x6F80, the bits of a bfloat16, is the scale times
    2^119.
    """
    scales = (
        torch.arange(1, 113, dtype=torch.uint8)
        .repeat(4, 1)
        .T.contiguous()
        .view(torch.float8_e4m3fn)
    )
    stored = W16X64.pack(torch.zeros(112, 32, dtype=torch.uint8), scales, encoding=NVFP4)[1].view(
        torch.uint8
    )
    number = (stored.int() * 16 + 0x6F80).to(torch.int16).view(torch.bfloat16).double() * 2.0**-119
    assert torch.equal(number.flatten().sort().values, scales.double().flatten().sort().values)


def test_sizes_off_the_tile_are_refused():
    with pytest.raises(ShapeError, match="N = 24 is not a multiple of 16, or K = 64 not of 64"):
        LAYOUTS["w16x64"].pack(torch.zeros(2, 24, 32, dtype=torch.uint8), encoding=NVFP4)


def test_a_prepared_module_computes_the_same():
    module = experts(E, H, I)
    want = call(module)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    fusion_moe.prepare_(module, "cuda")
    assert module.weight_layout == "w16x64"
    torch.testing.assert_close(call(module), want, rtol=2e-2, atol=2e-2)
    state = module.state_dict()
    assert same_bytes(state.values(), before.values())
    fusion_moe.prepare_(module, "cpu")
    assert module.weight_layout == "linear"
    assert same_bytes(module.state_dict().values(), before.values())


def test_a_state_dict_is_loaded_into_the_layout_there_is():
    module, other = experts(E, H, I), experts(E, H, I)
    for p in other.parameters():
        p.view(torch.uint8).zero_()
    fusion_moe.prepare_(other, "cuda")
    other.load_state_dict(module.state_dict())
    assert other.weight_layout == "w16x64"
    assert same_bytes(other.state_dict().values(), module.state_dict().values())


def test_another_kind_of_device_takes_the_linear_layout():
    module = experts(E, H, I)
    fusion_moe.prepare_(module, "cuda")
    assert module.bfloat16().weight_layout == "w16x64"  # the same device
    assert module.to("meta").weight_layout == "linear"


def test_what_was_read_before_stays_linear():
    module = experts(E, H, I)
    before, copies = (
        module.state_dict(),
        {name: t.clone() for name, t in module.state_dict().items()},
    )
    fusion_moe.prepare_(module, "cuda")
    assert same_bytes(before.values(), copies.values())


def test_what_has_no_order_stays_linear_and_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(W16x64, "why_not", lambda *_: "nvfp4 has no order")
    model = torch.nn.ModuleDict({"a": experts(E, H, I), "b": experts(E, H, I)})
    fusion_moe.prepare_(model, "cuda")
    assert model["a"].weight_layout == "linear"
    (record,) = caplog.records
    assert record.getMessage() == (
        "weights stay in the linear layout: a and 1 more: nvfp4 has no order"
    )


def test_negative_scales_are_refused():
    weight = Quantized(
        torch.zeros(2, 16, 32, dtype=torch.uint8),
        torch.full((2, 16, 4), -1.0).to(torch.float8_e4m3fn),
        torch.ones(2),
        encoding=NVFP4,
    )
    model = torch.nn.ModuleDict({"layer": NVFP4GroupedLinear(weight)})
    with pytest.raises(
        NonFiniteError,
        match=r"layer: 0 NaN and 128 negative .* of weight_scale "
        r"\[2, 16, 4\], the first at \(0, 0, 0\)",
    ):
        fusion_moe.prepare_(model, "cuda")
    assert model["layer"].weight_layout == "linear"


def test_what_is_interrupted_is_undone(monkeypatch):
    module = experts(E, H, I)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    real, calls = type(W16X64).pack, []

    def pack(self, codes, scales, **of):
        calls.append(codes)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, codes, scales, **of)

    monkeypatch.setattr(type(W16X64), "pack", pack)
    with pytest.raises(KeyboardInterrupt):
        fusion_moe.prepare_(module, "cuda")
    assert module.weight_layout == "linear"
    assert same_bytes(module.state_dict().values(), before.values())
