"""Rows that travel between ranks in the codes that products read."""

from __future__ import annotations

import pytest
import torch
from fusions import assert_same_bits, fusion_of_call

from fusion_moe.backends import TARGETS, plan
from fusion_moe.compile import lower
from fusion_moe.distributed.collectives import Together
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.options import Options
from fusion_moe.passes import sink_quantize

E, H, I, T, K, RANKS = 4, 512, 64, 5, 2, 2
PEERS = torch.zeros(RANKS + 4, dtype=torch.int64)


def given(rank: int = 0, h: int = H):
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(T, E, generator=g).topk(K).indices
    return torch.randn(T, h, generator=g).bfloat16(), ids, torch.rand(T, K, generator=g)


def layer(h: int = H, rows: str = "fp8", **more):
    """The program of the first rank's experts."""
    g, each = torch.Generator().manual_seed(1), E // RANKS
    some = [quantize(torch.randn(each, *nk, generator=g) / 8, NVFP4) for nk in ((2 * I, h), (h, I))]
    how = {"peers": PEERS, "across": "g", "of_experts": E, "first_expert": 0, **more}
    return some, fusion_of_call(
        *("fused_experts", *given(h=h), *some),
        weight_format="nvfp4",
        activation_format=rows,
        **how,
    )


def sent(fusion):
    (op,) = (op for op in fusion.ops if op.kind.name == "dispatch")
    return [str(v.type.dtype) for v in op.values]


def test_each_row_is_quantized_by_its_own_rank():
    """To the same bits."""
    some, fusion = layer()
    made = sink_quantize(fusion, TARGETS["cuda"]).verify()
    kinds = [op.kind.name for op in made.ops]
    assert kinds.index("quantize") < kinds.index("dispatch")
    assert sent(made) == ["f8e4m3", "i64", "f32", "i64", "f32"]
    assert str(sink_quantize(made, TARGETS["cuda"])) == str(made)
    parts = [part for weight in some for part in weight]

    def of_rank(rank, f):
        inputs = {"bf16": given(rank)[0], "i64": given(rank)[1], "f32": given(rank)[2]}
        mine = [inputs[v.type.dtype] if len(v.type.shape) == 2 else None for v in f.inputs[:3]]
        return f.evaluate(*mine, *parts, PEERS)

    before, after = (
        Together(RANKS).run(lambda rank, f=f: of_rank(rank, f)) for f in (fusion, made)
    )
    for a, b in zip(before, after, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("h", "more"),
    [
        (H, {"rows": "bf16"}),
        (H - 128, {}),  # whose scales are no pieces of 16 bytes
        (H, {"scale_on": "input"}),  # rows are scaled before they are quantized
        (H, {"gate_up_lora_a": torch.zeros(2, 4, H), "gate_up_lora_b": torch.zeros(2, 2 * I, 4)}),
    ],
    ids=["bf16", "narrow", "scaled", "adapted"],
)
def test_rows_that_travel_as_they_are(h, more):
    fusion = layer(h, **more)[1]
    assert sink_quantize(fusion, TARGETS["cuda"]) is fusion


def test_where_no_product_reads_codes():
    fusion = layer()[1]
    assert sink_quantize(fusion, TARGETS["cpu"]) is fusion


def test_where_codes_have_no_kernel():
    found = lower(layer()[1], TARGETS["cuda"], Options()).segments
    (dispatch,) = (s.fusion for s in found if any(o.kind.name == "dispatch" for o in s.fusion.ops))
    assert "rows in codes have no kernel here" in str(plan(dispatch, TARGETS["cpu"], False))
