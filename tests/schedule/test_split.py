"""Where Fusions are divided into kernels, why, and that the pieces do what the whole did."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cover import examples
from fusions import (
    assert_same_bits,
    evaluate,
    expert_mlp_variants,
    fusion_of_call,
    inputs_of,
    programs,
)
from hypothesis import given, strategies as st

import fusion_moe
from fusion_moe import FusionDefinition, options, schedule
from fusion_moe.backends import TARGETS
from fusion_moe.compile import segments
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.frontends.inductor.compile_graph import compile_calls
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.ir.core import Fusion
from fusion_moe.passes import PASSES
from fusion_moe.schedule.product import main_and_added, products
from fusion_moe.schedule.segment import Segment
from fusion_moe.target import Target

CPU = TARGETS["cpu"]
OPS = torch.ops.fusion_moe


def split(fusion: Fusion, target: Target) -> tuple[Segment, ...]:
    return segments(fusion, target, options.current())


def prepared(fusion: Fusion, target: Target = CPU) -> Fusion:
    for run in PASSES:
        fusion = run(fusion, target).verify()
    return fusion


def run_segments(fusion: Fusion, target: Target, *inputs):
    """The outputs, segment by segment: each gets only what it says it reads."""
    made = dict(zip(fusion.inputs, inputs, strict=True))
    for segment in split(fusion, target):
        segment.fusion.verify()
        env = fusion.bind(inputs)
        outputs = segment.fusion.evaluate(*(made[v] for v in segment.fusion.inputs), sizes=env)
        made.update(zip(segment.fusion.outputs, outputs, strict=True))
    return tuple(made[v] for v in fusion.outputs)


def shown(fusion: Fusion, target: Target = CPU) -> str:
    """Each segment in three lines: its kind, its operations, why it begins there."""
    lines = []
    for s in split(fusion, target):
        lines.append(f"{s.kind}: {' '.join(op.kind.name for op in s.fusion.ops)}")
        lines.append(f"    because {s.boundary}" if s.boundary else "    (first)")
    return "\n".join(lines)


def whole(fusion: Fusion, target: Target = CPU) -> str:
    """Each segment as text, with its schedule."""
    return "\n\n".join(
        f"# {s.plan.schedule}\n# {s.boundary or 'first'}\n{s.fusion}" for s in split(fusion, target)
    )


# Meaning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("is_output", [False, True])
def test_ends_of_a_problem_are_copied_into_each_segment(target, is_output):
    """No kernel makes them for others: each computes them from what it is given."""
    sizes, n = (3, 0, 6, 2), 32
    fd = FusionDefinition()
    x, w = (fd.define_tensor(shape=shape, dtype="bf16") for shape in ([12, n], [4, n, n]))
    starts, problem, padded = (
        fd.define_tensor(shape=shape, dtype="i32") for shape in ([4], [4, 3], [4])
    )
    ends = fd.groups_of_problem(starts, problem, padded, rows=12, n=n, k=n)
    y = fd.partition_by(x, ends)
    for _ in range(2):
        y = fd.ops.cast(fd.ops.grouped_mm(y, w, ends), dtype="bf16")
    for v in (y, ends) if is_output else (y,):
        fd.add_output(v)
    fusion = fd.fusion()
    products = [s for s in split(fusion, TARGETS[target]) if s.kind == "grouped_gemm"]
    assert len(products) == 2
    for segment in products:
        assert "problem_ends" in [op.kind.name for op in segment.fusion.ops]
        assert not any(v.type.ends for v in (*segment.fusion.inputs, *segment.fusion.outputs))
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=g).bfloat16() for shape in ((12, n), (4, n, n))]
    inputs += [
        torch.tensor(of, dtype=torch.int32)
        for of in ([0, 3, 3, 9], [[m, n, n] for m in sizes], [0, 128, 128, 256])
    ]
    want = evaluate(fusion, *inputs)
    assert_same_bits(run_segments(fusion, TARGETS[target], *inputs), want)
    for found, right in zip(fusion_moe.run(fusion, inputs), want, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-2, atol=0.2)


@examples(2)
@given(programs(), st.sampled_from(("cpu", "sm_100")), st.sampled_from((0, 5)))
def test_segments_do_what_the_fusion_does(fusion, target, tokens):
    inputs = inputs_of(tokens)
    assert_same_bits(run_segments(fusion, TARGETS[target], *inputs), evaluate(fusion, *inputs))


@given(programs())
def test_segments_are_a_partition(fusion):
    found = split(fusion, CPU)
    seen = [op for s in found for op in s.fusion.ops if not op.kind.view]
    assert len(seen) == len(set(seen))
    assert set(seen) == {op for op in fusion.ops if not op.kind.view}
    made = set(fusion.inputs)
    for s in found:
        assert made.issuperset(s.fusion.inputs)
        made.update(s.fusion.outputs)
        assert s.plan.backend == "reference" or s.kind == schedule.find(s.fusion, CPU).NAME
        if products(s.fusion):
            assert all(
                p.size(p.contracted) <= CPU.added_features[p.kind]
                for p in main_and_added(s.fusion)[1]
            )


@given(programs())
def test_every_boundary_has_a_reason(fusion):
    found = split(fusion, CPU)
    made = {v for s in found for v in s.fusion.outputs}
    for s in found:
        assert bool(s.boundary) == any(v in made for v in s.fusion.inputs)


@given(programs())
def test_without_fusing_each_operation_is_a_segment(fusion):
    with options.override(fuse=False):
        alone = split(fusion, CPU)
    assert all(sum(not op.kind.view for op in s.fusion.ops) <= 1 for s in alone)


def test_views_that_are_outputs():
    fd = FusionDefinition()
    x, offs = fd.define_tensor(shape=[-1, 4], dtype="f32"), fd.define_tensor(shape=[2], dtype="i32")
    ends = fd.ops.ends(offs, rows=x.type.shape[0], groups=fd.define_groups("g", 2))
    rows = fd.ops.partition(x, ends)
    y = fd.ops.neg(rows)
    for v in (ends, rows, y):
        fd.add_output(v)
    inputs = [torch.randn(3, 4), torch.tensor([1, 3], dtype=torch.int32)]
    assert_same_bits(run_segments(fd.fusion(), CPU, *inputs), evaluate(fd.fusion(), *inputs))
    outputs = fusion_moe.run(fd.fusion(), inputs)
    assert_same_bits(outputs, [inputs[1], inputs[0], -inputs[0]])
    assert not {t.data_ptr() for t in outputs} & {t.data_ptr() for t in inputs}


def test_outputs_are_contiguous_and_new():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    fd.add_output(fd.ops.permute(x, dims=(1, 0)))
    fd.add_output(fd.ops.neg(fd.ops.permute(x, dims=(1, 0))))
    fd.add_output(x)
    inputs = [torch.randn(3, 4)]
    outputs = fusion_moe.run(fd.fusion(), inputs)
    assert_same_bits(outputs, [inputs[0].T.contiguous(), -inputs[0].T.contiguous(), inputs[0]])
    assert all(t.is_contiguous() for t in outputs)
    assert len({t.data_ptr() for t in (*outputs, *inputs)}) == 4


def test_the_reference_takes_what_no_scheduler_accepts(monkeypatch):
    fd = FusionDefinition()
    fd.add_output(fd.ops.neg(fd.define_tensor(shape=[3], dtype="f32")))
    monkeypatch.setattr(schedule.pointwise, "ROLES", ())
    monkeypatch.setattr(schedule.rows, "ROLES", ())
    monkeypatch.setattr(schedule.layout, "ROLES", ())
    (segment,) = split(fd.fusion(), CPU)
    assert (segment.kind, segment.plan.backend) == ("single", "reference")
    assert segment.plan.why == "neg is neither pointwise nor a row operation"
    x = torch.randn(3)
    assert_same_bits(fusion_moe.run(fd.fusion(), [x]), [-x])


# One program, many ways in ------------------------------------------------------------------------

G, H, I, K = 4, 64, 32, 2


def weights(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return [
        t
        for shape in ((G, 2 * I, H), (G, H, I))
        for t in quantize(torch.randn(shape, generator=g), NVFP4)
    ]


def tokens(dtype=torch.bfloat16, count: int = 5, groups: int = G):
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(count, H, generator=g).to(dtype), torch.rand(count, K, generator=g)
    return x, torch.randint(0, groups, (count, K), generator=g), w


def small_ops(x, ids, w, *weights):
    ends, row_of, slot_of = OPS.route(ids, G)
    y = OPS.nvfp4_grouped_mm(x[row_of], *weights[:3], ends)
    y = OPS.scaled_swiglu(y)
    return OPS.combine(OPS.nvfp4_grouped_mm(y, *weights[3:], ends), slot_of, w)


def plain_swiglu(x, ids, w, *weights):
    ends, row_of, slot_of = OPS.route(ids, G)
    gate, up = OPS.nvfp4_grouped_mm(x.index_select(0, row_of), *weights[:3], ends).chunk(2, -1)
    # torch 2.10 decomposes silu into x * sigmoid(x), whose bits are others: there, what later ones
    # decompose it into
    y = (
        torch.nn.functional.silu(gate)
        if torch.__version__ >= "2.11"
        else gate / (torch.exp(-gate) + 1)
    ) * up
    return OPS.combine(OPS.nvfp4_grouped_mm(y, *weights[3:], ends), slot_of, w)


def one_op(x, ids, w, *weights):
    return OPS.expert_mlp(x, ids, w, *weights)


def traced(function, *args) -> Fusion:
    """The Fusion that torch.compile finds in a function."""
    torch._dynamo.reset()
    found = []
    fusion_pass = FusionPass(options.Options(contract_rounding=False), found=found.append)
    compiled = torch.compile(
        function,
        backend=lambda gm, inputs: compile_calls(fusion_pass, gm, inputs),
        dynamic=True,
        fullgraph=True,
    )
    # for the eager call; the compiled one has its own
    with torch.no_grad(), options.override(contract_rounding=False):
        # torch's eager silu has its own exp
        torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-6, atol=0)
    ((region,),) = [f.regions for f in found]
    return region.fusion


def by_hand(dtype="bf16") -> Fusion:
    fd = FusionDefinition()
    t, g = fd.define_size("s0"), fd.define_groups("g0", G)
    x = fd.define_tensor(shape=[t, H], dtype=dtype)
    ids = fd.define_tensor(shape=[t, K], dtype="i64")
    w = fd.define_tensor(shape=[t, K], dtype="f32")

    def weight(n, k):
        shapes = ([G, n, k // 2], "u8"), ([G, n, k // 16], "f8e4m3"), ([G], "f32")
        return fd.ops.pack(
            *(fd.define_tensor(shape=s, dtype=d, role="weight") for s, d in shapes),
            encoding="nvfp4",
            layout="linear",
        )

    gate_up, down = weight(2 * I, H), weight(H, I)
    ends, row_of, slot_of = fd.ops.route(ids, groups=g)
    y = fd.ops.cast(
        fd.ops.grouped_mm(fd.ops.index_select(x, row_of, dim=0), gate_up, ends), dtype=dtype
    )
    rows = y.type.shape[0]
    up = fd.ops.cast(fd.ops.slice(y, start_indices=(0, I), end_indices=(rows, 2 * I)), dtype="f32")
    gate = fd.ops.cast(fd.ops.slice(y, start_indices=(0, 0), end_indices=(rows, I)), dtype="f32")
    y = fd.ops.cast(fd.ops.mul(fd.ops.silu(gate), up), dtype=dtype)
    y = fd.ops.cast(fd.ops.grouped_mm(y, down, ends), dtype=dtype)
    fd.add_output(fd.ops.cast(fd.ops.combine(y, slot_of, w), dtype=dtype))
    return fd.fusion()


def test_one_program_many_ways_in(golden):
    """expert_mlp, the same in small operations, and a Fusion written by hand: the same two kernels,
    both grouped products.
    """
    args = (*tokens(), *weights())
    ways = {
        "expert_mlp": fusion_of_call("expert_mlp", *args),
        "by hand": by_hand(),
        "small operations, compiled": traced(small_ops, *args),
        "expert_mlp, compiled": traced(one_op, *args),
    }
    found = {name: whole(prepared(fusion)) for name, fusion in ways.items()}
    for name, text in found.items():
        assert text == found["expert_mlp"], name
    assert [s.kind for s in split(prepared(ways["expert_mlp"]), CPU)] == [
        "grouped_gemm",
        "grouped_gemm",
    ]
    golden(found["expert_mlp"])


def test_one_program_with_plain_torch_between():
    """In float32 torch's own silu and product mean what scaled_swiglu means, and give the same two
    kernels.
    """
    args = (*tokens(torch.float32), *weights())
    ways = [
        by_hand("f32"),
        fusion_of_call("expert_mlp", *args),
        traced(plain_swiglu, *args),
        traced(small_ops, *args),
    ]
    assert len({whole(prepared(fusion)) for fusion in ways}) == 1


def test_many_ways_in_give_the_same_bits():
    x, ids, w = tokens()
    packed = weights()
    want = OPS.expert_mlp(x, ids, w, *packed)
    with options.override(contract_rounding=False):
        exact = OPS.expert_mlp(x, ids, w, *packed)
        # small operations round between each two
        assert_same_bits([small_ops(x, ids, w, *packed)], [exact])
        assert_same_bits(fusion_moe.run(by_hand(), [x, ids, w, *packed]), [exact])
    assert_same_bits(fusion_moe.run(by_hand(), [x, ids, w, *packed]), [want])
    assert not exact.equal(want)  # this routing shows that a rounding was dropped
    scale = exact.float().square().mean().sqrt()
    assert (exact.float() - want.float()).abs().max() < 0.05 * scale


def test_schedulers_know_no_model():
    words = re.compile(
        r"\b(moe|experts?|router|swiglu|mlp|gate|top_?k|qwen|mixtral|deepseek|gpt|llama)\b",
        re.IGNORECASE,
    )
    root = Path(fusion_moe.__file__).parent
    for path in (root / "schedule").glob("*.py"):
        for match in words.finditer(path.read_text(encoding="utf-8")):
            pytest.fail(f"{path.name} says {match[0]!r}")


# Variants -----------------------------------------------------------------------------------------

VARIANTS = {**expert_mlp_variants(G, H, I), "nvfp4 activations": {"activation_format": "nvfp4"}}


def variant(name: str, dtype=torch.bfloat16):
    """(args, kwargs) of expert_mlp."""
    g = torch.Generator().manual_seed(2)
    made = {
        k: torch.randn(v, generator=g).to(dtype) if isinstance(v, tuple) else v
        for k, v in VARIANTS[name].items()
    }
    return (*tokens(dtype), *weights()), made


def test_variants(golden):
    """What each option of expert_mlp does to the boundaries."""
    said = []
    for name in VARIANTS:
        args, kwargs = variant(name)
        for target in ("cpu", "sm_90") if name != "nvfp4 activations" else ("reference", "sm_100"):
            fusion = prepared(fusion_of_call("expert_mlp", *args, **kwargs), TARGETS[target])
            said.append(f"{name} on {target}\n{shown(fusion, TARGETS[target])}\n")
    golden("\n".join(said))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_keep_every_bit(name):
    args, kwargs = variant(name)
    inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    for target in ("reference", "sm_100"):
        fusion = prepared(fusion_of_call("expert_mlp", *args, **kwargs), TARGETS[target])
        assert_same_bits(run_segments(fusion, TARGETS[target], *inputs), evaluate(fusion, *inputs))


# Broken -------------------------------------------------------------------------------------------


def changed(change) -> Fusion:
    """Two products, with something of `change` in between or behind."""
    fd = FusionDefinition()
    t, g = fd.define_size("t"), fd.define_groups("g", G)
    x = fd.define_tensor(shape=[t, H], dtype="f32")
    ids, w = (
        fd.define_tensor(shape=[t, K], dtype="i64"),
        fd.define_tensor(shape=[t, K], dtype="f32"),
    )
    first, second = (
        fd.define_tensor(shape=s, dtype="bf16", role="weight") for s in ([G, I, H], [G, H, I])
    )
    ends, row_of, slot_of = fd.ops.route(ids, groups=g)
    a = change("tokens", fd, x)
    a = change("rows", fd, fd.ops.index_select(a, row_of, dim=0))
    y = change("between", fd, fd.ops.grouped_mm(a, first, ends))
    z = change("after", fd, fd.ops.grouped_mm(fd.ops.silu(y), second, ends))
    fd.add_output(change("end", fd, fd.ops.combine(z, slot_of, w)))
    return fd.fusion()


def at(place, function):
    return lambda here, fd, v: function(fd, v) if here == place else v


def normed(fd, y):
    return fd.ops.mul(y, fd.ops.rsqrt(fd.ops.sum(fd.ops.mul(y, y), dims=(1,), keepdim=True)))


def gathered_too(fd, y):
    """y, which a second operation gathers rows of."""
    at = fd.define_tensor(shape=[3], dtype="i64")
    fd.add_output(fd.ops.index_select(y, at, dim=0))
    return y


def stored_too(fd, y):
    fd.add_output(fd.ops.neg(y))
    return y


def summed(fd, z):
    total = fd.ops.sum(z, dims=(0,), keepdim=True)
    return fd.ops.add(z, total)


def padded(fd, y):
    rows, n = y.type.shape
    wider = fd.ops.pad(y, before=(0, 1), after=(0, 0), shape=(rows, n + 1))
    return fd.ops.slice(wider, start_indices=(0, 0), end_indices=(rows, n))


def turned(fd, z):
    return fd.ops.permute(fd.ops.permute(z, dims=(1, 0)), dims=(1, 0))


BROKEN = {
    "nothing": lambda here, fd, v: v,
    "a second reader between, pointwise": at("between", stored_too),
    "a sum over features between": at("between", normed),
    "a second reader between, which gathers rows": at("between", gathered_too),
    "a sum over all rows behind": at("after", summed),
    "padding between": at("between", padded),
    "a permutation behind": at("after", turned),
    "pointwise on tokens in front": at("tokens", lambda fd, x: fd.ops.exp(x)),
    "pointwise on rows in front": at("rows", lambda fd, x: fd.ops.exp(x)),
    "a norm of tokens in front": at("tokens", normed),
    "pointwise at the end": at("end", lambda fd, x: fd.ops.exp(x)),
    "a norm at the end": at("end", normed),
}


def test_breaking_one_operation_moves_the_boundaries(golden):
    found = {name: shown(prepared(changed(change))) for name, change in BROKEN.items()}
    assert found["nothing"].count("grouped_gemm") == 2
    kept = (
        "nothing",
        "a second reader between, pointwise",
        "a sum over features between",
        "pointwise on rows in front",
        "pointwise at the end",
    )
    for name, text in found.items():
        assert (len(text.splitlines()) == 4) == (name in kept), name
    golden("\n\n".join(f"{name}\n{text}" for name, text in found.items()))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_keep_every_bit(name):
    fusion = prepared(changed(BROKEN[name]))
    x, ids, w = tokens(torch.float32)
    g = torch.Generator().manual_seed(3)
    inputs = [x, ids, w, *(torch.randn(s, generator=g).bfloat16() for s in ((G, I, H), (G, H, I)))]
    inputs += [torch.tensor([2, 0, 0])] * (len(fusion.inputs) - 5)
    assert_same_bits(run_segments(fusion, CPU, *inputs), evaluate(fusion, *inputs))
