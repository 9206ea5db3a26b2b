"""What the operations compute, against loops in float64; and what they never do."""

from __future__ import annotations

import loops
import pytest
import torch
from bad_calls import messages
from cover import examples, few
from fusions import assert_same_bits
from hypothesis import example, given, strategies as st
from loops import decoded
from routings import Partition, Routing, partitions, routings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fusion_moe import nn, options

OPS = torch.ops.fusion_moe
NAN = float("nan")
# of a result: its rounding, and some of float32 sums
EPS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def weight(
    groups: int, n: int, k: int, runs: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random bytes of moderate size, with block scales from 2^-3 to 2."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (groups, n, k // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(0x20, 0x41, (groups, n, k // 16), generator=g, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    return codes, scale, torch.rand(groups, *([runs] if runs else []), generator=g) * 0.2 + 0.05


def random(*shape: int, dtype=torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(partition: Partition, a: Tensor, w: Tensor) -> Tensor:
    """a f64[M, K], w f64[G, N, K] -> f64[M, N]; zeros where no group is."""
    parts = [a[rows] @ w[g].T for g, rows in partition.runs]
    return torch.cat([*parts, a.new_zeros(partition.spare, w.shape[1])])


def close(found: Tensor, want: Tensor, magnitude: Tensor | float, dtype: torch.dtype) -> None:
    """Off by no more than the rounding of results of this magnitude."""
    assert found.dtype == dtype
    assert found.shape == want.shape
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((found.double() - want).abs() <= EPS[dtype] * magnitude + smallest).all()


# nvfp4_grouped_mm ---------------------------------------------------------------------------------


@given(partitions(), st.sampled_from(list(EPS)), st.sampled_from((0, 1, 2)))
def test_grouped_mm(partition: Partition, dtype, runs):
    parts = weight(len(partition.sizes), 6, 32, runs)
    a = random(partition.rows, 32, dtype=dtype)
    a[sum(partition.sizes) :] = NAN
    found = OPS.nvfp4_grouped_mm(a, *parts, partition.ends)
    w, wide = decoded(*parts), a.double().nan_to_num()
    close(found, product(partition, wide, w), product(partition, wide.abs(), w.abs()), dtype)
    assert not found[sum(partition.sizes) :].any()


def test_grouped_mm_is_exact_on_small_integers():
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 8, 32), generator=g, dtype=torch.uint8)
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0])[torch.randint(0, 4, (3, 8, 4), generator=g)].to(
        torch.float8_e4m3fn
    )
    decode = torch.tensor([[1.0, 0.25], [2.0, 1.0], [0.5, 8.0]])  # gate and up keep their own
    a, partition = torch.randint(-4, 5, (10, 64), generator=g).float(), Partition((3, 0, 6), 1)
    found = OPS.nvfp4_grouped_mm(a, codes, scale, decode, partition.ends)
    assert found.double().equal(product(partition, a.double(), decoded(codes, scale, decode)))
    assert found.any()


@pytest.mark.parametrize("shape", [(2, 5, 32), (1, 1, 10, 32), (10, 32), (0, 4, 32), (0, 32)])
def test_grouped_mm_of_several_dimensions(shape):
    parts, a = weight(2, 6, 32), random(*shape)
    rows = a.numel() // 32
    ends = torch.tensor([rows // 3, rows], dtype=torch.int32)
    found = OPS.nvfp4_grouped_mm(a, *parts, ends)
    assert found.shape == (*shape[:-1], 6)
    assert found.flatten(0, -2).equal(OPS.nvfp4_grouped_mm(a.flatten(0, -2), *parts, ends))


def test_grouped_mm_of_one_row_without_a_dimension():
    parts, a = weight(1, 6, 32), random(32)
    assert OPS.nvfp4_grouped_mm(a, *parts, torch.tensor([1], dtype=torch.int32)).shape == (6,)


def test_grouped_mm_out_dtype_and_fp4_codes():
    parts, a, ends = (
        weight(2, 6, 32),
        random(5, 32, dtype=torch.bfloat16),
        torch.tensor([2, 5], dtype=torch.int32),
    )
    wide = OPS.nvfp4_grouped_mm(a, *parts, ends, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert wide.bfloat16().equal(OPS.nvfp4_grouped_mm(a, *parts, ends))
    assert OPS.nvfp4_grouped_mm(a, parts[0].view(torch.float4_e2m1fn_x2), *parts[1:], ends).equal(
        wide.bfloat16()
    )


def test_strides_do_not_matter():
    parts, a, ends = weight(2, 6, 32), random(5, 32), torch.tensor([2, 5], dtype=torch.int32)
    want = OPS.nvfp4_grouped_mm(a, *parts, ends)
    turned = [t.mT.contiguous().mT for t in (parts[0], parts[1].view(torch.uint8))]
    for x in (a.T.contiguous().T, torch.cat([a, a], 1)[:, :32], torch.stack([a, a], 1)[:, 0]):
        found = OPS.nvfp4_grouped_mm(
            x, turned[0], turned[1].view(torch.float8_e4m3fn), parts[2], ends
        )
        # a matrix product may add in another order
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous()


@options.override(target="reference")
def test_the_layout_of_a_weight_changes_no_bit():
    def stored(parts):
        return parts[0], loops.swizzled(parts[1], padding=0x7F), parts[2]

    gate_up, down = experts(3)
    a, ends = random(9, 32).requires_grad_(), torch.tensor([4, 4, 9], dtype=torch.int32)
    want, found = (
        OPS.nvfp4_grouped_mm(a, *w, ends, weight_layout=at)
        for w, at in ((gate_up, "linear"), (stored(gate_up), "sf128x4"))
    )
    assert found.equal(want)
    assert torch.autograd.grad(found.sum(), a)[0].equal(torch.autograd.grad(want.sum(), a)[0])
    x, ids, w = random(5, 32), torch.tensor([[0, 2], [2, 2], [0, 1], [1, 1], [2, 0]]), random(5, 2)
    want = OPS.expert_mlp(x, ids, w, *gate_up, *down)
    assert OPS.expert_mlp(
        x, ids, w, *stored(gate_up), *stored(down), weight_layout="sf128x4"
    ).equal(want)


# scaled_swiglu ------------------------------------------------------------------------------------


def swiglu(x: Tensor, scale=None, interleave=0, limit=None, alpha=1.0, up_offset=0.0) -> Tensor:
    """f64[..., H], a column at a time."""
    half, out = x.shape[-1] // 2, []
    for j in range(half):
        block = interleave or half
        at = j // block * 2 * block + j % block
        gate, up = x[..., at], x[..., at + block]
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out.append(gate / (1 + torch.exp(-alpha * gate)) * (up + up_offset))
    y = torch.stack(out, -1)
    return y if scale is None else y * scale[..., None]


@given(
    st.sampled_from(((5, 16), (2, 3, 16), (0, 16), (16,))),
    st.sampled_from(list(EPS)),
    st.sampled_from((0, 1, 2, 4, 8)),
    st.booleans(),
    st.sampled_from((None, 0.5, 7.0)),
    st.sampled_from((1.0, 1.702)),
    st.sampled_from((0.0, 1.0)),
)
def test_scaled_swiglu(shape, dtype, interleave, scaled, limit, alpha, up_offset):
    x, scale = 3 * random(*shape, dtype=dtype), random(*shape[:-1], seed=2) if scaled else None
    found = OPS.scaled_swiglu(x, scale, interleave, limit=limit, alpha=alpha, up_offset=up_offset)
    want = swiglu(
        x.double(), None if scale is None else scale.double(), interleave, limit, alpha, up_offset
    )
    close(found, want, want.abs() + 1e-6, dtype)


# route, combine, group_add ------------------------------------------------------------------------


@given(routings())
def test_route_and_combine(routing: Routing):
    """Rows by token, sent to their groups and back, weighted: each token's own row times the sum of
    its weights.
    """
    (count, slots), w = routing.ids.shape, random(*routing.ids.shape)
    ends, row_of, slot_of = OPS.route(routing.ids, routing.groups)
    assert ends.tolist() == [int((routing.ids <= g).sum()) for g in range(routing.groups)]
    group_of_row = torch.bucketize(torch.arange(count * slots), ends, right=True)
    assert routing.ids.equal(group_of_row[slot_of.long()])
    assert slot_of.flatten().sort().values.tolist() == list(range(count * slots))
    assert row_of[slot_of.long()].tolist() == [[t] * slots for t in range(count)]
    x = random(count, 4, seed=3)
    found = OPS.combine(x.index_select(0, row_of), slot_of, w)
    want = (x.double()[:, None] * w.double()[..., None]).sum(1)
    close(
        found, want, (x.double().abs()[:, None] * w.double().abs()[..., None]).sum(1), torch.float32
    )


def test_combine_rounds_once_and_in_order():
    """1, 2^-8, 2^-8 in bf16 is 1.0078125 if they are added in float32; 2^24 + 1 + 1 in float32
    shows the order.
    """
    slot_of = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    y = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert OPS.combine(y, slot_of, torch.ones(1, 3)).item() == 1.0078125
    y = torch.tensor([[2.0**24], [1.0], [1.0]])
    assert OPS.combine(y, slot_of, torch.ones(1, 3)).item() == 2.0**24
    assert OPS.combine(y, slot_of.flip(1).contiguous(), torch.ones(1, 3)).item() == 2.0**24 + 2


@given(partitions())
def test_group_add(partition: Partition):
    y, bias = random(partition.rows, 3), random(len(partition.sizes), 3, seed=2)
    want = y.clone()
    for g, rows in partition.runs:
        want[rows] += bias[g]
    assert_same_bits([OPS.group_add(y, bias, partition.ends)], [want])


def test_grouped_swizzle_pads_each_group():
    scale = torch.arange(1, 7, dtype=torch.uint8).view(3, 2).view(torch.float8_e4m3fn)
    found = OPS.grouped_swizzle_block_scale(scale, torch.tensor([2, 2, 3], dtype=torch.int32))
    assert found.shape == (384, 4)
    stored = found.view(torch.uint8).flatten()
    assert stored[:2].tolist() == [1, 2]
    assert stored[16:18].tolist() == [3, 4]
    assert stored[512:514].tolist() == [5, 6]
    assert int(stored.sum()) == 21
    empty = OPS.grouped_swizzle_block_scale(scale[:0], torch.tensor([0, 0, 0], dtype=torch.int32))
    assert empty.shape == (0, 4)


def test_quantize_and_back():
    x = random(3, 8, 32)
    codes, scale, decode = OPS.nvfp4_quantize(x)
    assert decode.equal(x.abs().amax((1, 2)) / 2688)
    step = x.abs().view(3, 8, 2, 16).amax(-1).repeat_interleave(16, -1) / 6
    assert ((decoded(codes, scale, decode) - x).abs() <= 1.1 * step).all()
    again = OPS.nvfp4_quantize(x, decode)
    assert_same_bits(again, [codes, scale, decode])
    assert again[2].data_ptr() != decode.data_ptr()


# expert_mlp ---------------------------------------------------------------------------------------


def mlp(
    x, ids, w, gate_up, down, gate_up_bias=None, down_bias=None, scale_on="output", **swiglu_options
):
    """A loop over tokens and slots in float64, nothing sorted."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            e = int(ids[t, s])
            y = (x[t] * w[t, s] if scale_on == "input" else x[t]) @ gate_up[e].T
            y = (
                swiglu(
                    (y if gate_up_bias is None else y + gate_up_bias[e])[None], **swiglu_options
                )[0]
                @ down[e].T
            )
            y = y if down_bias is None else y + down_bias[e]
            out = torch.cat(
                [
                    out[:t],
                    (out[t] + (y if scale_on == "input" else w[t, s] * y))[None],
                    out[t + 1 :],
                ]
            )
    return out


VARIANTS = (  # of the activation, and of experts
    ({}, {}),
    ({"interleave": 4}, {}),
    ({"interleave": 1, "limit": 2.0, "alpha": 1.702, "up_offset": 1.0}, {"bias": True}),
    ({}, {"scale_on": "input"}),
)


def experts(groups: int, hidden: int = 32, inner: int = 16):
    """Weights whose gate and up halves have decode scales of their own."""
    return weight(groups, 2 * inner, hidden, runs=2, seed=4), weight(groups, hidden, inner, seed=5)


@pytest.mark.slow
@examples(0.8)
@given(routings(), st.sampled_from(VARIANTS))
@example(Routing(torch.zeros(0, 2, dtype=torch.int64), 1), VARIANTS[0])
@example(Routing(torch.tensor([[255], [0]]), 256), VARIANTS[0])
def test_expert_mlp(routing: Routing, variant):
    """The result, and its derivative where there are few groups."""
    (of_activation, how), ids = variant, routing.ids
    gate_up, down = experts(routing.groups)
    w = torch.rand(ids.shape, generator=torch.Generator().manual_seed(6)) + 0.1
    biases = [random(routing.groups, 32, seed=seed) for seed in (7, 8) if "bias" in how]
    leaves = [t.requires_grad_() for t in (random(len(ids), 32), w, *biases)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    how = {"scale_on": how.get("scale_on", "output")}
    found, want = (
        f(x, ids, w, *weights, *biases, **how, **more)
        for f, (x, w, *biases), weights, more in (
            (OPS.expert_mlp, leaves, (*gate_up, *down), {"activation": nn.swiglu(**of_activation)}),
            (mlp, wide, (decoded(*gate_up), decoded(*down)), of_activation),
        )
    )
    near(found, want, 1e-5)
    if routing.groups < 10 and len(ids):
        dy = random(*found.shape, seed=9)
        got = torch.autograd.grad(found, leaves, dy)
        for a, b in zip(got, torch.autograd.grad(want, wide, dy.double()), strict=True):
            near(a, b, 1e-4)


def near(found: Tensor, want: Tensor, rtol: float) -> None:
    atol = 1e-4 * max(1.0, want.abs().max().item() if want.numel() else 1.0)
    torch.testing.assert_close(found.double(), want, rtol=rtol, atol=atol)


def test_expert_mlp_in_bf16_is_near_and_as_its_small_operations():
    gate_up, down = experts(4)
    x, w = (
        random(17, 32, dtype=torch.bfloat16),
        torch.rand(17, 2, generator=torch.Generator().manual_seed(6)),
    )
    ids = torch.randint(0, 4, (17, 2), generator=torch.Generator().manual_seed(7))
    want = mlp(x.double(), ids, w.double(), decoded(*gate_up), decoded(*down))
    ends, row_of, slot_of = OPS.route(ids, 4)
    y = OPS.scaled_swiglu(OPS.nvfp4_grouped_mm(x[row_of], *gate_up, ends))
    small = OPS.combine(OPS.nvfp4_grouped_mm(y, *down, ends), slot_of, w)
    with options.override(contract_rounding=False):
        assert_same_bits([OPS.expert_mlp(x, ids, w, *gate_up, *down)], [small])
    fused = OPS.expert_mlp(x, ids, w, *gate_up, *down)
    assert not fused.equal(small)
    errors = [
        (v.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
        for v in (fused, small)
    ]
    assert errors[0] < errors[1] < 2.0**-7


@pytest.mark.parametrize("shape", [(2, 3), (1, 6), (6,), (0, 3)])
def test_expert_mlp_of_several_dimensions(shape):
    gate_up, down = experts(3)
    x, ids, w = random(*shape, 32), torch.ones(*shape, 2, dtype=torch.int64), torch.rand(*shape, 2)
    found = OPS.expert_mlp(x, ids, w, *gate_up, *down)
    assert found.shape == x.shape
    flat = OPS.expert_mlp(x.reshape(-1, 32), ids.reshape(-1, 2), w.reshape(-1, 2), *gate_up, *down)
    assert found.reshape(-1, 32).equal(flat)
    assert OPS.expert_mlp(x, ids.reshape(-1, 2), w.reshape(-1, 2), *gate_up, *down).equal(found)


# Derivatives --------------------------------------------------------------------------------------


@given(partitions(), st.sampled_from((torch.float32, torch.bfloat16)))
def test_derivative_of_grouped_mm(partition: Partition, dtype):
    parts = weight(len(partition.sizes), 6, 32)
    a, dy = (
        random(partition.rows, 32, dtype=dtype).requires_grad_(),
        random(partition.rows, 6, dtype=dtype, seed=2),
    )
    dy[sum(partition.sizes) :] = NAN  # gradients of rows of no group are not read
    (da,) = torch.autograd.grad(OPS.nvfp4_grouped_mm(a, *parts, partition.ends), a, dy)
    w, wide = decoded(*parts).transpose(1, 2), dy.double().nan_to_num()
    close(da, product(partition, wide, w), product(partition, wide.abs(), w.abs()), dtype)


def test_derivative_of_swiglu_combine_and_group_add():
    x, scale = random(5, 16).requires_grad_(), random(5, seed=2).requires_grad_()
    options_of = {"interleave": 2, "limit": 1.0, "alpha": 1.702, "up_offset": 1.0}
    wide = [t.detach().double().requires_grad_() for t in (x, scale)]
    dy = random(5, 8, seed=3)
    got = torch.autograd.grad(OPS.scaled_swiglu(x, scale, **options_of), (x, scale), dy)
    want = torch.autograd.grad(swiglu(*wide, **options_of), wide, dy.double())
    torch.testing.assert_close([t.double() for t in got], list(want), rtol=1e-5, atol=1e-5)

    y, w = random(10, 4).requires_grad_(), random(5, 2, seed=4).requires_grad_()
    slot_of = torch.randperm(10, generator=torch.Generator().manual_seed(0)).view(5, 2).int()
    dy = random(5, 4, seed=5)
    got = torch.autograd.grad(OPS.combine(y, slot_of, w), (y, w), dy)
    plain = (y[slot_of.long()] * w[..., None]).sum(1)
    torch.testing.assert_close(got, torch.autograd.grad(plain, (y, w), dy), rtol=1e-5, atol=1e-5)

    y, bias, ends = (
        random(5, 4).requires_grad_(),
        random(2, 4).requires_grad_(),
        torch.tensor([2, 4], dtype=torch.int32),
    )
    got = torch.autograd.grad(OPS.group_add(y, bias, ends), (y, bias), dy)
    torch.testing.assert_close(
        got, (dy, torch.stack([dy[:2].sum(0), dy[2:4].sum(0)])), rtol=1e-6, atol=1e-6
    )


def test_gradients_of_several_dimensions_and_of_one_argument():
    gate_up, down = experts(3)
    x, ids, w = (
        random(2, 3, 32).requires_grad_(),
        torch.ones(2, 3, 2, dtype=torch.int64),
        torch.rand(2, 3, 2),
    )
    OPS.expert_mlp(x, ids, w, *gate_up, *down).sum().backward()
    assert x.grad.shape == x.shape
    assert x.grad.any()
    flat = x.detach().reshape(6, 32).requires_grad_()
    OPS.expert_mlp(flat, ids.reshape(6, 2), w.reshape(6, 2), *gate_up, *down).sum().backward()
    assert x.grad.reshape(6, 32).equal(flat.grad)


TWICE = """
def fusion(fd):
    v0 = fd.define_tensor(shape=[3], dtype="f32")
    v1 = fd.ops.cat(v0, v0, dim=0)
    fd.add_output(v1)
"""


def test_what_has_no_derivative(golden):
    gate_up, _ = experts(2)
    a, ends = random(5, 32).requires_grad_(), torch.tensor([2, 5], dtype=torch.int32)
    decode = gate_up[2].clone().requires_grad_()
    x = random(3).requires_grad_()
    y, z = OPS.run(TWICE, [x], [], None)[0], OPS.nvfp4_grouped_mm(a, *gate_up[:2], decode, ends)
    golden(messages({"of a program": y.sum().backward, "a frozen scale": z.sum().backward}))
    assert not OPS.nvfp4_quantize(a)[2].requires_grad


# What holds for all of them -----------------------------------------------------------------------


def calls():
    """A call of each operation: name -> (args, kwargs)."""
    gate_up, down = experts(3)
    ids, ends = (
        torch.tensor([[0, 2], [2, 2], [0, 1], [1, 1], [2, 0]]),
        torch.tensor([2, 2, 5], dtype=torch.int32),
    )
    slot_of = OPS.route(ids, 3)[2]
    return {
        "nvfp4_quantize": ((random(3, 8, 32),), {}),
        "nvfp4_grouped_mm": ((random(5, 32, dtype=torch.bfloat16), *gate_up, ends), {}),
        "grouped_swizzle_block_scale": (
            (gate_up[1][0], torch.tensor([2, 2, 30], dtype=torch.int32)),
            {},
        ),
        "scaled_swiglu": ((random(5, 32, dtype=torch.bfloat16), random(5), 4), {"limit": 1.0}),
        "route": ((ids, 3), {}),
        "topk_router": (
            (random(5, 12, dtype=torch.bfloat16), 2, random(12)),
            {"n_group": 4, "topk_group": 2, "best_of_group": 2},
        ),
        "fused_compute_score_for_moe_aux_loss": ((random(5, 12), 2, "softmax"), {}),
        "fused_moe_aux_loss": (
            (random(5, 12), torch.arange(12), torch.tensor(7), 12, 2, 0.01),
            {},
        ),
        "moe_z_loss": ((random(5, 12, dtype=torch.bfloat16), 0.01), {}),
        "combine": ((random(10, 8, dtype=torch.bfloat16), slot_of, random(5, 2)), {}),
        "group_add": ((random(5, 8), random(3, 8), ends), {}),
        "expert_mlp": (
            (random(5, 32, dtype=torch.bfloat16), ids, random(5, 2), *gate_up, *down),
            {"activation": nn.swiglu(interleave=4)},
        ),
        "f16a_nvfp4weight_scaled_grouped_mm": (
            of_problem(random(5, 32, dtype=torch.bfloat16), weight(3, 24, 32), (2, 0, 3)),
            {},
        ),
    }


def of_problem(
    a: Tensor, parts: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """The arguments of f16a_nvfp4weight_scaled_grouped_mm for a [M, K] and a weight in linear
    order.
    """
    codes, block_scale, decode_scale = parts
    ints = problem(sizes, codes.shape[1], 2 * codes.shape[2])
    return (a, codes.mT, loops.swizzled(block_scale), decode_scale, *ints)


def problem(sizes: tuple[int, ...], n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """offsets, blockscale_offsets and problem_sizes, counted on the host."""
    starts = [sum(sizes[:g]) for g in range(len(sizes))]
    padded = [sum(-(-m // 128) * 128 for m in sizes[:g]) for g in range(len(sizes))]
    return tuple(
        torch.tensor(t, dtype=torch.int32) for t in (starts, padded, [[m, n, k] for m in sizes])
    )


@pytest.mark.parametrize("name", few(calls(), 5))
def test_two_runs_give_the_same_bits_and_new_memory(name):
    args, kwargs = calls()[name]
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    first, second = (
        r if isinstance(r, tuple) else (r,)
        for r in (getattr(OPS, name)(*args, **kwargs) for _ in range(2))
    )
    assert_same_bits(first, second)
    # inputs stay
    assert_same_bits(
        [a for a in args if isinstance(a, Tensor)], [a for a in before if isinstance(a, Tensor)]
    )
    storages = [
        t.untyped_storage().data_ptr() for t in (*first, *second, *args) if isinstance(t, Tensor)
    ]
    assert len(set(storages)) == len(storages)
    assert all(t.is_contiguous() for t in first)


@pytest.mark.parametrize("name", calls())
def test_meta(name):
    """Meta tensors give what real ones give."""
    args, kwargs = calls()[name]
    real = getattr(OPS, name)(*args, **kwargs)
    meta = getattr(OPS, name)(
        *(a.to("meta") if isinstance(a, Tensor) else a for a in args), **kwargs
    )
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (real, meta)), strict=True):
        assert (a.shape, a.dtype, a.stride(), b.device.type) == (
            b.shape,
            b.dtype,
            b.stride(),
            "meta",
        )


def count_flops(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_flops():
    """Two for each multiply-add of a product, forward and backward."""
    gate_up, down = experts(3, hidden=64, inner=32)
    a, ends = random(7, 64).requires_grad_(), torch.tensor([2, 4, 7], dtype=torch.int32)
    n, k = gate_up[0].shape[1], 64
    assert count_flops(lambda: OPS.nvfp4_grouped_mm(a.detach(), *gate_up, ends)) == 2 * 7 * n * k
    assert (
        count_flops(lambda: OPS.nvfp4_grouped_mm(a, *gate_up, ends).sum().backward())
        == 2 * 2 * 7 * n * k
    )
    x, ids, w = random(5, 64), torch.zeros(5, 2, dtype=torch.int64), random(5, 2)
    assert count_flops(lambda: OPS.expert_mlp(x, ids, w, *gate_up, *down)) == 2 * 10 * (
        64 * 64 + 64 * 32
    )
    assert count_flops(lambda: OPS.scaled_swiglu(x)) == 0  # as torch counts: products
