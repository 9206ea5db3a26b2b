"""thunder.jit with our executor: the bits of eager, gradients, operations of users, other
executors, what is told.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch
from moe_models import (
    Block,
    Experts,
    G,
    H,
    I,
    Mlp,
    O,
    calls,
    routing,
    tokens,
    weight,
    writes_between,
)
from torch import nn
from users_operations import library

import fusion_moe
from fusion_moe import errors, options, translator
from fusion_moe.definitions import translate
from fusion_moe.ir.core import Fusion
from fusion_moe.ops import topk_router
from fusion_moe.thunder import thunder_executors

pytestmark = pytest.mark.thunder

ENDS = torch.tensor([1, 1, 4, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def every_rounding() -> Iterator[None]:
    """Programs round where eager rounds."""
    with options.override(contract_rounding=False):
        yield


def jitted(f, *before, **how):
    """f under thunder.jit with our executor, then those given, then thunder's defaults."""
    import thunder

    ours, *defaults = thunder_executors()
    return thunder.jit(f, executors=(ours, *before, *defaults), **how)


def fusions(f) -> list:
    """The fusions in the forward trace of the last call, as bound symbols."""
    import thunder

    return [
        b
        for b in thunder.last_traces(f)[-1].bound_symbols
        if b.sym.name.startswith("fusion_moe") and b.sym.is_fusion
    ]


def backward_fusions(f) -> list:
    import thunder

    return [b for b in thunder.last_backward_traces(f)[-1].bound_symbols if b.sym.is_fusion]


def programs(bsyms) -> list[Fusion]:
    return [call.program.stages[0][1] for b in bsyms for call in b._call_ctx.values()]


def products(bsyms) -> list[str]:
    return [
        op.kind.name for fusion in programs(bsyms) for op in fusion.ops if op.kind.role == "grouped"
    ]


def bf16(*lead: int, seed: int = 1) -> torch.Tensor:
    return tokens(*lead, seed=seed).bfloat16()


def halved(model: Block) -> Block:
    """The block with a router in bf16; quantized weights stay as they are."""
    model.experts.router.bfloat16()
    return model


def found(f, *args, **kwargs):
    from fusion_moe.thunder import found_in

    (result,) = found_in(f, args, kwargs)
    return result


# ---------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize(
    ("small", "context"),
    [(False, torch.inference_mode), (True, torch.no_grad), (True, torch.enable_grad)],
)
def test_a_block_is_one_fusion_with_the_bits_of_eager(small, context):
    model, x = halved(Block(small)), bf16(5)
    with context():
        run = jitted(model)
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=0)
    assert len(fusions(run)) == 1


def test_the_trace_shows_what_is_inside_of_a_fusion(golden):
    from thunder.core.trace import tracectx

    run = jitted(halved(Block(small=True)))
    with torch.no_grad():
        run(bf16(5))
    import thunder

    (fusion,) = fusions(run)
    with tracectx(thunder.last_traces(run)[-1]):
        text = "\n".join(fusion.python(indent=0, print_depth=2))
    # thunder's depend on its version
    names = {name: f"t{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"\bt\d+\b", text)))}
    golden(re.sub(r"\bt\d+\b", lambda found: names[found[0]], text))


class Routed(nn.Module):
    """A router by `topk_router`, and its experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(
            torch.randn(G, H, generator=torch.Generator().manual_seed(0)) / H**0.5
        )
        self.parts = (*weight(2 * I, H), *weight(H, I))

    def forward(self, x):
        w, ids = topk_router(nn.functional.linear(x.float(), self.gate), 2, renormalize=True)
        return O.expert_mlp(x, ids, w, *self.parts)


def test_a_router_is_in_the_program_of_its_experts():
    """The bits of eager, forward and backward."""
    model, x = Routed(), bf16(9)
    run, found = jitted(model), []
    for call in (run, model):
        given = x.clone().requires_grad_()
        y = call(given)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), [given, model.gate])))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    (program,) = programs(fusions(run))
    assert {"topk_ids", "topk_weights", "route", "grouped_mm"} <= {
        op.kind.name for op in program.ops
    }


def test_all_token_counts():
    model = Experts()
    run = jitted(model)
    with torch.no_grad():
        for count in (5, 0, 1, 33):
            torch.testing.assert_close(run(tokens(count)), model(tokens(count)), rtol=0, atol=0)


def test_options_in_force_at_the_first_call_hold():
    x, model = bf16(5), Mlp()
    with options.override(contract_rounding=True), torch.no_grad():
        want = model(x)
        run = jitted(model)
        assert run(x).equal(want)
    with torch.no_grad():
        assert run(x).equal(want)
        assert not model(x).equal(want)


def test_the_name_of_the_executor():
    import thunder

    thunder_executors()
    run = thunder.jit(Mlp(), executors=["fusion_moe"])
    with torch.no_grad():
        torch.testing.assert_close(run(tokens(5)), Mlp()(tokens(5)), rtol=0, atol=0)
    assert len(fusions(run)) == 1


# ------------------------------------------------------------------------------------------- memory


def test_fusions_do_not_reach_over_writes():
    f = writes_between()
    ours, theirs = tokens(5), tokens(5)
    run = jitted(f)
    with torch.no_grad():
        torch.testing.assert_close(run(ours), f(theirs), rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert len(fusions(run)) == 2


@pytest.mark.parametrize("strides", ["transposed", "every other row", "expanded", "negated"])
def test_inputs_of_any_strides(strides):
    made = {
        "transposed": lambda: tokens(5).t().contiguous().t(),
        "every other row": lambda: tokens(10)[::2],
        "expanded": lambda: tokens(1).expand(5, H),
        "negated": lambda: torch._neg_view(tokens(5)),
    }
    ours, theirs = (made[strides]().requires_grad_() for _ in range(2))
    model = Experts()
    got, want = jitted(model)(ours), model(theirs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    got.sum().backward()  # the gradient that comes in is expanded
    want.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------- gradients


def call_of(name: str):
    """A function of float tensors that calls an operation, and these tensors."""
    up, down, (ids, w), ends = weight(2 * I, H), weight(H, I), routing(5), ENDS
    slot_of, y = O.route(ids, G)[2], tokens(10)
    return {
        "expert_mlp": (lambda x, w: O.expert_mlp(x, ids, w, *up, *down), tokens(5), w),
        "expert_mlp with biases": (
            lambda x, w, a, b: O.expert_mlp(x, ids, w, *up, *down, a, b, scale_on="input"),
            tokens(5),
            w,
            torch.randn(G, 2 * I),
            torch.randn(G, H),
        ),
        "float weights": (
            lambda x, up, down: O.fused_experts(x, ids, w, [up], [down], weight_format="f32"),
            tokens(5),
            torch.randn(G, 2 * I, H),
            torch.randn(G, H, I),
        ),
        "nvfp4_grouped_mm": (lambda x: O.nvfp4_grouped_mm(x, *up, ends), tokens(5)),
        "scaled_swiglu": (
            lambda x, scale: O.scaled_swiglu(x, scale, limit=1.0, alpha=1.7),
            tokens(3, 5),
            torch.rand(3, 5),
        ),
        "combine": (lambda y, w: O.combine(y, slot_of, w), y, w),
        "group_add": (lambda x, bias: O.group_add(x, bias, ends), tokens(5), torch.randn(G, H)),
    }[name]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("expert_mlp", torch.float32),
        ("expert_mlp with biases", torch.bfloat16),
        ("nvfp4_grouped_mm", torch.float32),
        ("scaled_swiglu", torch.bfloat16),
        ("combine", torch.float32),
        ("group_add", torch.bfloat16),
    ],
)
def test_gradients_of_operations_are_those_of_eager(name, dtype):
    f, *values = call_of(name)
    ours, theirs = ([v.to(dtype).requires_grad_() for v in values] for _ in range(2))
    run = jitted(f)
    got, want = run(*ours), f(*theirs)
    assert got.equal(want)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    got.backward(grad)
    want.backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad.equal(b.grad)


@pytest.mark.parametrize("name", ["expert_mlp with biases", "float weights", "group_add"])
def test_autocast_casts_as_in_eager(name):
    f, *values = call_of(name)
    ours, theirs = ([v.requires_grad_() for v in map(torch.clone, values)] for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = jitted(f)(*ours), f(*theirs)
    assert got.dtype == want.dtype
    assert got.equal(want)
    got.float().sum().backward()
    want.float().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad.dtype == b.grad.dtype
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)


def test_autocast_may_be_off_for_a_part():
    f, x = call_of("nvfp4_grouped_mm")

    def part(x):
        with torch.autocast("cpu", enabled=False):
            return f(x)

    with torch.autocast("cpu", torch.bfloat16):
        got = jitted(part)(x.requires_grad_())
    assert got.equal(f(x))
    got.sum().backward()
    assert x.grad.dtype == torch.float32


def test_gradients_of_some_inputs():
    f, *values = call_of("expert_mlp")
    ours, theirs = ([v.clone().requires_grad_(i == 1) for i, v in enumerate(values)] for _ in "ab")
    jitted(f)(*ours).sum().backward()
    f(*theirs).sum().backward()
    # what else is wanted decides the product
    torch.testing.assert_close(ours[1].grad, theirs[1].grad)
    assert ours[0].grad is None


@pytest.mark.parametrize("small", [False, True], ids=["one operation", "small operations"])
def test_training_a_block(small):
    model, (ours, theirs) = Block(small), (tokens(5).requires_grad_() for _ in range(2))
    want = model(theirs)
    want.square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    run = jitted(model)
    got = run(ours)
    got.square().sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
    assert fusions(run)
    assert [products(f(run)) for f in (fusions, backward_fusions)] == [
        ["grouped_mm"] * 2,
        ["grouped_mm_t"] * 2,
    ]
    # what stands between them is fused with them
    ops = [op.kind.name for fusion in programs(backward_fusions(run)) for op in fusion.ops]
    assert ops.count("mul") > 2


def test_quantized_weights_have_no_gradient_and_it_is_told_when_one_is_wanted():
    up = weight(2 * I, H)
    scale = up[2].clone().requires_grad_()
    run = jitted(lambda x: O.nvfp4_grouped_mm(x, up[0], up[1], scale, ENDS))
    y = run(tokens(5))  # a forward pass in grad mode is fine
    with pytest.raises(errors.UnsupportedError, match="b_decode_scale is part of a packed weight"):
        y.sum().backward()


# ------------------------------------------------------------------------------ operations of users


@pytest.fixture
def define():
    """Defines operations of a user; there is one already: relu(x) ** power, without derivative and
    translator.
    """
    with library("thunder_user") as define:
        schema = "(Tensor x, int power=2) -> Tensor"
        body, fake = lambda x, power=2: x.relu() ** power, lambda x, power=2: torch.empty_like(x)
        define("squared_relu", schema, body, fake)
        yield define


def translate_squared_relu() -> None:
    @translator("thunder_user::squared_relu")
    def _(fd, x, power=2):
        if power != 2:
            raise fusion_moe.Untranslatable(f"power = {power}", expected="2")
        y = fd.ops.relu(x)
        return fd.ops.mul(y, y)


class Relu(nn.Module):
    """Two products with the user's operation between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weight(I, H), weight(H, I)

    def forward(self, x, power=2):
        y = torch.ops.thunder_user.squared_relu(O.nvfp4_grouped_mm(x, *self.up, ENDS), power)
        return O.nvfp4_grouped_mm(y, *self.down, ENDS)


def test_a_users_operation_is_fused(define):
    translate_squared_relu()
    run, model = jitted(Relu()), Relu()
    with torch.no_grad():
        assert run(tokens(5)).equal(model(tokens(5)))
    (fusion,) = programs(fusions(run))
    assert [op.kind.name for op in fusion.ops].count("grouped_mm") == 2


def test_a_users_operation_that_its_translator_refuses(define):
    translate_squared_relu()
    model = Relu()
    with torch.no_grad():
        assert jitted(model)(tokens(5), 3).equal(model(tokens(5), 3))
        result = found(model, tokens(5), 3)
    (left,) = [x for x in result.not_fused if x.op == "thunder_user.squared_relu.default"]
    assert left.why == "refused: power = 3; expected 2"
    assert left.source.endswith(
        "in forward: y = "
        "torch.ops.thunder_user.squared_relu(O.nvfp4_grouped_mm(x, "
        "*self.up, ENDS), power)"
    )
    assert len(result.regions) == 2


def test_a_translator_at_fault(define, caplog):
    """the operation stays a call, and a warning names the translator, once"""
    translator("thunder_user::squared_relu")(lambda fd, x, power=2: fd.ops.cast(x, dtype="f64"))
    model = Relu()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fusion_moe"):
        for _ in range(2):
            assert jitted(model)(tokens(5)).equal(model(tokens(5)))
    (record,) = caplog.records
    assert "thunder_user.squared_relu.default" in record.message
    assert "the translator of thunder_user::squared_relu" in record.message


def test_the_derivative_that_a_user_registered(define):
    """it saves a result, and is fused with the derivatives around it"""
    translate_squared_relu()

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.power = inputs[1]

    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return ctx.power * y.sqrt() * grad, None

    model, (ours, theirs) = Relu(), (tokens(5).requires_grad_() for _ in range(2))
    run, name = jitted(model), "thunder_user::squared_relu"
    with torch.library._scoped_library("thunder_user", "FRAGMENT") as lib:
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=lib)
        run(ours).sum().backward()
        model(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    (fusion,) = programs(backward_fusions(run))
    names = [op.kind.name for op in fusion.ops]
    assert names.count("grouped_mm_t") == 2
    assert "sqrt" in names


def test_an_operation_without_derivative(define):
    """runs in grad mode, and says what is missing when its gradient is wanted"""

    @torch.library.custom_op("thunder_user::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    halved.register_fake(torch.empty_like)
    translator("thunder_user::halved")(lambda fd, x: fd.ops.mul(x, 0.5))
    up, x = weight(I, H), tokens(5).requires_grad_()
    y = jitted(lambda x: halved(O.nvfp4_grouped_mm(x, *up, ENDS)))(x)
    with pytest.raises(
        errors.UnsupportedError, match="halved.* no autograd formula was registered"
    ):
        y.sum().backward()


def test_translators_of_operations_that_do_not_exist(define):
    """there may be none yet, or no such overload"""
    translate_squared_relu()
    names = ("no_such_library::op", "thunder_user::no_such_op", "thunder_user::squared_relu.other")
    for name in names:
        translator(name)(lambda fd, x: x)
    try:
        with torch.no_grad():
            assert jitted(Relu())(tokens(5)).equal(Relu()(tokens(5)))
    finally:
        for name in names:
            translate.unregister(name)


def test_a_part_of_an_operation_is_not_fused(define):
    """relu is translated and cumsum is not: what thunder has as one bound symbol stays one"""
    with torch.library._scoped_library("thunder_user", "FRAGMENT") as lib:
        lib.define("running(Tensor x) -> Tensor")
        lib.impl("running", lambda x: x.relu().cumsum(0), "CompositeImplicitAutograd")
        translator("thunder_user::running")(lambda fd, x: fd.ops.neg(x))
        up = weight(I, H)
        f = lambda x: torch.ops.thunder_user.running(O.nvfp4_grouped_mm(x, *up, ENDS))  # noqa: E731
        with torch.no_grad():
            assert jitted(f)(tokens(5)).equal(f(tokens(5)))
            result = found(f, tokens(5))
    assert [calls(r.nodes) for r in result.regions] == [["fusion_moe.nvfp4_grouped_mm.default"]]
    assert "fusing it would split an operation of thunder's" in [x.why for x in result.not_fused]


# ---------------------------------------------------------------------------------- other executors


def test_an_executor_that_keeps_what_it_could_fuse():
    """as nvFuser's does: our regions take what it has not fused yet"""
    from thunder.extend import FusionExecutor

    class Keeps(FusionExecutor):
        def can_fuse(self, bsym):
            return bsym.sym.executor is None and bsym.sym.python_impl is None

        def fusion_pass(self, trace):
            return trace

    model, x = Block(small=True), tokens(5)
    run = jitted(model, Keeps("keeps"))
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=1e-6)
    assert len(fusions(run)) == 1
    ours, theirs = (tokens(5).requires_grad_() for _ in range(2))
    run(ours).sum().backward()
    model(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_experts_of_transformers():
    """the block of the small Qwen3-MoE that the examples train"""
    pytest.importorskip("transformers")
    from tiny_qwen3 import qwen3_moe

    model = qwen3_moe(num_experts=8).bfloat16()
    fusion_moe.quantize_(model)
    block, x = model.model.layers[0].mlp, torch.randn(1, 6, 32, dtype=torch.bfloat16)
    run = jitted(block)
    with torch.no_grad():
        assert run(x).equal(block(x))
    assert len(fusions(run)) == 1


# ------------------------------------------------------------------------------------- what is told


def test_what_is_found():
    model = Block()
    with torch.no_grad():
        result = found(lambda x: model(x), tokens(5))
    (region,) = result.regions
    assert calls(region.nodes) == ["fusion_moe.expert_mlp.default", "aten.add.Tensor"]
    sources = {op.source.partition(":")[0] for op in region.fusion.ops}
    assert sources == {"moe_models.py"}
    assert any("return O.expert_mlp(" in op.source for op in region.fusion.ops)
    assert {x.op: x.why for x in result.not_fused}["aten.topk.default"] == "it has no translator"


def test_open_sizes_are_refused_with_a_sentence():
    """thunder calls its own option experimental; 0.2.6 has it for functions alone"""
    ids, w = routing(5)
    parts = (*weight(2 * I, H), *weight(H, I))
    run = jitted(lambda x: O.expert_mlp(x, ids, w, *parts), cache="symbolic values")
    with torch.no_grad(), pytest.raises(errors.UnsupportedError, match="cache='symbolic values'"):
        run(tokens(5))
    plain = jitted(lambda x: x * 2, cache="symbolic values")
    assert plain(tokens(5)).equal(tokens(5) * 2)
    assert plain(tokens(7)).equal(tokens(7) * 2)


# torch's grouped product --------------------------------------------------------------------------


def test_torchs_grouped_product_is_fused():
    """thunder's own executor of it takes no arguments by default; its results and gradients are
    torch's
    """
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16()

    def f(x, w, ends):
        return torch.nn.functional.silu(torch._grouped_mm(x, w, offs=ends))

    compiled = jitted(f)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w, ENDS), f(x, w, ENDS))
    assert products(fusions(compiled)) == ["grouped_mm_t"]


def test_the_gradient_of_torchs_grouped_product():
    """of as many rows as its kernels take once they are transposed"""
    x, w = torch.randn(8, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16()

    def gradients(f):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        f(*leaves, torch.tensor([1, 1, 4, 8], dtype=torch.int32)).float().square().sum().backward()
        return [t.grad for t in leaves]

    f = torch._grouped_mm
    torch.testing.assert_close(gradients(jitted(lambda *a: f(*a))), gradients(f))
