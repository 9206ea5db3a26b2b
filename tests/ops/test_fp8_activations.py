"""activation_format="fp8": rows are rounded to e4m3 with a power of two for 128 columns before each
product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from bad_calls import messages
from cover import examples
from fusions import assert_same_bits, evaluate, fusion_of_call
from hypothesis import given, strategies as st

import fusion_moe
from fusion_moe import NVFP4Config, options
from fusion_moe.arch import A100, H100, L40S
from fusion_moe.backends import TARGETS
from fusion_moe.encodings import (
    FP8,
    FP8_E8M0,
    FP8_ROWS,
    MXFP4,
    NVFP4,
    Quantized,
    dequantize,
    find,
    quantize,
)
from fusion_moe.errors import UnsupportedError
from fusion_moe.nn import Experts, add_lora_
from fusion_moe.passes import PASSES
from fusion_moe.target import check_formats

OPS = torch.ops.fusion_moe
E, H, I, T, SLOTS = 4, 192, 160, 7, 2


def rounded(x: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(x, FP8_ROWS))


def layer(encoding: str = "nvfp4") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        list(quantize(torch.randn(E, *shape, generator=g) * 0.1, find(encoding)))
        for shape in ((2 * I, H), (H, I))
    )


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=g).bfloat16()
    return x, torch.randint(0, E, (T, SLOTS), generator=g), torch.rand(T, SLOTS, generator=g)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    w: torch.Tensor,
    weights: Sequence[Sequence[torch.Tensor]],
    encoding: str = "nvfp4",
    **how: object,
) -> torch.Tensor:
    with options.override(target="reference"):
        return OPS.fused_experts(
            x, ids, w, *weights, weight_format=encoding, activation_format="fp8", **how
        )


@pytest.mark.parametrize("encoding", [NVFP4, MXFP4, FP8, FP8_E8M0], ids=lambda e: e.name)
def test_a_product_is_that_of_the_rounded_numbers(encoding):
    g = torch.Generator().manual_seed(0)
    x, offs = torch.randn(9, 160, generator=g), torch.tensor([4, 4, 7], dtype=torch.int32)
    w = quantize(torch.randn(3, 24, 160, generator=g), encoding)
    with options.override(target="reference"):
        y = OPS.grouped_mm(x, list(w), offs, weight_format=encoding.name, activation_format="fp8")
    for group, (start, end) in enumerate(((0, 4), (4, 4), (4, 7))):
        assert torch.equal(y[start:end], rounded(x[start:end]) @ dequantize(w)[group].T)
    assert not y[7:].any()


def test_both_products_of_experts_round_their_rows():
    (x, ids, w), weights = inputs(), layer()
    gate_up, down = (dequantize(Quantized(*parts, encoding=NVFP4)) for parts in weights)
    wanted = torch.zeros(T, H)
    for t in range(T):
        for slot in range(SLOTS):
            e = ids[t, slot]
            gate, up = (rounded(x[t : t + 1]) @ gate_up[e].T).bfloat16().float().chunk(2, -1)
            h = (torch.nn.functional.silu(gate) * up).bfloat16()
            wanted[t] += (w[t, slot] * (rounded(h) @ down[e].T).bfloat16().float())[0]
    with options.override(contract_rounding=False):
        assert torch.equal(experts(x, ids, w, weights), wanted.bfloat16())


def test_kernels_get_codes_and_scales_of_rows_that_are_quantized_once():
    (x, ids, w), weights = inputs(), layer()
    how = {"weight_format": "nvfp4", "activation_format": "fp8"}
    fusion = fusion_of_call("fused_experts", x, ids, w, *weights, **how)
    tensors = x, ids, w, *weights[0], *weights[1]
    before = evaluate(fusion, *tensors)
    for run in PASSES:
        fusion = run(fusion, TARGETS["cuda"]).verify()
        assert_same_bits(evaluate(fusion, *tensors), before)
    quantized = [op for op in fusion.ops if op.kind.name == "quantize"]
    assert quantized[0].values[0] is fusion.inputs[0]  # tokens, before they are gathered
    products = [op for op in fusion.ops if op.kind.name == "grouped_mm"]
    assert len(quantized) == len(products) == 2
    for product in products:
        rows = fusion.producers[product.values[0]]
        assert (rows.kind.name, rows.outputs[0].type.dtype) == ("pack", "fp8_rows")


@examples(0.7)
@given(
    st.integers(0, 2**16),
    st.lists(
        st.tuples(
            st.integers(0, T - 1),
            st.integers(0, H - 1),
            st.sampled_from((math.nan, math.inf, -math.inf)),
        ),
        max_size=3,
    ),
)
def test_non_finite_rows_stay_so_and_others_never_see_them(seed, bad):
    (x, ids, w), weights = inputs(seed), layer()
    clean = experts(x, ids, w, weights)
    for row, column, value in bad:
        x[row, column] = value
    y, rows = experts(x, ids, w, weights), {row for row, *_ in bad}
    for t in range(T):
        assert y[t].isnan().all() if t in rows else torch.equal(y[t], clean[t])


def test_zeros_and_large_numbers():
    (x, ids, w), weights = inputs(), layer()
    x[0], x[1] = 0, 3e38
    y = experts(x, ids, w, weights)
    assert not y[0].any()
    assert torch.equal(y[2:], experts(*inputs(), weights)[2:])


def test_where_it_runs(golden):
    (x, ids, w), weights = inputs(), layer()
    how = {"activation_format": "fp8"}
    given = x, [torch.randn(1, H, 8).bfloat16()], torch.tensor([T], dtype=torch.int32)
    cases = {
        "on a CPU": lambda: OPS.fused_experts(x, ids, w, *weights, weight_format="nvfp4", **how),
        "transposed": lambda: OPS.grouped_mm(*given, weight_format="bf16", transposed=True, **how),
        "on an A100": lambda: check_formats(TARGETS["cuda"], "fp8", "", A100),
    }
    golden(messages(cases))
    for gpu, of in ((A100, "bf16"), (L40S, "fp8"), (H100, "fp8")):
        check_formats(TARGETS["cuda"], of, "", gpu)


@pytest.mark.parametrize("encoding", [FP8, FP8_E8M0], ids=lambda e: e.name)
def test_weights_whose_last_block_is_short(encoding):
    """By kernels for CPUs, with activations in 16 bits."""
    (x, ids, w), weights = inputs(), layer(encoding.name)
    found = OPS.fused_experts(x, ids, w, *weights, weight_format=encoding.name)
    with options.override(target="reference"):
        wanted = OPS.fused_experts(x, ids, w, *weights, weight_format=encoding.name)
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)


def test_modules_and_their_config():
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(E, 2 * I, H, generator=g), torch.randn(E, H, I, generator=g)
    module = fusion_moe.nn.NVFP4Experts.from_float(*weights, NVFP4Config("fp8").activation_format)
    x, ids, w = inputs()
    with options.override(target="reference"):
        packed = module(x, ids, w)
        fusion_moe.prepare_(module, weights="fp8")
        y = module(x, ids, w)
        module.activation_format = "bf16"
        of_bf16 = module(x, ids, w)
        fusion_moe.prepare_(module, weights="packed")
        assert torch.equal(module(x, ids, w), packed)  # rows beside packed weights stay
    error = (y - of_bf16).float().norm() / of_bf16.float().norm()
    assert 0.01 < error < 0.08


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "beside adapters"])
def test_gradients_are_those_without_rounding_rows(adapted):
    """Beside adapters a gradient reaches rows in a second way, so none that is missing is noticed
    by what it does not reach.
    """
    gate_up, down = (Quantized(*parts, encoding=FP8) for parts in layer("fp8"))
    module = Experts(gate_up, down)
    if adapted:
        add_lora_(module, rank=8)
        torch.nn.init.normal_(module.gate_up_lora.B, std=0.01)
    x, ids, w = inputs()
    found = []
    for form in ("bf16", "fp8"):
        module.activation_format = form
        leaf = x.float().requires_grad_()
        with options.override(target="reference"):
            module(leaf, ids, w).sum().backward()
        found.append(leaf.grad)
    assert 0 < (found[1] - found[0]).norm() < 0.1 * found[0].norm()


def test_rows_in_nvfp4_have_no_gradient():
    x, ids, w = inputs()
    how = {"weight_format": "nvfp4", "activation_format": "nvfp4"}
    y = x.float().requires_grad_()
    with (
        options.override(target="reference"),
        pytest.raises(UnsupportedError, match="the derivative of quantizing to nvfp4"),
    ):
        OPS.fused_experts(y, ids, w, *layer(), **how).sum().backward()
