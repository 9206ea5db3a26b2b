"""benchmarks/cpu_moe.py: what other packages are given."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_moe.encodings import MXFP4, NVFP4, Quantized, dequantize, quantize

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import cpu_ggml
import cpu_moe
import ggml_library

SMALL = cpu_moe.Model("small", 256, 256, 8, 3)
# ggml's table, of halves
FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)


def decoded(blocks: Tensor, q: Quantized) -> Tensor:
    """What ggml's dequantize_row_mxfp4 and _nvfp4 make of rows; times the scale of the matrix."""
    if q.encoding is MXFP4:
        scales, codes, of_matrix = (
            *blocks.unflatten(-1, (-1, 17)).split((1, 16), -1),
            torch.ones(len(blocks)),
        )
        scales = torch.exp2(scales.float() - 127)
    else:
        scales, codes, of_matrix = (
            *blocks.unflatten(-1, (-1, 36)).split((4, 32), -1),
            q.decode_scale,
        )
        scales = scales.contiguous().view(torch.float8_e4m3fn).float()
    codes = codes.unflatten(-1, (scales.shape[-1], -1)).int()
    values = FP4[torch.cat((codes & 15, codes >> 4), -1)] * (scales / 2)[..., None]
    return values.flatten(2) * of_matrix[:, None, None]


@pytest.mark.parametrize("encoding", [NVFP4, MXFP4], ids=lambda e: e.name)
def test_blocks_of_ggml_are_the_same_numbers(encoding):
    each = [
        quantize(torch.randn(5, 192, generator=torch.Generator().manual_seed(i)), encoding=encoding)
        for i in range(3)
    ]
    q = each[0].of(torch.stack(parts) for parts in zip(*each, strict=True))
    blocks = cpu_ggml.blocks(q)
    assert blocks.shape == (3, 5, 192 // 32 * 17 if encoding is MXFP4 else 192 // 64 * 36)
    torch.testing.assert_close(decoded(blocks, q), dequantize(q), rtol=1e-6, atol=0)


def test_ggml_computes_the_layer():
    try:
        ggml = cpu_moe.Ggml()
    except ImportError as error:
        pytest.skip(str(error))
    copies = {e: [cpu_moe.random_weights(e, SMALL)] * 2 for e in (NVFP4, MXFP4)}
    found, missing = cpu_moe.peers(cpu_moe.of_ggml(ggml), copies, [])
    assert [c.name for c in found] == [
        "ggml, nvfp4, int8",
        "ggml, mxfp4, int8",
        "ggml, Q4_0, int8",
        "ggml, Q4_K, int8",
        "ggml, Q4_K in tiles, int8",
    ]
    assert not missing
    for tokens in (1, 40):
        (call,) = cpu_moe.calls(SMALL, tokens, 1)
        cpu_moe.check(found, {e: (call, cpu_moe.exact(w[0], *call)) for e, w in copies.items()})
    ggml.rest()
    # rows of no whole number of NVFP4's blocks there, nor of Q4_K's
    odd = cpu_moe.Model("odd", 160, 96, 8, 3)
    found, missing = cpu_moe.peers(
        cpu_moe.of_ggml(ggml), {e: [cpu_moe.random_weights(e, odd)] for e in (NVFP4, MXFP4)}, []
    )
    assert [c.name for c in found] == ["ggml, mxfp4, int8", "ggml, Q4_0, int8"]
    assert len(missing) == 3


def test_ggml_that_is_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("GGML_LIBRARIES", str(tmp_path))
    monkeypatch.setattr(ggml_library, "load", ggml_library.load.__wrapped__)
    assert cpu_moe.installed(cpu_moe.Ggml) is None
    assert "peer ggml: " in (said := capsys.readouterr().out)
    assert "benchmarks/cpu_ggml.py says how to install it" in said


@dataclass
class Pretended:
    name: str = "other"
    version: str = "1"
    workers: tuple[int, ...] = ()

    def rest(self) -> None:
        pass


def test_kernels_that_a_package_has_not():
    def make(message: str | None, copies: Any) -> list[Any]:
        if message:
            raise ValueError(message)
        return list(copies)

    kernels = [
        cpu_moe.Kernel(Pretended(), name, name, e, partial(make, message), 0.1)
        for name, e, message in (("a", NVFP4, None), ("b", NVFP4, "odd sizes"), ("c", MXFP4, None))
    ]
    found, missing = cpu_moe.peers(kernels, {NVFP4: [1, 2]}, [])
    assert [(c.name, c.copies) for c in found] == [("other, a", [1, 2])]
    assert missing == ["other, b"]
    assert cpu_moe.peers(kernels, {NVFP4: [1, 2]}, ["b"]) == ([], ["other, b"])
    with pytest.raises(ValueError, match="2 workers of other, expected one"):
        cpu_moe.clock([Pretended(workers=(1, 2))], 1)
