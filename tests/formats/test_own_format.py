"""A user's format is one file, without C++ (uint4_zero_points.py): operations, modules,
torch.compile, state dicts and kernels take it on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from uint4_zero_points import GROUP, UINT4

import fusion_moe
from fusion_moe import encodings, options
from fusion_moe.encodings import ROW, Quantized, check_parts, dequantize, quantize
from fusion_moe.errors import ShapeError
from fusion_moe.integrations.distributed.parallelize import _undividable
from fusion_moe.integrations.distributed.shares import keep_features
from fusion_moe.nn import Experts, QuantizedLinear, prepare_

pytestmark = pytest.mark.compiler
ops = torch.ops.fusion_moe
E, H, I, TOKENS = 3, 256, 128, 9


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    encodings.register(UINT4)
    yield
    encodings.unregister(UINT4.name)


def weight(*shape: int, seed: int = 0) -> Quantized:
    """Any codes and zero points; scales are powers of two, so that sums of products are exact."""
    g = torch.Generator().manual_seed(seed)
    *lead, k = shape
    codes = torch.randint(0, 256, (*lead, k // 2), generator=g, dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-5, -2, (*lead, k // GROUP), generator=g)
    zero = torch.randint(0, 16, (*lead, k // GROUP), generator=g, dtype=torch.uint8)
    return Quantized(codes, scale.half(), zero, encoding=UINT4)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(TOKENS, E, generator=g).argsort(1)[:, :2]
    x = torch.randint(-2, 3, (TOKENS, H), generator=g).bfloat16()
    return x, ids, 2.0 ** torch.randint(-2, 1, (TOKENS, 2), generator=g)


def backends(call, *args) -> set[str]:
    found = fusion_moe.explain(call, *args).fusions
    return {segment.backend for fusion in found for segment in fusion.segments}


def test_quantizing():
    x = torch.randn(5, 3 * GROUP) + 0.5
    q = quantize(x, encoding=UINT4)
    assert check_parts(q, UINT4) == x.shape
    step = q.block_scale.float().repeat_interleave(GROUP, -1)
    # half a step, for codes and for zero points, and what the scale's rounding moves the largest
    assert ((dequantize(q) - x).abs() <= 1.02 * step).all()
    only = dequantize(quantize(x.abs() + 1, encoding=UINT4))
    assert (only > 0).all()  # 0 is in each range, so no zero point is below 0
    assert not dequantize(quantize(torch.zeros(2, GROUP), encoding=UINT4)).any()
    with pytest.raises(ShapeError, match="K = 64; expected a multiple of 128"):
        quantize(torch.zeros(2, 64), encoding=UINT4)


@pytest.mark.parametrize("rows", [1, 4, 40, 300])
def test_a_product_is_exact(rows):
    w = weight(E, 70, H)
    x = torch.randint(-3, 4, (rows, H), generator=torch.Generator().manual_seed(rows)).float()
    ends = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32)

    def call(x):
        return ops.grouped_mm(x, list(w), ends, weight_format=UINT4.name)

    with options.override(target="reference"):
        want = call(x)
    assert torch.equal(call(x), want)
    assert backends(call, x) == {"cpu"}
    assert torch.equal(want[-1], x[-1] @ dequantize(w)[2].T)


def test_experts_in_eager_and_compiled(tmp_path):
    """Modules, compiled graphs, files and prepared weights compute the same."""
    gate_up, down = weight(E, 2 * I, H), weight(E, H, I, seed=2)
    args = tokens()
    module = Experts(gate_up, down)
    assert backends(module, *args) == {"cpu"}
    with options.override(target="reference"):
        want = module(*args)
    found = module(*args)
    torch.testing.assert_close(found, want, rtol=2**-7, atol=2**-7 * want.abs().max().item())
    assert torch.equal(torch.compile(module, backend="fusion_moe")(*args), found)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    other = Experts(*(q.of(map(torch.zeros_like, q)) for q in (gate_up, down)))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    prepare_(other)
    assert torch.equal(other(*args), found)
    names = ("gate_up_proj", "gate_up_proj_scale", "gate_up_proj_zero_point")
    assert [*module.state_dict()][:3] == [*names]


def test_tiles_of_cuda_and_back():
    """CUDA's order of tiles needs no word of the format, and state dicts stay canonical."""
    module = Experts(weight(E, 2 * I, H), weight(E, H, I))
    state = {name: t.clone() for name, t in module.state_dict().items()}
    prepare_(module, "cuda")
    assert module.weight_layout == "w16x64"
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    with options.override(target="reference"):
        assert torch.equal(
            module(*tokens()), Experts(weight(E, 2 * I, H), weight(E, H, I))(*tokens())
        )


def test_gradients_of_activations():
    w, ends = weight(E, 64, H), torch.tensor([2, 5, 9], dtype=torch.int32)
    x = torch.randn(9, H, requires_grad=True)
    made = []
    for target in ("cpu", "reference"):
        with options.override(target=target):
            y = ops.grouped_mm(x, list(w), ends, weight_format=UINT4.name)
            made += torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5 * made[1].abs().max().item())


def test_a_linear_layer():
    q = weight(64, H)
    layer = QuantizedLinear(q)
    x = torch.randint(-3, 4, (5, H)).float()
    assert torch.equal(layer(x), x @ dequantize(q).T)


def test_shares_of_features_keep_blocks_whole():
    """128 features are one block, and a row of down is one if it has one scale."""
    scales = tuple(replace(scale, block=ROW) for scale in UINT4.scales)
    rows = encodings.register(replace(UINT4, name="uint4_rows", scales=scales))
    try:
        for encoding, inner, step in ((UINT4, 256, 128), (UINT4, 128, 128), (rows, 256, 256)):
            g = torch.Generator().manual_seed(0)
            shapes = (E, 2 * inner, H), (E, H, inner)
            made = (quantize(torch.randn(*s, generator=g), encoding=encoding) for s in shapes)
            said = _undividable(Experts(*made), keep_features, 2)
            found, wanted = f"{inner} intermediate features for 2 ranks", f"{step} for each rank"
            assert said == (None if inner > step else (found, f"{wanted}, or a multiple of that"))
    finally:
        encodings.unregister(rows.name)
