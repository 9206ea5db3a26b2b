"""Training on the CUDA backend, on a GPU: the three products with what is fused to them, layers,
modules, CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import long_sums
import pytest
import torch
from test_cuda_kernels import DTYPES
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import compile_fusion
from fusion_moe.errors import GroupsError
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.nn import GroupedLinear, ScaledSwiGLU, Sequential, swiglu
from fusion_moe.recipe import MXFP8BlockScaling
from fusion_moe.runtime.program import Program

pytestmark = pytest.mark.gpu

ops = torch.ops.fusion_moe
SPLITS = {
    "ragged": [0, 1, 7, 15, 17, 127, 128, 129],
    "none": [0, 0, 0, 0],
    "all in one": [0, 0, 300, 0],
    "uneven": [115, 144, 8, 757],
    "one group": [333],
    "63 groups": [(5 * g) % 11 for g in range(63)],
    "65 groups": [(7 * g) % 13 for g in range(65)],
    "256 groups": [g % 3 for g in range(256)],
}
TAIL = 37  # rows that belong to no group


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def compiled(fusion: Fusion) -> Program:
    """By kernels alone."""
    program = compile_fusion(fusion, TARGETS["cuda"], options.current())
    assert all(segment.plan.backend == "cuda" for segment in program.segments)
    return program


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Small ones: float32 sums of their products are exact."""
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def ends_of(splits: Sequence[int]) -> Tensor:
    return torch.tensor(list(accumulate(splits)), dtype=torch.int32, device="cuda")


# Sums ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", long_sums.KINDS)
def test_errors_of_long_sums_do_not_grow(kind):
    """Those of a single accumulator of each thread are above 1e-6 here."""
    fusion, shape, axis = long_sums.sum_of(kind, 4_000_000)
    x = torch.rand(shape, device="cuda")
    (found,) = compiled(fusion)(long_sums.inputs_of(kind, x))
    assert long_sums.error(found, x, axis) < 2e-7


def test_long_sums_do_not_stand_still():
    """Each of the warps that share a group's rows has more than 2^24 of them."""
    fusion, shape, _ = long_sums.sum_of("rows of a group", 2**28)
    (found,) = compiled(fusion)(
        long_sums.inputs_of("rows of a group", torch.ones(1, 1, device="cuda").expand(shape))
    )
    assert found.tolist() == [[2**28] * 4]


# Products -----------------------------------------------------------------------------------------


def product(kind: str, dtype: str, groups: int, n: int, k: int, gathered: str) -> Fusion:
    """One product [M/g, ...], whose operands named in `gathered` are rows that an index picks."""
    fd = FusionDefinition()
    tokens, rows = fd.define_size("t"), fd.define_size("m")
    offs = fd.define_tensor(shape=(groups,), dtype="i32")
    ends = fd.groups_of(offs, rows)

    def operand(name: str, columns: int) -> object:
        x = fd.define_tensor(shape=(tokens if name in gathered else rows, columns), dtype=dtype)
        if name in gathered:
            x = fd.ops.index_select(x, fd.define_tensor(shape=(rows,), dtype="i32"), dim=0)
        return fd.ops.partition(x, ends)

    if kind == "wgrad":
        made = fd.ops.grouped_outer(operand("a", n), operand("b", k), ends)
    else:
        a = operand("a", k if kind == "fprop" else n)
        w = fd.define_tensor(shape=(groups, n, k), dtype=dtype)
        made = (fd.ops.grouped_mm if kind == "fprop" else fd.ops.grouped_mm_t)(a, w, ends)
    fd.add_output(made)
    return fd.fusion()


def inputs(
    fusion: Fusion, splits: Sequence[int], dtype: torch.dtype, poisoned: bool
) -> list[Tensor]:
    """Small integers; NaN in the rows of no group if `poisoned`."""
    rows, tokens = sum(splits) + TAIL, 41
    picks, found = (
        torch.randint(0, tokens, (rows,), device="cuda", dtype=torch.int32),
        list[Tensor](),
    )
    for v in fusion.inputs:
        shape = [{"t": tokens, "m": rows}.get(str(d), d) for d in v.type.shape]
        if v.type.dtype == "i32":
            found.append(ends_of(splits) if shape[0] == len(splits) and not found else picks)
            continue
        found.append(integers(*shape, dtype=dtype))
        if poisoned and str(v.type.shape[0]) == "m":
            found[-1][sum(splits) :] = float("nan")
    return found


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(
    ("kind", "gathered"),
    [("fprop", "a"), ("dgrad", "a"), ("dgrad", ""), ("wgrad", "a"), ("wgrad", "b"), ("wgrad", "")],
)
def test_products_exactly(kind, gathered, splits):
    for dtype, n, k in (
        ("bf16", 192, 136),
        ("bf16", 100, 60),
        ("f16", 264, 320),
        ("bf16", 16, 328),
        ("bf16", 328, 16),
    ):
        fusion = product(kind, dtype, len(splits), n, k, gathered)
        given = inputs(fusion, splits, DTYPES[dtype], poisoned=False)
        (want,) = fusion.evaluate(*given)
        program = compiled(fusion)
        (found,) = program(given)
        assert torch.equal(found, want)
        for v, t in zip(fusion.inputs, given, strict=True):
            if t.is_floating_point() and str(v.type.shape[0]) == "m":
                t[sum(splits) :] = float("nan")
        (poisoned,) = program(given)
        assert torch.equal(poisoned, want)
    fusion_moe.synchronize()


@pytest.mark.parametrize("kind", ["dgrad", "wgrad"])
def test_wrong_ends_and_indices_are_made_safe_and_raised(kind):
    fusion = product(kind, "bf16", 4, 64, 64, "a")
    given = inputs(fusion, [9, 8, 0, 30], torch.bfloat16, poisoned=False)
    for i, wrong in (
        (0, [9, 3, 4000, -5]),
        (next(j for j, v in enumerate(fusion.inputs) if j and v.type.dtype == "i32"), None),
    ):
        bad = list(given)
        bad[i] = torch.tensor(wrong, dtype=torch.int32, device="cuda") if wrong else given[i] - 7
        compiled(fusion)(bad)
        with pytest.raises(GroupsError):
            fusion_moe.synchronize()


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    rows, k, n = 70_000, 64, 32_768
    x, w = integers(rows, k, dtype=torch.bfloat16), integers(2, n, k, dtype=torch.bfloat16)
    y = ops.grouped_mm(x, [w], ends_of([100, rows - 100]), weight_format="bf16")
    assert torch.equal(y[-300:], x[-300:] @ w[1].T)
    dx = ops.grouped_mm(y, [w], ends_of([100, rows - 100]), weight_format="bf16", transposed=True)
    assert torch.equal(dx[-3:].float(), (y[-3:].float() @ w[1].float()).bfloat16().float())


# Layers -------------------------------------------------------------------------------------------


def layer(experts: int, hidden: int, inner: int, *, bias: bool, transposed: bool) -> list[Tensor]:
    """gate_up, down and their biases, in float64."""

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").double() * shape[-2 if transposed else -1] ** -0.5

    found = [weight(experts, hidden, 2 * inner), weight(experts, inner, hidden)]
    if not transposed:
        found = [weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)]
    return [
        *found,
        *(
            [torch.randn(experts, n, device="cuda").double() for n in (2 * inner, hidden)]
            if bias
            else []
        ),
    ]


def loop(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    parts: Sequence[Tensor],
    *,
    transposed: bool,
    limit: float | None,
    alpha: float,
    up_offset: float,
) -> Tensor:
    """The layer in plain torch, expert by expert, gate and up interleaved."""
    y = torch.zeros_like(x)
    gate_up, down, *biases = parts
    for e in range(len(gate_up)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        z = x[token] @ (gate_up[e] if transposed else gate_up[e].T)
        z = z + biases[0][e] if biases else z
        gate, up = z.unflatten(1, (-1, 2)).unbind(2)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out = (gate * torch.sigmoid(alpha * gate) * (up + up_offset)) @ (
            down[e] if transposed else down[e].T
        )
        out = out + biases[1][e] if biases else out
        y = y.index_add(0, token, (out * w[token, slot][:, None]).to(y.dtype))
    return y


def gradients(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    dy: Tensor,
) -> list[Tensor]:
    given = [
        t.detach().to(dtype).requires_grad_() for t, dtype in zip(tensors, dtypes, strict=True)
    ]
    y = function(*given)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(t.grad for t in given)]


@pytest.mark.parametrize(
    ("tokens", "experts", "slots", "hidden", "inner", "bias", "transposed"),
    [
        (512, 8, 2, 256, 192, False, False),
        (333, 5, 2, 104, 72, False, False),
        (600, 16, 4, 256, 192, True, True),
        (64, 128, 8, 128, 64, True, False),
    ],
)
def test_gradients_are_better_than_torchs(tokens, experts, slots, hidden, inner, bias, transposed):
    """Errors against float64, at most 1.1 times those of torch's autograd in bfloat16; the same
    bits again and again.
    """
    ids = torch.rand(tokens, experts, device="cuda").topk(slots).indices
    how = {
        "transposed": transposed,
        "limit": 7.0 if bias else None,
        "alpha": 1.702 if bias else 1.0,
        "up_offset": float(bias),
    }
    values = [
        torch.randn(tokens, hidden, device="cuda"),
        torch.rand(tokens, slots, device="cuda"),
        *layer(experts, hidden, inner, bias=bias, transposed=transposed),
    ]
    values = [t if i == 1 else t.bfloat16().double() for i, t in enumerate(values)]
    dy = torch.randn(tokens, hidden, device="cuda").bfloat16()
    low = [torch.float32 if i == 1 else torch.bfloat16 for i in range(len(values))]

    def plain(x: Tensor, w: Tensor, *parts: Tensor) -> Tensor:
        return loop(x, ids, w, parts, **how)

    numbers = {name: how[name] for name in ("limit", "alpha", "up_offset")}
    text = swiglu(interleave=1, **numbers)

    def ours(x: Tensor, w: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        return ops.fused_experts(
            x,
            ids,
            w,
            [gate_up],
            [down],
            *biases,
            weight_format="bf16",
            activation=text,
            transposed=transposed,
        )

    exact, torchs = (
        gradients(plain, values, [torch.float64] * len(values), dy),
        gradients(plain, values, low, dy),
    )
    mine = gradients(ours, values, low, dy)
    for a, b, c in zip(exact, torchs, mine, strict=True):
        assert (c.double() - a).norm() <= 1.1 * (b.double() - a).norm()
    for _ in range(20):
        assert all(map(torch.equal, mine, gradients(ours, values, low, dy)))


# Modules and CUDA graphs --------------------------------------------------------------------------

ROWS, HIDDEN, INNER, GROUPS = 512, 128, 96, 8
PATTERNS = (
    [64] * 8,
    [0] * 8,
    [ROWS, *[0] * 7],
    [*[0] * 7, ROWS],
    [0, 100, 0, 200, 1, 0, 7, 9],
    [1] * 8,
    [115, 144, 8, 0, 0, 0, 0, 245],
    [63, 65, 127, 129, 0, 0, 0, 1],
)


def mlp() -> Sequential:
    torch.manual_seed(1)
    options_ = {"device": "cuda", "dtype": torch.bfloat16}
    return Sequential(
        GroupedLinear(GROUPS, HIDDEN, 2 * INNER, **options_),
        ScaledSwiGLU(),
        GroupedLinear(GROUPS, INNER, HIDDEN, scale_bias=True, **options_),
    )


class Step:
    """Forward, backward and a fused AdamW step on static tensors, under a recipe."""

    def __init__(self, recipe: MXFP8BlockScaling | None = None) -> None:
        self.model, self.recipe = mlp(), recipe
        self.x = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16().requires_grad_()
        self.dy, self.scales = (
            torch.randn(ROWS, HIDDEN, device="cuda").bfloat16(),
            torch.rand(ROWS, device="cuda").requires_grad_(),
        )
        self.splits = torch.tensor(PATTERNS[0], device="cuda")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, fused=True, capturable=True
        )

    def __call__(self) -> list[Tensor]:
        with fusion_moe.autocast(self.recipe):
            y = self.model(self.x, self.splits, self.scales, self.splits, self.scales)
        params = [self.x, self.scales, *self.model.parameters()]
        grads = torch.autograd.grad(y, params, self.dy)
        for p, g in zip(self.model.parameters(), grads[2:], strict=True):
            p.grad = g
        self.optimizer.step()
        return [y.detach(), *grads]


@pytest.mark.parametrize(
    "recipe", [None, MXFP8BlockScaling(), MXFP8BlockScaling(wgrad="bf16")], ids=str
)
def test_a_captured_step_equals_eager_with_other_splits(recipe):
    eager, captured = Step(recipe), Step(recipe)
    with torch.no_grad():
        captured.x.copy_(eager.x), captured.dy.copy_(eager.dy), captured.scales.copy_(eager.scales)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            captured()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        eager()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = captured()
    for i in range(50):
        for step in (eager, captured):
            step.splits.copy_(torch.tensor(PATTERNS[i % len(PATTERNS)]))
        want = eager()
        graph.replay()
        assert all(map(torch.equal, static, want)), i
        assert not want[0][sum(PATTERNS[i % len(PATTERNS)]) :].any()
    fusion_moe.synchronize()
    assert all(map(torch.equal, captured.model.parameters(), eager.model.parameters()))


def test_nothing_is_copied_to_the_host():
    step = Step()
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    assert not [e.name for e in profile.events() if "DtoH" in e.name]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_equals_eager(mode):
    model = mlp()
    torch._dynamo.reset()
    compiled_ = torch.compile(model, mode=mode)
    for pattern in (PATTERNS[0], PATTERNS[4], PATTERNS[1], PATTERNS[0], PATTERNS[6]):
        torch.compiler.cudagraph_mark_step_begin()
        splits = torch.tensor(pattern, device="cuda")
        x, scales = (
            torch.randn(ROWS, HIDDEN, device="cuda").bfloat16().requires_grad_(),
            torch.rand(ROWS, device="cuda").requires_grad_(),
        )
        dy = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
        found = [
            g.clone()
            for g in torch.autograd.grad(
                compiled_(x, splits, scales, splits, scales), [x, scales, *model.parameters()], dy
            )
        ]
        want = torch.autograd.grad(
            model(x, splits, scales, splits, scales), [x, scales, *model.parameters()], dy
        )
        assert all(map(torch.equal, found, want))
