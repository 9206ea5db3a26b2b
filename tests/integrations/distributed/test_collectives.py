"""Tokens between ranks: what `dispatch` and `combine_from` mean, with ranks as threads."""

from __future__ import annotations

import pytest
import torch
from bad_calls import messages
from fusions import assert_same_bits, fusion_of_call, round_trip

import fusion_moe
from fusion_moe import FusionDefinition
from fusion_moe.distributed.collectives import Together
from fusion_moe.distributed.exchange.kinds import holders
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.errors import DtypeError, FusionError, OptionError, ShapeError, UnsupportedError
from fusion_moe.ir.derivative import differentiate
from fusion_moe.layouts.groups import check_ends

E, H, I, K, R = 7, 64, 32, 3, 3
EACH = -(-E // R)


def inputs(tokens: int, rank: int = 0, experts: int = E):
    """x [T, H], ids [T, K], w [T, K], of which one slot names no expert."""
    g = torch.Generator().manual_seed(100 * tokens + rank)
    ids = torch.rand(tokens, experts, generator=g).topk(K).indices
    if tokens > 1:
        ids[0, 0], ids[1] = -1, -1
    return torch.randn(tokens, H, generator=g), ids, torch.rand(tokens, K, generator=g)


def there_and_back(dtype: str = "f32", stride: int | None = None, **more):
    """x, ids, w, peers -> all that comes, and x of each holder added up."""
    fd = FusionDefinition()
    tokens = fd.define_size("t")
    ranks = fd.define_groups("s", R, stride=stride or tokens)
    x = fd.define_tensor(shape=[tokens, H], dtype=dtype)
    ids = fd.define_tensor(shape=[tokens, K], dtype="i64")
    w = fd.define_tensor(shape=[tokens, K], dtype="f32")
    peers = fd.define_tensor(shape=[R + 4], dtype="i64")
    how = {"experts": E, "group": "g", **more}
    rows, all_ids, all_w, ends = fd.ops.dispatch(x, ids, w, peers, groups=ranks, **how)
    y = fd.ops.combine_from(rows, all_ids, ids, ends, peers, **how)
    for v in (rows, all_ids, all_w, ends, y):
        fd.add_output(v)
    return fd.fusion()


PEERS = torch.zeros(R + 4, dtype=torch.int64)


@pytest.mark.parametrize(("counts", "stride"), [((4, 4, 4), None), ((4, 0, 9), 9), ((0, 0, 0), 5)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_tokens_of_all_ranks(counts, stride, dtype):
    fusion = there_and_back(dtype, stride)
    first, parsed, *_ = round_trip(fusion)
    given = [inputs(t, rank) for rank, t in enumerate(counts)]
    given = [(x.bfloat16() if dtype == "bf16" else x, ids, w) for x, ids, w in given]
    each = stride or counts[0]
    both = [
        Together(R).run(lambda rank, f=f: f.evaluate(*given[rank], PEERS)) for f in (first, parsed)
    ]
    for rank, (found, again) in enumerate(zip(*both, strict=True)):
        assert_same_bits(found, again)
        rows, ids, w, ends, y = found
        check_ends(ends, R * each)
        for source, (tokens, x) in enumerate(zip(counts, given, strict=True)):
            at = slice(source * each, source * each + tokens)
            assert all(t[at].equal(u) for t, u in zip((rows, ids.long(), w), x, strict=True))
            assert ends[source] == at.stop
            assert (ids[at.stop : (source + 1) * each] == -1).all()
        x, own, _ = given[rank]
        many = holders(own, E, R).sum(1, keepdim=True)
        assert y.equal((x.float() * many).to(x.dtype))


def test_holders():
    ids = torch.tensor([[0, 2], [3, 6], [-1, 7], [5, 5]])
    assert holders(ids, E, R).int().tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0], [0, 1, 0]]


SHAPES = (E, 2 * I, H), (E, H, I)
WEIGHTS = [
    quantize(torch.randn(s, generator=torch.Generator().manual_seed(1)) / 8, encoding=NVFP4)
    for s in SHAPES
]


def experts(x, ids, w, rank=None, **more):
    """All experts, or those of a rank with the others."""
    mine = slice(None) if rank is None else slice(rank * EACH, (rank + 1) * EACH)
    if rank is not None:
        more = {"peers": PEERS, "across": "g", "of_experts": E, "first_expert": mine.start, **more}
    some = [[part[mine] for part in parts] for parts in WEIGHTS]
    return torch.ops.fusion_moe.fused_experts(x, ids, w, *some, weight_format="nvfp4", **more)


@pytest.mark.parametrize(("counts", "capacity"), [((5, 5, 5), 0), ((5, 0, 9), 16)])
@pytest.mark.parametrize("scale_on", ["output", "input"])
def test_experts_of_all_ranks_are_one_program(counts, capacity, scale_on):
    given = [inputs(t, rank) for rank, t in enumerate(counts)]
    with fusion_moe.options.override(target="reference"):
        found = Together(R).run(
            lambda rank: experts(*given[rank], rank, capacity=capacity, scale_on=scale_on)
        )
        for y, tensors in zip(found, given, strict=True):
            torch.testing.assert_close(y, experts(*tensors, scale_on=scale_on))


FLOATS = [torch.randn(s, generator=torch.Generator().manual_seed(1)) / 8 for s in SHAPES]


def passes(x, ids, w, rank=None, scale_on="output", **more):
    """The result of float experts, and all gradients for one that is drawn from tokens."""
    mine = slice(None) if rank is None else slice(rank * EACH, (rank + 1) * EACH)
    if rank is not None:
        more |= {"peers": PEERS, "across": "g", "of_experts": E, "first_expert": mine.start}
    some = [t[mine].clone().requires_grad_() for t in FLOATS]
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = torch.ops.fusion_moe.fused_experts(
        x, ids, w, [some[0]], [some[1]], weight_format="f32", scale_on=scale_on, **more
    )
    y.backward((3 * x.detach().flip(-1)).sin())
    return [y.detach(), *(t.grad for t in (x, w, *some))]


@pytest.mark.parametrize(("counts", "capacity"), [((5, 5, 5), 0), ((5, 0, 9), 16), ((0, 0, 0), 5)])
@pytest.mark.parametrize("more", [{}, {"scale_on": "input"}], ids=str)
def test_gradients_are_those_of_one_process(counts, capacity, more):
    """Bit for bit where nothing is added over ranks."""
    given = [inputs(t, rank) for rank, t in enumerate(counts)]
    with fusion_moe.options.override(target="reference"):
        found = Together(R).run(lambda rank: passes(*given[rank], rank, capacity=capacity, **more))
        want = passes(*(torch.cat(t) for t in zip(*given, strict=True)), **more)
    for i, (of_ranks, one) in enumerate(zip(zip(*found, strict=True), want, strict=True)):
        assert i < 2 or torch.cat(of_ranks).equal(one)
        torch.testing.assert_close(torch.cat(of_ranks), one)


def test_a_derivative_sends_each_gradient_once():
    """In 16 bits what the result has in 16 bits; what it saves does not keep ranks' memory."""
    x, ids, w = inputs(4)
    some = [t.bfloat16() for t in FLOATS]
    how = {"weight_format": "bf16", "peers": PEERS, "across": "g", "of_experts": R * E}
    fusion = fusion_of_call(
        *("fused_experts", x.bfloat16(), ids, w, [some[0]], [some[1]]),
        **{"first_expert": 0, "float32_sums": True, **how},
    )
    backward = differentiate(fusion, [0, 2, 3, 4]).backward
    sent = [op for op in backward.ops if op.kind.role == "collective"]
    assert [op.kind.name for op in sent] == ["dispatch", "combine_from", "combine_from"]
    assert [op.values[0].type.dtype for op in sent] == ["bf16", "bf16", "f32"]
    only_weights = differentiate(fusion, [3]).backward
    assert [op.kind.name for op in only_weights.ops if op.kind.role == "collective"] == ["dispatch"]


def test_explain_shows_gradients_on_their_way_before_those_of_weights():
    """Other ranks wait for the former."""
    x, ids, w = inputs(5)
    how = {"peers": PEERS[:5], "across": "g", "of_experts": EACH, "first_expert": 0}

    def layer(x, w, up, down):
        return torch.ops.fusion_moe.fused_experts(
            x, ids, w, [up], [down], weight_format="f32", **how
        )

    given = [t.clone().requires_grad_() for t in (x, w, *(t[:EACH] for t in FLOATS))]
    (report,) = Together(1).run(lambda _: fusion_moe.explain(layer, *given, backward=True))
    assert "fusion1 is part of the backward pass" in str(report.details())
    made = [op for s in report.segments if s.id.startswith("fusion1.") for op in s.ops]
    sent = [i for i, op in enumerate(made) if op in ("dispatch", "combine_from")]
    weights = [i for i, op in enumerate(made) if op == "grouped_outer"]
    assert (len(sent), len(weights)) == (3, 2)
    assert max(sent) < min(weights)
    assert str(report.details()).count("then waits for the sums of all ranks") == 3


def test_sums_without_a_dispatch_have_no_derivative():
    fd = FusionDefinition()
    ranks = fd.define_groups("s", R, stride=4)
    y = fd.define_tensor(shape=[R * 4 / ranks, H], dtype="f32")
    all_ids = fd.define_tensor(shape=[R * 4 / ranks, K], dtype="i32")
    ids = fd.define_tensor(shape=[4, K], dtype="i64")
    ends = fd.define_tensor(shape=[R], dtype="i32", ends=ranks)
    peers = fd.define_tensor(shape=[R + 4], dtype="i64")
    fd.add_output(fd.ops.combine_from(y, all_ids, ids, ends, peers, experts=E, group="g"))
    with pytest.raises(UnsupportedError, match="without a dispatch before it"):
        differentiate(fd.fusion(), [0])


def test_explain_says_what_a_rank_waits_for():
    given = inputs(5)
    with torch.no_grad():
        (report,) = Together(1).run(
            lambda rank: fusion_moe.explain(
                lambda *tensors: experts(*tensors, 0, peers=PEERS[:5], of_experts=EACH), *given
            )
        )
    assert [s.kind for s in report.segments] == [
        *("collective", "grouped_gemm", "grouped_gemm", "collective")
    ]
    assert report.segments[-1].after == (report.segments[0].id, report.segments[2].id)
    said = " ".join(str(report.details()).split())
    assert "sends rows to the ranks that need them of group 'g', then waits for the ids" in said
    assert "then waits for the sums of all ranks" in said


def test_sums_in_float32_are_rounded_once():
    """As one process rounds them, but for the order of float32's sums."""
    given = [inputs(5, rank) for rank in range(R)]
    given = [(x.bfloat16(), ids, w) for x, ids, w in given]
    with fusion_moe.options.override(target="reference"):
        found, rounded = (
            Together(R).run(lambda rank, f=f: experts(*given[rank], rank, float32_sums=f))
            for f in (True, False)
        )
        want = [experts(*tensors) for tensors in given]
    assert all(y.dtype == torch.bfloat16 for y in found)
    y, z, exact = torch.cat(found), torch.cat(rounded), torch.cat(want)
    assert (y == exact).float().mean() > 0.99
    assert (z == exact).float().mean() < 0.95


def test_what_peers_cannot_be_beside():
    x, ids, w = inputs(4)
    many = torch.ones(4, 33, dtype=torch.int64), torch.ones(4, 33)
    for error, says, call in (
        (OptionError, "first_expert = None", lambda: experts(x, ids, w, 0, first_expert=None)),
        (
            OptionError,
            "expert_map",
            lambda: experts(x, ids, w, 0, expert_map=torch.zeros(E, dtype=torch.int32)),
        ),
        (
            ShapeError,
            "tokens of a rank, and room for 3: s0 = 4",
            lambda: experts(x, ids, w, 0, capacity=3),
        ),
        (ShapeError, "33 slots", lambda: experts(x, *many, 0)),
        (DtypeError, "f64 for both", lambda: experts(x, ids, w.double(), 0)),
        (FusionError, "name of a process group", lambda: experts(x, ids, w, 0, across="")),
        (ShapeError, "for R ranks", lambda: experts(x, ids, w, 0, peers=PEERS[:3])),
    ):
        with pytest.raises(error, match=says):
            call()


def test_rows_of_ranks(golden):
    """Their groups do not follow each other: products and routes take none, and sums are those of
    one dispatch.
    """
    fd = FusionDefinition()
    ranks, of = fd.define_groups("s", 2, stride=8), fd.define_groups("g", 2)
    x = fd.define_tensor(shape=[16 / ranks, 32], dtype="f32")
    w = fd.define_tensor(shape=[2, 32, 32], dtype="f32")
    ends = fd.define_tensor(shape=[2], dtype="i32", ends=ranks)
    shapes = ([8, 32], "f32"), ([8, 2], "i64"), ([8, 2], "f32"), ([6], "i64")
    given = [fd.define_tensor(shape=shape, dtype=dtype) for shape, dtype in shapes]
    cases = {
        "a product": lambda: fd.ops.grouped_mm(x, w, ends),
        "a route": lambda: fd.ops.route(given[1], groups=ranks),
        "a dispatch": lambda: fd.ops.dispatch(*given, groups=of, experts=4, group="g"),
    }
    golden(messages(cases))


def test_sums_are_those_of_a_dispatch():
    fusion = there_and_back()
    combine = fusion.ops[-1]
    fd = FusionDefinition()
    values = [fd.define_like(v.type) for v in combine.values if not v.type.ends]
    other = fd.define_tensor(shape=[R], dtype="i32", ends=fd.define_groups("other", R, stride=4))
    y, all_ids, ids, peers = values
    with pytest.raises(FusionError, match="the ends are of other"):
        fd.ops.combine_from(y, all_ids, ids, other, peers, experts=E, group="g")


def test_a_rank_that_fails_ends_the_others():
    def fails(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1")
        there_and_back().evaluate(*inputs(4), PEERS)

    with pytest.raises(ValueError, match="rank 1"):
        Together(R).run(fails)
