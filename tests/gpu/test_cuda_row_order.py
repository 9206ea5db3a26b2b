"""order="row" on a GPU: a row has the same bits whatever other rows there are, from one to
thousands, by small-M and by large-M kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from row_order import changed, tokens
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.nn import Experts, add_lora_, prepare_

pytestmark = pytest.mark.gpu
SLOTS = 2
# that have kernels, beside nvfp4
OTHERS = [name for name, e in ENCODINGS.items() if e.axis == -1 and name not in ("nvfp4", "f32")]
COUNTS = (1, 2, 5, 12, 20, 52, 100, 244, 500, 1000, 2000, 4000, 8180)  # of other rows


def layer(encoding: str, experts: int, hidden: int, inner: int, prepared: bool = True) -> Experts:
    g = torch.Generator().manual_seed(0)
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    floats = [torch.randn(shape, generator=g).bfloat16() / 8 for shape in shapes]
    made = Experts(*(quantize(w, ENCODINGS[encoding]) for w in floats)).cuda()
    if prepared:
        prepare_(made)
    return made


def batch(made: Experts, dtype: torch.dtype = torch.bfloat16):
    experts, hidden = made.gate_up_proj.shape[0], made.matrix_shape("down")[0]
    slots = min(SLOTS, experts)
    return lambda count, seed: tokens(count, experts, slots, hidden, dtype, seed)


def forward(made: Experts):
    def call(*rows: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return [made(*(t.cuda() for t in rows)).cpu()]

    return call


@pytest.fixture(autouse=True)
def _row_order():
    with options.override(order="row", order_weights=False):
        yield


@pytest.mark.parametrize(
    ("encoding", "dtype", "sizes"),
    [
        ("nvfp4", torch.bfloat16, (64, 512, 256)),  # groups by size have kernels of their own
        ("nvfp4", torch.bfloat16, (8, 448, 320)),  # K is in no whole stages
        ("nvfp4", torch.float16, (8, 512, 256)),
        ("nvfp4", torch.bfloat16, (1, 512, 256)),
        *((e, torch.float16 if e == "f16" else torch.bfloat16, (8, 512, 256)) for e in OTHERS),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_others(encoding, dtype, sizes):
    made = layer(encoding, *sizes)
    assert not changed(forward(made), batch(made, dtype), COUNTS)


@pytest.mark.needs("wgmma")
def test_nor_on_who_computes_heavy_groups():
    """Half of the tokens have the same experts, whose rows a large-M kernel computes beside a
    small-M one.
    """
    made = layer("nvfp4", 60, 512, 256)

    def heavy(count: int, seed: int) -> tuple[Tensor, ...]:
        x, ids, w = batch(made)(count, seed)
        ids[::2] = torch.arange(SLOTS)
        return x, ids, w

    report = fusion_moe.explain(made, *(t.cuda() for t in heavy(244, 0)))
    assert all(name in report.details() for name in ("large_m", "small_m", "reorder_activations"))
    assert not changed(forward(made), heavy, (150, 244, 300))


@pytest.mark.parametrize("encoding", ["nvfp4", "bf16"])
def test_with_weights_as_they_are_stored(encoding):
    made = layer(encoding, 8, 512, 256, prepared=False)
    assert not changed(forward(made), batch(made), COUNTS)


def test_in_free_order_it_does():
    """Or the tests above test nothing."""
    made = layer("nvfp4", 64, 512, 256)
    with options.override(order="free", order_weights=False):
        assert changed(forward(made), batch(made), COUNTS)


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
def test_forward_of_training_has_the_bits_of_inference(adapters):
    """And rows of gradients do not depend on others."""
    made = layer("nvfp4", 8, 512, 256)
    if adapters:
        add_lora_(made, rank=16, dtype=torch.bfloat16)
        for name, p in made.named_parameters():
            if name.endswith("_lora.B"):
                torch.nn.init.normal_(p, std=0.25)

    def trained(x: Tensor, ids: Tensor, w: Tensor) -> Sequence[Tensor]:
        x, ids, w = x.cuda().requires_grad_(), ids.cuda(), w.cuda().requires_grad_()
        y = made(x, ids, w)
        return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, (x, w), torch.ones_like(y)))]

    rows = batch(made)(100, 0)
    alone = torch.cat([forward(made)(*(t[i : i + 1] for t in rows))[0] for i in range(100)])
    assert torch.equal(trained(*rows)[0], alone)
    assert not changed(trained, batch(made), COUNTS[::3])


def test_explain_says_what_is_launched():
    made = layer("nvfp4", 8, 512, 256)
    report = fusion_moe.explain(made, *(t.cuda() for t in batch(made)(1, 0)))
    assert "no row changes another one's bits" in str(report)
    assert "_row" in report.details()
