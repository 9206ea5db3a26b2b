"""Weights in the order of CUDA's kernels, on a CPU, where the reference decodes every order: by
`prepare_`, or at the first call, if the CPU's kernels read it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from experts import as_bytes, copied, experts, routed, same_state

import fusion_moe
from fusion_moe import backends, options
from fusion_moe.encodings import NVFP4, Quantized
from fusion_moe.errors import NonFiniteError, ShapeError
from fusion_moe.integrations.distributed.shares import keep_features
from fusion_moe.layouts import LAYOUTS, W16X64, W16x64
from fusion_moe.nn import GroupedSwiGLU, NVFP4GroupedLinear, QuantizedLinear
from fusion_moe.nn.frozen import weight
from fusion_moe.nn.frozen.packed import PackedModule

E, H, I = 3, 64, 96


@pytest.fixture
def pretended(monkeypatch):
    cpu = backends.TARGETS["cpu"]
    other = backends.backend_of(cpu), replace(cpu, weight_layout="w16x64")
    monkeypatch.setitem(backends._registered, "cpu", other)


def call(module) -> torch.Tensor:
    return module(*routed(E, H))


def test_the_first_call_orders_and_state_dicts_stay_linear(pretended):
    module = experts(E, H, I)
    before, copies = module.state_dict(), copied(module)
    with options.override(order_weights=False):
        want = call(module)
    assert module.weight_layout == "linear"
    torch.testing.assert_close(call(module), want, rtol=2e-2, atol=2e-2)
    assert module.weight_layout == "w16x64"
    assert same_state(before, copies)  # what was read before is as it was
    assert same_state(module.state_dict(), copies)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_without_gradients(pretended, mode):
    module = experts(E, H, I)
    with mode():
        call(module)
    assert module.weight_layout == "w16x64"
    call(module)


def test_every_module_with_encoded_weights(pretended):
    layers = GroupedSwiGLU.from_float(*(torch.ones(E, I, H) for _ in range(2)), torch.ones(E, H, I))
    layers(torch.ones(3, H).bfloat16(), torch.tensor([1, 2, 3], dtype=torch.int32))
    assert {m.weight_layout for m in layers.modules() if isinstance(m, PackedModule)} == {"w16x64"}
    one = QuantizedLinear(
        experts(1, H, I).weight_of("down").of(t[0] for t in experts(1, H, I).weight_of("down"))
    )
    one(torch.ones(2, I).bfloat16())
    assert one.weight_layout == "w16x64"


def test_what_moves_orders(pretended):
    with torch.device("meta"):
        module = experts(E, H, I)
    assert module.weight_layout == "linear"
    assert module.to_empty(device="cpu").weight_layout in ("linear", "w16x64")
    real = experts(E, H, I)
    fusion_moe.prepare_(real, "cuda")
    assert real.bfloat16().weight_layout == "w16x64"  # the same device
    assert real.to("meta").weight_layout == "linear"


def test_tracing_leaves_them(pretended):
    module = experts(E, H, I)
    torch.export.export(
        module,
        (torch.zeros(5, H).bfloat16(), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)),
    )
    assert module.weight_layout == "linear"
    with torch.no_grad():
        fusion_moe.explain(
            module,
            torch.zeros(5, H).bfloat16(),
            torch.zeros(5, 2, dtype=torch.long),
            torch.ones(5, 2),
        )
    assert module.weight_layout == "linear"


def test_on_a_cpu_nothing_happens():
    module = experts(E, H, I)
    call(module)
    assert module.weight_layout == "linear"


def test_shares_of_features_are_cut_from_the_linear_layout(pretended):
    module, ordered = experts(E, H, I), experts(E, H, I)
    fusion_moe.prepare_(ordered, "cuda")
    for m in (module, ordered):
        keep_features(m, 1, 2)
    states = [
        {key: pieces.of_rank for key, pieces in m.state_dict().items()} for m in (ordered, module)
    ]
    assert same_state(*states)
    call(ordered)
    assert ordered.weight_layout == "w16x64"


def test_without_memory_they_stay_linear(pretended, monkeypatch, caplog):
    def full(*_):
        raise torch.OutOfMemoryError("no memory for the weights")

    module = experts(E, H, I)
    want = module.state_dict()
    monkeypatch.setattr(weight, "empty", full)
    call(module)
    assert module.weight_layout == "linear"
    assert same_state(module.state_dict(), want)
    assert (
        "weights stay in the linear layout: NVFP4Experts: no memory for the weights" in caplog.text
    )


def test_threads_wait_for_the_first_call(pretended):
    want = call(experts(E, H, I))
    module = experts(E, H, I)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, want) for y in pool.map(call, [module] * 8))


def test_every_byte_comes_back():
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 32, 2).view(2, 64, 256)
    scales = codes[..., :32].contiguous()
    there = W16X64.pack(codes, scales.view(torch.float8_e4m3fn), encoding=NVFP4)
    assert not any(
        as_bytes(a).equal(as_bytes(b)) for a, b in zip(there, (codes, scales), strict=True)
    )
    for a, b in zip(W16X64.unpack(*there, encoding=NVFP4), (codes, scales), strict=True):
        assert as_bytes(a).equal(as_bytes(b))


def test_scales_that_are_numbers_keep_their_order():
    """As bf16x2 of the kernels: byte * 16 + 0x6F80, the bits of a bfloat16, is the scale times
    2^119.
    """
    codes, numbers = torch.zeros(112, 32, dtype=torch.uint8), torch.arange(1, 113).byte()
    scales = numbers.repeat(4, 1).T.contiguous().view(torch.float8_e4m3fn)
    stored = W16X64.pack(codes, scales, encoding=NVFP4)[1].view(torch.uint8)
    number = (stored.int() * 16 + 0x6F80).to(torch.int16).view(torch.bfloat16).double() * 2.0**-119
    assert torch.equal(number.flatten().sort().values, scales.double().flatten().sort().values)


def test_sizes_off_the_tile_are_refused():
    with pytest.raises(ShapeError, match="N = 24 is not a multiple of 16, or K = 64 not of 64"):
        LAYOUTS["w16x64"].pack(torch.zeros(2, 24, 32, dtype=torch.uint8), encoding=NVFP4)


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
    before = copied(module)
    real, calls = type(W16X64).pack, []

    def pack(self, codes, scales, **of):
        calls.append(codes)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, codes, scales, **of)

    monkeypatch.setattr(type(W16X64), "pack", pack)
    with pytest.raises(KeyboardInterrupt):
        fusion_moe.prepare_(module, "cuda")
    assert module.weight_layout == "linear"
    assert same_state(module.state_dict(), before)
