"""Training with float weights: gradients against a loop over groups in float64, each set of wanted
ones, what is kept, gradcheck.
"""

from __future__ import annotations

import pytest
import torch
from cover import examples
from fusions import assert_same_bits
from hypothesis import given, strategies as st
from routings import Partition, Routing, partitions, routings
from torch import Tensor

import fusion_moe
from fusion_moe.nn import swiglu

ops = torch.ops.fusion_moe
pytestmark = pytest.mark.usefixtures("meaning")  # kernels are compared with it in tests/backends
H, I = 6, 4


FORMATS = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
FLOATS = ("x", "w", "gate_up", "down", "gate_up_bias", "down_bias")


def loop(a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """a [M, K], w [G, N, K] -> [M, N], group by group."""
    cuts = [0, *ends.tolist(), len(a)]
    runs = [a[i:j] @ m.T for i, j, m in zip(cuts, cuts[1:-1], w, strict=False)]
    return torch.cat([*runs, a.new_zeros(cuts[-1] - cuts[-2], w.shape[1])])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def layer(
    routing: Routing, dtype: torch.dtype = torch.float64, transposed: bool = False
) -> dict[str, Tensor]:
    """The tensors of fused_experts."""
    (t, k), e = routing.ids.shape, routing.groups
    gate_up, down = drawn(e, 2 * I, H, seed=2, dtype=dtype), drawn(e, H, I, seed=3, dtype=dtype)
    weights = {
        n: v.mT.contiguous() if transposed else v for n, v in (("gate_up", gate_up), ("down", down))
    }
    made = {
        "x": drawn(t, H, dtype=dtype),
        "ids": routing.ids,
        "w": drawn(t, k, seed=1, dtype=dtype),
        **weights,
    }
    return made | {
        "gate_up_bias": drawn(e, 2 * I, seed=4, dtype=dtype),
        "down_bias": drawn(e, H, seed=5, dtype=dtype),
    }


def call(given: dict[str, Tensor], **options) -> Tensor:
    lists = {n: [t] if n in ("gate_up", "down") else t for n, t in given.items()}
    return ops.fused_experts(**lists, weight_format=FORMATS[given["gate_up"].dtype], **options)


def plain(given: dict[str, Tensor], transposed: bool = False, scale_on: str = "output") -> Tensor:
    """The same in a loop over the experts, in float64 if the tensors are."""
    x, ids, w = given["x"], given["ids"], given["w"]
    gate_up, down = (given[n].mT if transposed else given[n] for n in ("gate_up", "down"))
    out = torch.zeros_like(x)
    for e in range(len(gate_up)):
        t, s = (ids == e).nonzero(as_tuple=True)
        rows, scale = x[t], w[t, s, None]
        y = (rows * scale if scale_on == "input" else rows) @ gate_up[e].T + given["gate_up_bias"][
            e
        ]
        gate, up = y.chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ down[e].T + given["down_bias"][e]
        out = out.index_add(0, t, y if scale_on == "input" else y * scale)
    return out


def gradients(function, given: dict[str, Tensor], wanted, dy: Tensor) -> dict[str, Tensor | None]:
    leaves = {n: t.detach().clone().requires_grad_(n in wanted) for n, t in given.items()}
    function(leaves).backward(dy)
    return {n: t.grad for n, t in leaves.items()}


SMALL = routings().filter(lambda routing: routing.groups < 10 and 0 < routing.ids.shape[0] < 20)


@examples(0.4)
@given(routing=SMALL, transposed=st.booleans(), scale_on=st.sampled_from(("output", "input")))
def test_fused_experts_against_a_loop(routing, transposed, scale_on):
    given, dy = layer(routing, transposed=transposed), drawn(len(routing.ids), H, seed=9)
    found = gradients(
        lambda leaves: call(leaves, transposed=transposed, scale_on=scale_on), given, FLOATS, dy
    )
    want = gradients(lambda leaves: plain(leaves, transposed, scale_on), given, FLOATS, dy)
    for n in FLOATS:
        torch.testing.assert_close(found[n], want[n], rtol=1e-10, atol=1e-10)


# nobody goes to 2 and 5
ROUTING = Routing(torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [4, 4]]), 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wanted_gradients(dtype):
    """Each alone and all: wanted ones are near float64's, the others are None."""
    given, dy = layer(ROUTING, dtype), drawn(5, H, seed=9, dtype=dtype)
    want = gradients(
        plain,
        {n: t.double() if t.is_floating_point() else t for n, t in given.items()},
        FLOATS,
        dy.double(),
    )
    for wanted in (*((name,) for name in FLOATS), FLOATS):
        found = gradients(call, given, wanted, dy)
        assert {n for n in FLOATS if found[n] is not None} == set(wanted)
        for n in wanted:
            assert found[n].dtype == dtype
            off = (found[n].double() - want[n]).norm()
            assert off < 8 * torch.finfo(dtype).eps * want[n].norm()
    assert not found["gate_up"][[2, 5]].any()
    assert not found["down_bias"][[2, 5]].any()


@examples(0.7)
@given(
    partition=partitions().filter(lambda partition: len(partition.sizes) < 10),
    transposed=st.booleans(),
    dtype=st.sampled_from(list(FORMATS)),
)
def test_what_no_group_has_enters_no_gradient(partition: Partition, transposed, dtype):
    """NaN in rows past the last end, of activations and of the gradient: all bits are those without
    such rows.
    """
    used, offs = sum(partition.sizes), partition.ends
    shape = (len(partition.sizes), 5, 3) if transposed else (len(partition.sizes), 3, 5)
    a, dy, w = (
        drawn(partition.rows, 5, dtype=dtype),
        drawn(partition.rows, 3, seed=1, dtype=dtype),
        drawn(*shape, seed=2, dtype=dtype),
    )
    bias = drawn(len(partition.sizes), 3, seed=3, dtype=dtype)
    a[used:] = dy[used:] = float("nan")

    def product(given):
        y = ops.grouped_mm(
            given["a"], [given["w"]], offs, weight_format=FORMATS[dtype], transposed=transposed
        )
        return ops.group_add(y, given["bias"], offs)

    padded = gradients(product, {"a": a, "w": w, "bias": bias}, ("a", "w", "bias"), dy)
    found = gradients(product, {"a": a[:used], "w": w, "bias": bias}, ("a", "w", "bias"), dy[:used])
    assert_same_bits(
        [padded["a"][:used], padded["w"], padded["bias"]], [found["a"], found["w"], found["bias"]]
    )
    assert not padded["a"][used:].any()
    wide = {"a": a[:used].double(), "w": w.double(), "bias": bias.double()}
    groups = torch.repeat_interleave(torch.tensor(partition.sizes))
    want = gradients(
        lambda g: loop(g["a"], g["w"].mT if transposed else g["w"], offs) + g["bias"][groups],
        wide,
        wide,
        dy[:used].double(),
    )
    for n in want:
        assert (found[n].double() - want[n]).norm() <= 4 * torch.finfo(dtype).eps * want[n].norm()


def test_gradients_are_rounded_once():
    """From float32 sums: whole numbers that 16 bits do not add up, but hold."""
    a, dy = torch.ones(512, 1).bfloat16(), torch.ones(512, 1).bfloat16()
    dy[0] = 257 / 256  # 512 + 1 / 256: added up in bf16 it would stay 256
    w, bias = (torch.ones(shape).bfloat16().requires_grad_() for shape in ((1, 1, 1), (1, 1)))
    offs = torch.tensor([512], dtype=torch.int32)
    ops.group_add(ops.grouped_mm(a, [w], offs, weight_format="bf16"), bias, offs).backward(dy)
    assert w.grad.item() == bias.grad.item() == 512


OPTIONS = {
    "interleaved": {"activation": swiglu(interleave=2)},
    "gpt-oss": {"activation": swiglu(limit=1.5, alpha=1.702, up_offset=1.0, interleave=1)},
    "scale on the input": {"scale_on": "input"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck_of_fused_experts(options):
    given = {n: t.requires_grad_(t.is_floating_point()) for n, t in layer(ROUTING).items()}

    def function(*values):
        return call(dict(zip(given, values, strict=True)), **options)

    assert torch.autograd.gradcheck(function, tuple(given.values()), fast_mode=True)


def test_gradcheck():
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)  # an empty group, a row of no group
    a, w, bias, scale = (
        drawn(*s, seed=i).requires_grad_() for i, s in enumerate(((6, 4), (3, 8, 4), (3, 8), (6,)))
    )
    wt = drawn(3, 4, 8, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, w: ops.grouped_mm(a, [w], offs, weight_format="f64"), (a, w)
    )
    assert torch.autograd.gradcheck(
        lambda a, w: ops.grouped_mm(a, [w], offs, weight_format="f64", transposed=True), (a, wt)
    )
    y = drawn(6, 8, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(lambda y, bias: ops.group_add(y, bias, offs), (y, bias))
    for options in ({}, {"interleave": 2, "limit": 1.5, "alpha": 1.702, "up_offset": 1.0}):
        assert torch.autograd.gradcheck(
            lambda y, scale, options=options: ops.scaled_swiglu(y, scale, **options), (y, scale)
        )


def test_compiled():
    given = {
        n: t.requires_grad_(n in FLOATS)
        for n, t in layer(ROUTING, torch.float32, transposed=True).items()
    }
    dy = drawn(5, H, seed=9, dtype=torch.float32)
    want = gradients(lambda leaves: call(leaves, transposed=True), given, FLOATS, dy)
    step = torch.compile(
        lambda leaves: call(leaves, transposed=True), backend="fusion_moe", fullgraph=True
    )
    with fusion_moe.options.override(target="auto"):
        found = gradients(step, given, FLOATS, dy)
    for n in FLOATS:
        torch.testing.assert_close(found[n], want[n], rtol=1e-5, atol=1e-5)
