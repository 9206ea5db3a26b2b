"""Calls after the first of their form: what is checked again, and what must not be taken from a
call before.
"""

from __future__ import annotations

import pytest
import torch
from ways import Called

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import NVFP4
from fusion_moe.errors import DtypeError, GroupsError, ShapeError, UnsupportedError
from fusion_moe.nn import NVFP4Experts, swiglu
from fusion_moe.runtime.remembered import Remembered

OPS = torch.ops.fusion_moe


def layer(seed: int = 0) -> NVFP4Experts:
    g = torch.Generator().manual_seed(seed)
    return NVFP4Experts.from_float(
        torch.randn(4, 64, 32, generator=g), torch.randn(4, 32, 32, generator=g)
    )


def call(tokens: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, 32, generator=g).bfloat16(),
        torch.randint(0, 4, (tokens, 2), generator=g),
        torch.rand(tokens, 2, generator=g),
    )


def reference(experts: NVFP4Experts, *token: torch.Tensor) -> torch.Tensor:
    with options.override(target="reference"):
        return experts(*token)


def test_calls_of_one_form_compute_what_they_are_given():
    """Other elements, other memory, other strides."""
    experts = [layer(seed) for seed in range(2)]
    for seed in range(3):
        x, ids, w = call(seed=seed)
        for e in experts:
            torch.testing.assert_close(e(x, ids, w), reference(e, x, ids, w), atol=0.05, rtol=0.02)
            wide = torch.stack([x, x], 1)
            assert e(wide[:, 0], ids.mT.contiguous().mT, w).equal(e(x, ids, w))


def test_leading_dimensions():
    experts, (x, ids, w) = layer(), call(6)
    want = experts(x, ids, w)
    for lead in ((6,), (2, 3), (3, 2), (2, 3), (1, 6)):
        assert experts(x.view(*lead, 32), ids, w).equal(want.view(*lead, 32))
    assert experts(x.view(2, 3, 32), ids.view(2, 3, 2), w).equal(want.view(2, 3, 32))


@pytest.mark.parametrize("lead", [(), (6,), (2, 3)])
def test_no_experts_add_nothing(lead):
    ids = torch.zeros(*lead, 0, dtype=torch.int64)
    assert layer()(torch.ones(*lead, 32), ids, ids.float()).equal(torch.zeros(*lead, 32))


def test_a_weight_that_was_changed_in_place_is_checked_again():
    experts, token = layer(), call()
    experts(*token)
    codes = experts.down_proj.data
    experts.down_proj.data = codes[:, :, :8].contiguous()
    with pytest.raises(ShapeError):
        experts(*token)
    with pytest.raises(UnsupportedError, match="data= with torch.int32 of codes"):
        experts.down_proj.data = torch.zeros(codes.shape, dtype=torch.int32)
    experts.down_proj.data = codes
    with pytest.raises(GroupsError):
        experts(token[0], token[1] + 4, token[2])


def test_other_arguments_and_options_are_part_of_a_form():
    experts, token = layer(), call()
    plain = experts(*token)
    experts.activation = swiglu(limit=0.25)
    limited = experts(*token)
    experts.activation = None
    assert not limited.equal(plain)
    assert experts(*token).equal(plain)
    with options.override(target="sm_100"), pytest.raises(UnsupportedError):
        experts(*token)
    assert experts(*token).equal(plain)


def test_strides_are_checked_where_they_matter():
    codes, block_scale, decode_scale = OPS.nvfp4_quantize(torch.randn(2, 128, 64))
    swizzled = fusion_moe.layouts.SF128X4.pack(codes, block_scale, decode_scale, encoding=NVFP4)[1]
    starts, padded = (
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([0, 128], dtype=torch.int32),
    )
    about = (
        decode_scale,
        starts,
        padded,
        torch.tensor([[3, 128, 64], [2, 128, 64]], dtype=torch.int32),
    )
    operation = OPS.f16a_nvfp4weight_scaled_grouped_mm
    a = torch.randn(5, 64).bfloat16()
    operation(a, codes.mT, swizzled, *about)
    with pytest.raises(ShapeError, match="strides"):
        operation(a, codes.mT.contiguous(), swizzled, *about)


def test_run_checks_each_form():
    fd = fusion_moe.FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    fd.add_output(fd.ops.mul(x, 2.0))
    text = str(fd.fusion())
    for rows in (3, 5, 3):
        x = torch.randn(rows, 4)
        assert OPS.run(text, [x], [rows])[0].equal(2 * x)
    for wrong, size, error in (
        (torch.randn(3, 5), 3, ShapeError),
        (torch.randn(3, 4).double(), 3, DtypeError),
        (torch.randn(3, 4), 4, ShapeError),
    ):
        with pytest.raises(error):
            OPS.run(text, [wrong], [size])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_dispatch_see_the_operation(mode):
    experts, token = layer(), call()
    with mode():
        want = experts(*token)
        with Called() as seen:
            got = experts(*token)
    assert got.equal(want)
    assert seen.names == ["fused_experts"]


def test_remembered_starts_anew_when_it_is_full():
    found = Remembered[int, int](2)
    for i in range(3):
        found[i] = i
    assert found == {2: 2}
