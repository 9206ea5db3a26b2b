"""grouped_mm and fused_experts with weights of every encoding: against plain torch, eager and
compiled, with derivatives.
"""

import pytest
import torch
from torch.library import opcheck

import fusion_moe
from fusion_moe.encodings import ENCODINGS, dequantize, quantize
from fusion_moe.layouts import LAYOUTS
from fusion_moe.nn import swiglu

ops = torch.ops.fusion_moe
E, H, I, T, K = 4, 64, 128, 9, 2
FORMATS = ["nvfp4", "mxfp4", "int4", "fp8_channel", "fp8_tensor", "bf16", "f16", "f32"]


def weight(encoding: str, *shape: int, seed: int = 0):
    return quantize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8,
        encoding=ENCODINGS[encoding],
    )


def tokens(dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(T, E, generator=g).argsort(-1)[:, :K]
    return torch.randn(T, H, generator=g).to(dtype), ids, torch.rand(T, K, generator=g)


def by_hand(x, ids, w, gate_up, down, gate_up_bias=None):
    """In float64, on dequantized weights."""
    gu, d = (dequantize(q).double() for q in (gate_up, down))
    out = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for e, p in zip(ids[t].tolist(), w[t].double(), strict=True):
            y = gu[e] @ x[t].double() + (0 if gate_up_bias is None else gate_up_bias[e].double())
            gate, up = y.chunk(2)
            out[t] += p * (d[e] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("encoding", FORMATS)
@pytest.mark.parametrize("target", ["reference", "auto"])
def test_experts(encoding, target):
    x, ids, w = tokens()
    gate_up, down = weight(encoding, E, 2 * I, H), weight(encoding, E, H, I, seed=2)
    bias = torch.randn(E, 2 * I, generator=torch.Generator().manual_seed(5)).bfloat16()
    with fusion_moe.options.override(target=target):
        got = ops.fused_experts(x, ids, w, gate_up, down, bias, weight_format=encoding)
    want = by_hand(x, ids, w, gate_up, down, bias)
    assert (got.double() - want).norm() < 8e-3 * want.norm()


def test_named_operations_are_the_general_ones():
    x, ids, w = tokens()
    gate_up, down = weight("nvfp4", E, 2 * I, H), weight("nvfp4", E, H, I, seed=2)
    general = ops.fused_experts(
        x, ids, w, gate_up, down, activation=swiglu(interleave=8, limit=2.0), weight_format="nvfp4"
    )
    assert torch.equal(
        general,
        ops.expert_mlp(x, ids, w, *gate_up, *down, activation=swiglu(interleave=8, limit=2.0)),
    )
    a, offs = torch.randn(7, H).bfloat16(), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    assert torch.equal(
        ops.grouped_mm(a, gate_up, offs, weight_format="nvfp4"),
        ops.nvfp4_grouped_mm(a, *gate_up, offs),
    )


@pytest.mark.parametrize("encoding", ["mxfp4", "int4", "bf16"])
def test_prepared_weights_compute_the_same(encoding):
    """The layout of CUDA's kernels, which the reference reads too."""
    q = weight(encoding, E, 2 * I, H)
    a, offs = (
        torch.randn(7, H, generator=torch.Generator().manual_seed(1)).bfloat16(),
        torch.tensor([2, 2, 5, 6], dtype=torch.int32),
    )
    stored = LAYOUTS["w16x64"].pack(*q, encoding=ENCODINGS[encoding])
    with fusion_moe.options.override(target="reference"):
        want = ops.grouped_mm(a, list(q), offs, weight_format=encoding)
        assert torch.equal(
            ops.grouped_mm(a, stored, offs, weight_format=encoding, weight_layout="w16x64"), want
        )


@pytest.mark.parametrize("encoding", ["mxfp4", "fp8_channel"])
def test_compiled(encoding):
    gate_up, down = weight(encoding, E, 2 * I, H), weight(encoding, E, H, I, seed=2)

    def layer(x, ids, w):
        return (
            ops.fused_experts(x * 2, ids, w, list(gate_up), list(down), weight_format=encoding) + x
        )

    call = tokens()
    got = torch.compile(layer, backend="fusion_moe", fullgraph=True)(*call)
    torch.testing.assert_close(got, layer(*call), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("encoding", ["mxfp4", "f32"])
def test_opcheck(encoding):
    a, offs = torch.randn(7, H, requires_grad=True), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # torch's allclose, which that calls, knows no e8m0
    utils += ["test_schema"] if encoding != "mxfp4" else []
    opcheck(
        ops.grouped_mm.default,
        (a, list(weight(encoding, E, 96, H)), offs),
        {"weight_format": encoding},
        test_utils=utils,
    )
