"""Weights that are no whole tiles of a layout, on the CPU: products by padded ones, state dicts,
adapters, derivatives.

All numbers are such that every sum is exact: of padded and unpadded weights the same bits come out.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from bad_calls import messages
from experts import same_state
from torch import Tensor, nn

import fusion_moe
from fusion_moe.encodings import ENCODINGS, INT4, MXFP4, NVFP4, Encoding, Quantized, dequantize
from fusion_moe.layouts import W16X64, Padding
from fusion_moe.nn import (
    CustomExperts,
    Experts,
    NVFP4GroupedLinear,
    QuantizedLinear,
    add_lora_,
    merge_lora_,
    swiglu,
)
from fusion_moe.nn.frozen.packed import PackedModule

E, T, TOP_K = 3, 5, 2
SIZES = [(64, 96), (64, 144), (80, 48)]  # hidden and intermediate features


def weight(encoding: Encoding, *shape: int, runs: int = 0) -> Quantized:
    """Small numbers: all codes but NaN, scales of one."""
    *lead, n, k = shape
    g = torch.Generator().manual_seed(n + k)
    codes = torch.randint(
        0, 256, encoding.part_shape(encoding.parts[0], lead, n, k), dtype=torch.uint8, generator=g
    )
    scales = (
        torch.ones(encoding.part_shape(part, lead, n, k, runs)).to(part.dtype)
        for part in encoding.parts[1:]
    )
    codes = codes if encoding.element.bits == 4 else (codes % 127).view(encoding.element.dtype)
    return Quantized(codes, *scales, encoding=encoding)


def calls(hidden: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """One feature of each token, so large that silu(x) is x or 0."""
    g = torch.Generator().manual_seed(0)
    x = torch.zeros(T, hidden, dtype=dtype)
    x[range(T), torch.randint(0, hidden, (T,), generator=g)] = 128
    return x, torch.randint(0, E, (T, TOP_K), generator=g), torch.ones(T, TOP_K)


def experts(hidden: int, inner: int, encoding: Encoding = NVFP4, **kwargs) -> Experts:
    return Experts(
        weight(encoding, E, 2 * inner, hidden, runs=2), weight(encoding, E, hidden, inner), **kwargs
    )


def padded(module: PackedModule) -> PackedModule:
    """A copy in the layout of CUDA's kernels, whose weights are whole tiles of it."""
    other = copy.deepcopy(module)
    fusion_moe.prepare_(other, "cuda")
    assert other.weight_layout == "w16x64"
    assert any(form.padding for form in other.forms.values())
    for names in other.packed.values():
        *_, n, k = getattr(other, names[0]).shape
        assert W16X64.why_not(n, other.encoding.elements(k), other.encoding) == ""
    assert same_state(module.state_dict(), other.state_dict())
    assert repr(other) == repr(module).replace("linear'", "w16x64'")
    return other


def same_results(module: nn.Module, other: nn.Module, *args: Tensor) -> None:
    with fusion_moe.options.override(target="reference"):
        want = module(*args)
        assert want.isfinite().all()
        assert want.any()
        found = other(*args)
        assert found.shape == want.shape
        assert found.is_contiguous()
        assert torch.equal(found, want)


@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_experts(hidden, inner):
    module = experts(hidden, inner)
    other = padded(module)
    same_results(module, other, *calls(hidden))
    fusion_moe.prepare_(other, "cpu")
    assert not any(form.padding for form in other.forms.values())
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("encoding", [MXFP4, INT4], ids=lambda e: e.name)
def test_experts_in_other_encodings(encoding):
    module = experts(64, 96, encoding)
    same_results(module, padded(module), *calls(64))


@pytest.mark.parametrize("interleave", [0, 1, 16])
def test_biases_and_rows_in_turns(interleave):
    up, down = torch.randint(-2, 3, (E, 192)) * 64.0, torch.randint(-3, 4, (E, 80)).float()
    parts = weight(NVFP4, E, 192, 80), weight(NVFP4, E, 80, 96)
    module = Experts(
        *parts, gate_up_bias=up, down_bias=down, activation=swiglu(interleave, 512.0, up_offset=1.0)
    )
    same_results(module, padded(module), *calls(80))


def test_blocks_in_turns_that_tiles_would_break_stay_linear():
    module = Experts(
        weight(NVFP4, E, 192, 64), weight(NVFP4, E, 64, 96), activation=swiglu(interleave=48)
    )
    fusion_moe.prepare_(module, "cuda")
    assert module.weight_layout == "linear"
    assert module.why_not(W16X64) == "128 features, which tiles need, are no whole blocks of 48"


def test_scales_of_rows_stay_linear():
    module = NVFP4GroupedLinear(weight(NVFP4, E, 24, 64, runs=24))
    assert module.why_not(W16X64) == (
        "weight has scales for 24 runs of its 24 rows, which are no whole tiles"
    )


class Relu(nn.Module):
    """What transformers describes of experts with a gate."""

    has_gate, is_concatenated = True, True

    def _apply_gate(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return (gate.relu() + 1) * up


def test_a_function_of_the_model_sees_no_padding():
    module = CustomExperts(weight(NVFP4, E, 96, 80, runs=2), weight(NVFP4, E, 80, 48), Relu())
    same_results(module, padded(module), *calls(80))


@pytest.mark.parametrize("runs", [0, 2])
@pytest.mark.parametrize(("n", "k"), [(40, 64), (48, 80), (6, 1008)])
def test_linear_layers(n, k, runs):
    offs = torch.tensor([2, 2, T], dtype=torch.int32)
    module = NVFP4GroupedLinear(weight(NVFP4, E, n, k, runs=runs), torch.ones(E, n))
    same_results(module, padded(module), calls(k)[0], offs)
    one = QuantizedLinear(weight(NVFP4, n, k), torch.ones(n))
    same_results(one, padded(one), calls(k)[0][:, None])


def test_a_state_dict_is_padded_when_it_is_loaded():
    module, other = experts(80, 96), experts(80, 96)
    for p in other.parameters():
        p.view(torch.uint8).zero_()
    other = padded(other)
    other.load_state_dict(module.state_dict())
    assert same_state(module.state_dict(), other.state_dict())


@pytest.mark.parametrize("inner", [80, 128])
def test_a_state_dict_of_other_sizes_is_refused_in_its_own_sizes(inner):
    other = padded(experts(64, 96))
    want = (
        rf"gate_up_proj: copying a param with shape torch.Size\(\[3, {2 * inner}, 32\]\) .* "
        r"model is torch.Size\(\[3, 192, 32\]\)"
    )
    with pytest.raises(RuntimeError, match=want):
        other.load_state_dict(experts(64, inner).state_dict())


def test_features_of_another_size_are_refused_in_the_sizes_of_the_weights(golden):
    module, layer = padded(experts(80, 96)), padded(NVFP4GroupedLinear(weight(NVFP4, E, 40, 80)))
    offs = torch.tensor([1, 2, T], dtype=torch.int32)
    golden(
        messages(
            {f"experts, {k}": partial(module, *calls(k)) for k in (64, 128)}
            | {f"a linear layer, {k}": partial(layer, calls(k)[0], offs) for k in (64, 128)}
        )
    )


@pytest.mark.parametrize("interleave", [0, 1])
def test_adapters_and_gradients(interleave):
    module = Experts(
        weight(NVFP4, E, 192, 80),
        weight(NVFP4, E, 80, 96),
        activation=swiglu(interleave=interleave),
    )
    add_lora_(module, rank=2, alpha=2)
    for adapter in (module.gate_up_lora, module.down_lora):
        adapter.A.data, adapter.B.data = (
            torch.randint(-1, 2, p.shape).float() for p in (adapter.A, adapter.B)
        )
    other = padded(module)
    found = []
    for m in (module, other):
        x, ids, w = calls(80)
        x.requires_grad_()
        with fusion_moe.options.override(target="reference"):
            y = m(x, ids, w)
            y.sum().backward()
        found.append([y, x.grad, *(p.grad for p in m.parameters() if p.requires_grad)])
    assert len(found[0]) == 6
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
    assert torch.equal(found[0][0], found[1][0])
    merge_lora_(other, requantize=True)
    assert other.weight_layout == "w16x64"
    merge_lora_(module, requantize=True)
    assert same_state(module.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    "encoding",
    [*map(ENCODINGS.get, ("nvfp4", "mxfp4", "int4", "fp8_channel", "fp8_tensor"))],
    ids=lambda e: e.name,
)
def test_what_is_added_is_zero(encoding):
    w = weight(encoding, 2, 12, 32)
    padding = Padding((12, 32), (32, 64), 2)
    wide = Quantized(*padding.pack(*w, encoding=encoding), encoding=encoding)
    rows = dequantize(wide).view(2, 2, 16, 64)
    assert torch.equal(rows[:, :, :6, :32].reshape(2, 12, 32), dequantize(w))
    assert not rows[:, :, 6:].any()
    assert not rows[..., 32:].any()
    stored = W16X64.pack(*wide, encoding=encoding)
    back = padding.unpack(*W16X64.unpack(*stored, encoding=encoding), encoding=encoding)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(back, w, strict=False)
    )
