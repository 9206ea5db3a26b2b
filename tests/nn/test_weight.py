"""A weight in its forms: every way between two of them gives the same bytes, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from fusion_moe.encodings import (
    BF16,
    ENCODINGS,
    FP8_E8M0,
    MXFP4,
    NVFP4,
    Encoding,
    Part,
    dequantize,
    find,
    quantize,
)
from fusion_moe.encodings.requantized import requantize
from fusion_moe.integrations.distributed.states import FeatureShards
from fusion_moe.layouts import LAYOUTS, Padding
from fusion_moe.layouts.groups import ceil_to
from fusion_moe.nn.frozen import weight as conversion
from fusion_moe.nn.frozen.weight import Form, View, Weight

E = 3
LAYOUT_NAMES = [*LAYOUTS]
some = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def part_of(part: Part, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Any codes; scales as quantizers write them, positive and finite."""
    if part.dtype.is_floating_point and part.dtype.itemsize > 1:
        return (torch.rand(shape, generator=g) + 0.5).to(part.dtype)
    largest = 113 if part.scale and part.dtype.is_floating_point else 127
    t = torch.randint(1, largest, (*shape, part.dtype.itemsize), generator=g, dtype=torch.uint8)
    return t.view(part.dtype)[..., 0]


def weight(encoding: Encoding, n: int, k: int, runs: int, lead: tuple[int, ...]) -> Weight:
    g = torch.Generator().manual_seed(n + k)
    shapes = (encoding.part_shape(part, lead, n, k, runs) for part in encoding.parts)
    parts = [part_of(p, shape, g) for p, shape in zip(encoding.parts, shapes, strict=True)]
    return Weight(parts, Form(encoding))


def same(a: Weight, b: Weight) -> bool:
    return all(
        (s.dtype, s.shape) == (t.dtype, t.shape)
        and torch.equal(
            s.contiguous().flatten().view(torch.uint8), t.contiguous().flatten().view(torch.uint8)
        )
        for s, t in zip(a.parts, b.parts, strict=True)
    )


def form_of(w: Weight, layout: str, runs: int, integers: bool) -> Form | None:
    """The form of a weight in a layout; None if it cannot have it."""
    n, k = w.shape[-2:]
    (rows, columns), parts = LAYOUTS[layout].tile, max(1, runs)
    padding = Padding((n, k), (parts * ceil_to(n // parts, rows), ceil_to(k, columns)), parts)
    if LAYOUTS[layout].why_not(*padding.padded, w.form.encoding):
        return None
    return Form(w.form.encoding, layout, padding or None, integers=integers)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda e: e.name)
@some
@given(
    layouts=st.tuples(st.sampled_from(LAYOUT_NAMES), st.sampled_from(LAYOUT_NAMES)),
    integers=st.tuples(st.booleans(), st.booleans()),
    runs=st.sampled_from([0, 2]),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    lead=st.sampled_from([(E,), ()]),
    panel=st.sampled_from([1, 2**24]),
)
def test_every_way_gives_the_same_bytes(
    encoding, layouts, integers, runs, blocks, lead, panel, monkeypatch
):
    rows, columns = blocks
    n, k = 8 * rows * 2, max(32, encoding.block) * columns
    if encoding.axis == -2:
        n, k = k, n
    w = weight(encoding, n, k, runs, lead)
    forms = [form_of(w, name, runs, i) for name, i in zip(layouts, integers, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_PANEL", panel)
        one, other = (w.to(form) if form else w for form in forms)
        assert one.shape == other.shape == w.shape == (*lead, n, k)
        assert same(one.to(other.form), other)
        assert same(other.to(one.form), one)
        assert same(one.to(w.form), w)
        assert same(Weight([*other.linear], w.form), w)
        memory = [torch.zeros_like(t) for t in other.natural]
        one.to(other.form, memory)
    assert same(Weight(memory, other.form), Weight(other.natural, other.form))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4", "fp8", "bf16"])
@pytest.mark.parametrize("view", [View(), View(True), View(False, True), View(True, True)], ids=str)
def test_numbers_are_rounded_from_the_order_that_they_have(name, view, monkeypatch):
    encoding = find(name)
    x = torch.randn(E, 64, 128, generator=torch.Generator().manual_seed(0))
    (stored,) = view.pack(x)
    assert torch.equal(view.unpack(stored)[0], x)
    assert stored.shape == ((E, 128, 64) if view.transposed else (E, 64, 128))
    form = Form(encoding, "linear" if name in ("fp8", "bf16") else "w16x64", runs=2)
    monkeypatch.setattr(conversion, "_PANEL", 1)
    made = Weight.of_numbers(stored, view).to(form)
    by_runs = quantize(x.unflatten(1, (2, -1)), encoding)
    want = [t if p.of_matrix else t.flatten(1, 2) for p, t in by_runs.named()]
    assert same(made, Weight(want, Form(encoding)).to(form))


@pytest.mark.parametrize("runs", [1, 2])
def test_what_fp8_loses_is_counted(runs, monkeypatch):
    """The blocks of 128 rows that hold the same runs lose the same, whatever the layout."""
    x = torch.randn(E, 192, 256, generator=torch.Generator().manual_seed(0))
    q, form = quantize(x, NVFP4), Form(FP8_E8M0, runs=runs)
    want, count = requantize(q, runs)
    tiles = Weight([*q], Form(NVFP4)).to(Form(NVFP4, "w16x64"))
    monkeypatch.setattr(conversion, "_PANEL", 1)
    made = tiles.to(form)
    assert same(made, Weight([*want], form))
    torch.testing.assert_close(made.lost, count)


def test_integers_are_the_same_memory():
    w = weight(NVFP4, 16, 64, 2, (E,))
    integers = w.to(replace(w.form, integers=True))
    assert [t.dtype for t in integers.parts] == [torch.uint8, torch.uint8, torch.int32]
    assert [t.data_ptr() for t in integers.parts] == [t.data_ptr() for t in w.parts]
    assert same(integers.to(w.form), w)
    assert dequantize(integers.linear).shape == (E, 16, 64)


def test_a_weight_without_memory_has_shapes():
    w = weight(MXFP4, 24, 32, 0, (E,))
    there = Weight([t.to("meta") for t in w.parts], w.form).to(form_of(w, "w16x64", 1, False))
    assert [(t.shape, t.is_meta) for t in there.parts] == [((E, 32, 32), True), ((E, 32, 2), True)]


@pytest.mark.parametrize("first", ["gate_up", "up"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_of_features_are_all_of_them(first, ranks):
    """What the ranks' state dicts have makes the whole, each element of it once."""
    i, h, parts = 96, 8, 2 if first == "gate_up" else 1
    whole = {
        f"{first}_proj": torch.arange(E * parts * i * h).view(E, parts * i, h),
        f"{first}_proj_bias": torch.arange(E * parts * i).view(E, parts * i),
        "down_proj": torch.arange(E * h * i).view(E, h, i),
        "down_proj_bias": torch.arange(E * h).view(E, h),
    }
    joined = {name: torch.full_like(t, -1) for name, t in whole.items()}
    for rank in range(ranks):
        features = range(i * rank // ranks, i * (rank + 1) // ranks)
        rows = torch.cat(
            [torch.arange(features.start, features.stop) + i * p for p in range(parts)]
        )
        share = FeatureShards(first, E, i, features, rows, rank == 0)
        for name, t in whole.items():
            mine = share.cut(name, t)
            assert torch.equal(share.share(name, share.whole(name, mine)), mine)
            pieces = share.whole(name, mine)
            assert pieces.shape == t.shape
            for at, piece in pieces.pieces:
                into = joined[name][
                    tuple(map(slice, at, map(sum, zip(at, piece.shape, strict=True))))
                ]
                assert (into == -1).all()
                into.copy_(piece)
    assert all(torch.equal(joined[name], t) for name, t in whole.items())


def test_numbers_of_another_dtype_are_cast():
    x = torch.randn(2, 16, 32)
    assert torch.equal(Weight.of_numbers(x).to(Form(BF16)).parts[0], x.bfloat16())
