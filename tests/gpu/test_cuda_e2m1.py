"""Weights rounded to NVFP4 and MXFP4 by our kernels: the bits of torch's operations on the GPU."""

from __future__ import annotations

import pytest
import torch
from fusions import ODD_SCALES, RULES_OF_E2M1, assert_same_bits, weights_to_round

from fusion_moe.compile import program_of
from fusion_moe.encodings import MXFP4, NVFP4, find, quantize
from fusion_moe.layouts import LAYOUTS
from fusion_moe.nn.frozen.base import _program
from fusion_moe.nn.frozen.weight import rounded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("layout", "n", "k"), [("linear", 21, 96), ("linear", 33, 2080), ("w16x64", 48, 320)]
)
@pytest.mark.parametrize(("encoding", "rule"), RULES_OF_E2M1, ids=str)
def test_codes_and_scales_are_those_of_the_encoding(encoding, rule, layout, n, k, dtype):
    x, encoding = weights_to_round(len(ODD_SCALES), n, k).to(dtype).cuda(), find(encoding)
    x[-1, 5, 5] = torch.inf
    chosen = [None]
    if encoding is NVFP4:
        chosen += [ODD_SCALES.cuda(), ODD_SCALES.flip(0).cuda()]
    for scale in chosen:
        source = _program(n, k, dtype, encoding.name, layout, scale is not None, rule)
        assert [kernel.why for kernel in program_of(source, x.device).kernels] == [""]
        found = rounded(x, encoding, 1, scale, layout, rule)
        want = quantize(x, encoding, scale, rule)
        assert_same_bits(
            [t.cpu() for t in found],
            [t.cpu() for t in LAYOUTS[layout].pack(*want, encoding=encoding)],
        )


@pytest.mark.parametrize("encoding", [NVFP4, MXFP4], ids=lambda e: e.name)
def test_gate_and_up_have_scales_of_their_own(encoding):
    x = torch.randn(130, 64, 256, device="cuda").bfloat16()
    x[:, 32:] *= 3
    found = rounded(x, encoding, 2)
    want = quantize(x.unflatten(1, (2, 32)), encoding)
    parts = [
        t if part.of_matrix else t.flatten(1, 2)
        for part, t in zip(encoding.parts, want, strict=True)
    ]
    assert_same_bits([t.cpu() for t in found], [t.cpu() for t in parts])
    if encoding is NVFP4:
        assert found.decode_scale.shape == (130, 2)
