"""Outputs that wait: the program now and those later give what the whole gives, each operation that
takes time in one of them.
"""

from __future__ import annotations

import pytest
import torch
from fusions import assert_same_bits, evaluate

from fusion_moe import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import differentiate
from fusion_moe.ir.text import one_line, parse
from fusion_moe.training.postponed import postponed

G, K, N = 3, 4, 5
FREE = ("ends", "partition", "reshape")


def layers() -> Fusion:
    """x [s0, K] through two layers with something elementwise between them, and their weights."""
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, K], dtype="f32")
    up, down = (
        fd.define_tensor(shape=[G, N, K], dtype="f32"),
        fd.define_tensor(shape=[G, K, N], dtype="f32"),
    )
    ends = fd.groups_of(fd.define_tensor(shape=[G], dtype="i32"), x.type.shape[0])
    inner = fd.ops.tanh(fd.ops.grouped_mm(fd.ops.partition(x, ends), up, ends))
    fd.add_output(fd.ops.grouped_mm(inner, down, ends))
    return fd.fusion()


def given() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(shape, generator=g) for shape in ((7, K), (G, N, K), (G, K, N)))
    return [x, up, down, torch.tensor([2, 2, 6], dtype=torch.int32)]


@pytest.mark.parametrize("wrt", [(0, 1, 2), (1, 2), (2,), (1,)])
def test_gradients_of_weights(wrt):
    derivative, tensors = differentiate(layers(), wrt), given()
    dy = torch.randn(7, K, generator=torch.Generator().manual_seed(1))
    inputs = [*derivative.read(tensors, evaluate(derivative.forward, *tensors)), dy]
    whole = derivative.backward
    want = evaluate(whole, *inputs)
    for waiting in ([i for i in wrt if i], [wrt[-1]], []):
        places = tuple(map(wrt.index, waiting))
        text, later = postponed(one_line(whole), places)
        now = parse(text)
        made = evaluate(now, *inputs) if now.outputs else ()
        found = dict(zip([i for i in range(len(wrt)) if i not in places], made, strict=False))
        for place, one in zip(places, later, strict=True):
            (found[place],) = evaluate(
                parse(one.program), *([*inputs, *made][i] for i in one.reads)
            )
        assert_same_bits([found[i] for i in range(len(wrt))], want)
        kinds = sorted(
            op.kind.name
            for f in (now, *(parse(one.program) for one in later))
            for op in f.ops
            if op.kind.name not in FREE
        )
        if len(places) < 2:
            assert kinds == sorted(op.kind.name for op in whole.ops if op.kind.name not in FREE)
