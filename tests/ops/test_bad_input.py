"""What is refused, with which error, and what the message says. Nothing is read before it is
checked.
"""

from __future__ import annotations

import pytest
import torch
from bad_calls import messages
from test_ops import OPS, experts, random, weight
from torch._subclasses import FakeTensorMode

import fusion_moe
from fusion_moe import (
    FusionDefinition,
    options,
    translator,
)
from fusion_moe.definitions import translate
from fusion_moe.errors import (
    DeviceError,
    DtypeError,
    FusionError,
    GroupsError,
    NonFiniteError,
    OptionError,
    ParseError,
    ShapeError,
    TranslatorError,
    UnsupportedError,
)
from fusion_moe.ir.types import TensorType
from fusion_moe.nn import activation


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


CODES, SCALE, DECODE = weight(2, 8, 32)
A = random(5, 32)
GATE_UP, DOWN = experts(3)
X, IDS, W = random(4, 32), torch.tensor([[0, 1], [2, 1], [0, 0], [1, 2]]), random(4, 2)


def mm(a=A, codes=CODES, scale=SCALE, decode=DECODE, offs=None, **kwargs):
    return OPS.nvfp4_grouped_mm(
        a, codes, scale, decode, ends(2, 5) if offs is None else offs, **kwargs
    )


def mlp(x=X, ids=IDS, w=W, gate_up=GATE_UP, down=DOWN, *biases, **kwargs):
    return OPS.expert_mlp(x, ids, w, *gate_up, *down, *biases, **kwargs)


def plain_mlp(x=X, dtype=torch.float32):
    gate_up, down = random(3, 32, 32).to(dtype), random(3, 32, 16).to(dtype)
    return OPS.fused_experts(
        x,
        IDS,
        W,
        [gate_up],
        [down],
        weight_format={torch.float32: "f32", torch.float64: "f64"}[dtype],
    )


PROGRAM = (
    "def fusion(fd): m = fd.define_size('m'); i0 = fd.define_tensor(shape=[m, 32], "
    'dtype="f32"); t0 = fd.ops.neg(i0); fd.add_output(t0)'
)


def run(inputs=(A,), sizes=(5,), switches=None, program=PROGRAM):
    return OPS.run(program, list(inputs), list(sizes), switches)


def traced(call, **kwargs):
    """A call on fake tensors, as a tracer makes it."""
    with FakeTensorMode():
        return call(inputs=[torch.empty(5, 32)], **kwargs)


def two_inputs():
    fd = FusionDefinition()
    fd.add_output(fd.ops.add(*(fd.define_tensor(shape=[5, 32], dtype="f32") for _ in range(2))))
    return fd.fusion()


def output_of_a_number():
    FusionDefinition().add_output(1)


NOT_FINITE = random(2, 3, 32)
NOT_FINITE[1, 2, 5], NOT_FINITE[0, 0, 1] = float("inf"), float("nan")

BAD = {
    "a is float64": (DtypeError, lambda: mm(a=A.double())),
    "a is int": (DtypeError, lambda: mm(a=A.int())),
    "codes are int8": (DtypeError, lambda: mm(codes=CODES.view(torch.int8))),
    "block scale is bf16": (DtypeError, lambda: mm(scale=SCALE.bfloat16())),
    "block scale is uint8": (DtypeError, lambda: mm(scale=SCALE.view(torch.uint8))),
    "decode scale is bf16": (DtypeError, lambda: mm(decode=DECODE.bfloat16())),
    "offs are int64": (DtypeError, lambda: mm(offs=ends(2, 5).long())),
    "out_dtype is int8": (DtypeError, lambda: mm(out_dtype=torch.int8)),
    "an out_dtype that no product has": (
        DtypeError,
        lambda: OPS.grouped_mm(
            A, [CODES, SCALE, DECODE], ends(2, 5), out_dtype=torch.int16, weight_format="nvfp4"
        ),
    ),
    "ids are int16": (DtypeError, lambda: mlp(ids=IDS.short())),
    "ids and weights in each other's place": (DtypeError, lambda: mlp(ids=W, w=IDS)),
    "ids are None": (DtypeError, lambda: mlp(ids=None)),
    "x is float64": (DtypeError, lambda: mlp(x=X.double())),
    "x is float64 beside plain weights": (DtypeError, lambda: plain_mlp(x=X.double())),
    "x is float32 beside weights in float64": (DtypeError, lambda: plain_mlp(dtype=torch.float64)),
    "ids are float": (DtypeError, lambda: mlp(ids=IDS.float())),
    "w is int": (DtypeError, lambda: mlp(w=IDS)),
    "bias of another dtype": (
        DtypeError,
        lambda: mlp(X, IDS, W, GATE_UP, DOWN, random(3, 32).bfloat16()),
    ),
    "swiglu of integers": (DtypeError, lambda: OPS.scaled_swiglu(IDS)),
    "out_dtype is int32": (DtypeError, lambda: mm(out_dtype=torch.int32)),
    "out_dtype is bool": (DtypeError, lambda: mm(out_dtype=torch.bool)),
    "quantize integers": (
        DtypeError,
        lambda: OPS.nvfp4_quantize(torch.ones(16, 16, dtype=torch.int32)),
    ),
    "quantize float64": (
        DtypeError,
        lambda: OPS.nvfp4_quantize(torch.ones(16, 16, dtype=torch.float64)),
    ),
    "K is no multiple of 16": (ShapeError, lambda: OPS.nvfp4_quantize(random(4, 24))),
    "K of codes is no multiple of 16": (
        ShapeError,
        lambda: mm(codes=CODES[..., :12], scale=SCALE[..., :1]),
    ),
    "K disagrees": (ShapeError, lambda: mm(a=random(5, 48))),
    "groups disagree": (ShapeError, lambda: mm(offs=ends(1, 2, 5))),
    "scales of another shape": (ShapeError, lambda: mm(scale=SCALE[:, :4])),
    "decode scale of another shape": (ShapeError, lambda: mm(decode=torch.ones(2, 3))),
    "decode scale for all groups": (ShapeError, lambda: mm(decode=torch.ones(()))),
    "x of other features": (ShapeError, lambda: mlp(x=random(4, 48))),
    "x of no dimension": (ShapeError, lambda: mlp(x=X[0, 0])),
    "a weight of one matrix": (
        ShapeError,
        lambda: mm(codes=CODES[0], scale=SCALE[0], decode=DECODE[:1]),
    ),
    "experts disagree": (ShapeError, lambda: mlp(down=experts(2)[1])),
    "weights of other experts a token": (ShapeError, lambda: mlp(w=random(4, 3))),
    "ids of one dimension": (ShapeError, lambda: mlp(ids=IDS[:, 0], w=W[:, 0])),
    "no parts of a weight": (
        ShapeError,
        lambda: OPS.fused_experts(X, IDS, W, [], [], weight_format="nvfp4"),
    ),
    "floats without their weight_format": (
        ShapeError,
        lambda: OPS.fused_experts(
            X, IDS, W, [random(3, 32, 32)], [random(3, 32, 16)], weight_format="nvfp4"
        ),
    ),
    "bias of other columns": (ShapeError, lambda: mlp(X, IDS, W, GATE_UP, DOWN, random(3, 16))),
    "interleave below zero": (
        OptionError,
        lambda: OPS.scaled_swiglu(random(3, 12), None, -1),
    ),
    "an activation that is no program": (ParseError, lambda: mlp(activation="silu")),
    "an activation of one part": (
        ShapeError,
        lambda: mlp(activation=activation(torch.relu, parts=1)),
    ),
    "offs of two dimensions": (ShapeError, lambda: mm(offs=ends(2, 5)[None])),
    "offs of no dimension": (ShapeError, lambda: mm(offs=ends(2, 5)[0])),
    "offs of a bias of no dimension": (
        ShapeError,
        lambda: OPS.group_add(random(5, 4), random(2, 4), ends(2, 5)[0]),
    ),
    "offs of a swizzle of no dimension": (
        ShapeError,
        lambda: OPS.grouped_swizzle_block_scale(SCALE[0], ends(2, 5)[0]),
    ),
    "ids of no dimension": (ShapeError, lambda: OPS.route(IDS[0, 0], 3)),
    "logits of no dimension": (ShapeError, lambda: OPS.topk_router(X[0, 0], 2)),
    "logits that are ids": (DtypeError, lambda: OPS.topk_router(IDS, 2)),
    "more experts a token than there are": (ShapeError, lambda: OPS.topk_router(X, 33)),
    "a bias of other experts": (ShapeError, lambda: OPS.topk_router(X, 2, random(31))),
    "a bias in bf16": (DtypeError, lambda: OPS.topk_router(X, 2, random(32).bfloat16())),
    "an unknown scoring": (OptionError, lambda: OPS.topk_router(X, 2, scoring="tanh")),
    "groups that do not divide": (ShapeError, lambda: OPS.topk_router(X, 2, n_group=5)),
    "rows of three dimensions": (
        ShapeError,
        lambda: OPS.group_add(random(2, 3, 8), random(2, 8), ends(2, 6)),
    ),
    "rows to combine of three dimensions": (
        ShapeError,
        lambda: OPS.combine(random(2, 3, 8), IDS[:3], random(3, 2)),
    ),
    "logits of three dimensions": (ShapeError, lambda: OPS.topk_router(random(2, 3, 4), 2)),
    "logits of one dimension": (ShapeError, lambda: OPS.topk_router(X[0], 2)),
    "a transposed scale": (ShapeError, lambda: OPS.scaled_swiglu(random(2, 3, 8), random(3, 2))),
    "transposed ids": (
        ShapeError,
        lambda: mlp(random(2, 3, 32), torch.zeros(3, 2, 2, dtype=torch.int64), random(6, 2)),
    ),
    "weights of more dimensions than ids": (
        ShapeError,
        lambda: mlp(random(2, 2, 32), IDS.view(2, 2, 2), random(1, 2, 2, 2)),
    ),
    "a 1-D matrix to quantize": (ShapeError, lambda: OPS.nvfp4_quantize(random(16))),
    "an odd number of channels": (ShapeError, lambda: OPS.scaled_swiglu(random(3, 7))),
    "interleave that does not divide": (
        ShapeError,
        lambda: OPS.scaled_swiglu(random(3, 12), None, 4),
    ),
    "a scale for other rows": (ShapeError, lambda: OPS.scaled_swiglu(random(3, 12), random(4))),
    "weights of other slots": (
        ShapeError,
        lambda: OPS.combine(random(6, 4), torch.zeros(3, 2, dtype=torch.int32), random(3, 3)),
    ),
    "weights of other tokens": (ShapeError, lambda: mlp(w=random(3, 2))),
    "ids of other tokens": (ShapeError, lambda: mlp(ids=IDS[:3], w=W[:3])),
    "up and down disagree": (ShapeError, lambda: mlp(down=experts(3, inner=32)[1])),
    "down gives other features than x has": (
        ShapeError,
        lambda: mlp(down=tuple(t[:, :16] if t.dim() > 1 else t for t in DOWN)),
    ),
    "down gives other features, transposed": (
        ShapeError,
        lambda: OPS.fused_experts(
            X,
            IDS,
            W,
            [random(3, 32, 32)],
            [random(3, 16, 48)],
            weight_format="f32",
            transposed=True,
        ),
    ),
    "bias of another size": (
        ShapeError,
        lambda: OPS.group_add(random(5, 4), random(2, 3), ends(2, 5)),
    ),
    "ends decrease": (GroupsError, lambda: mm(offs=ends(3, 2))),
    "ends are negative": (GroupsError, lambda: mm(offs=ends(-1, 5))),
    "ends exceed the rows": (GroupsError, lambda: mm(offs=ends(2, 6))),
    "ends exceed no rows": (GroupsError, lambda: mm(a=A[:0], offs=ends(0, 1))),
    "ends of a bias decrease": (
        GroupsError,
        lambda: OPS.group_add(random(5, 4), random(2, 4), ends(3, 2)),
    ),
    "ends of a swizzle exceed": (
        GroupsError,
        lambda: OPS.grouped_swizzle_block_scale(SCALE[0], ends(2, 9)),
    ),
    "an id too large": (GroupsError, lambda: mlp(ids=IDS + 1)),
    "an id below zero": (GroupsError, lambda: OPS.route(IDS - 2, 3)),
    "a slot too large": (
        GroupsError,
        lambda: OPS.combine(random(8, 4), torch.full((4, 2), 8, dtype=torch.int32), W),
    ),
    "a slot below zero": (
        GroupsError,
        lambda: OPS.combine(random(8, 4), torch.full((4, 2), -1, dtype=torch.int32), W),
    ),
    "negative groups": (FusionError, lambda: OPS.route(IDS, -1)),
    "ids without groups": (ShapeError, lambda: OPS.route(IDS, 0)),
    "ids without experts": (
        ShapeError,
        lambda: mlp(gate_up=[t[:0] for t in GATE_UP], down=[t[:0] for t in DOWN]),
    ),
    "slots without rows": (
        ShapeError,
        lambda: OPS.combine(random(0, 4), torch.zeros(4, 2, dtype=torch.int32), W),
    ),
    "two devices": (DeviceError, lambda: mm(a=A.to("meta"))),
    "weights elsewhere": (DeviceError, lambda: mlp(down=[t.to("meta") for t in DOWN])),
    "NaN to quantize": (NonFiniteError, lambda: OPS.nvfp4_quantize(NOT_FINITE)),
    "NaN to quantize by a given scale": (
        NonFiniteError,
        lambda: OPS.nvfp4_quantize(NOT_FINITE, torch.ones(2)),
    ),
    "quantize by NaN": (
        NonFiniteError,
        lambda: OPS.nvfp4_quantize(random(2, 3, 32), torch.tensor([1.0, float("nan")])),
    ),
    "quantize by infinity": (
        NonFiniteError,
        lambda: OPS.nvfp4_quantize(random(2, 3, 32), torch.tensor([1.0, float("inf")])),
    ),
    "quantize by a negative scale": (
        NonFiniteError,
        lambda: OPS.nvfp4_quantize(random(2, 3, 32), torch.tensor([1.0, -1.0])),
    ),
    "run without its sizes": (ShapeError, lambda: run(sizes=())),
    "run with too many sizes": (ShapeError, lambda: run(sizes=(5, 5))),
    "run with another size": (ShapeError, lambda: run(sizes=(6,))),
    "run with a negative size": (ShapeError, lambda: run(sizes=(-5,))),
    "run without its inputs": (ShapeError, lambda: run(inputs=())),
    "run traced without its sizes": (ShapeError, lambda: traced(run, sizes=())),
    "run traced with too many sizes": (ShapeError, lambda: traced(run, sizes=(5, 5))),
    "run with inputs on two devices": (
        DeviceError,
        lambda: fusion_moe.run(two_inputs(), [A, A.to("meta")]),
    ),
    "options that are not Python": (OptionError, lambda: run(switches="{nonsense")),
    "options that are no object": (OptionError, lambda: run(switches="[1]")),
    "an output that is a number": (FusionError, output_of_a_number),
    "an unknown activation format": (OptionError, lambda: mm(activation_format="fp6")),
    "an unknown weight format": (
        OptionError,
        lambda: OPS.grouped_mm(A, [CODES, SCALE, DECODE], ends(2, 5), weight_format="nvfp5"),
    ),
    "an unknown weight layout": (OptionError, lambda: mlp(weight_layout="sideways")),
    "an unknown place of the scale": (OptionError, lambda: mlp(scale_on="middle")),
    "nvfp4 activations on a CPU": (UnsupportedError, lambda: mm(activation_format="nvfp4")),
    "nvfp4 activations of experts on a CPU": (
        UnsupportedError,
        lambda: mlp(activation_format="nvfp4"),
    ),
    "an unknown option": (OptionError, lambda: options.override(nonsense=1).__enter__()),
    "an option of another type": (OptionError, lambda: options.override(check="maybe").__enter__()),
    "an empty option": (OptionError, lambda: options.override(cache_dir="").__enter__()),
    "no time to compile": (OptionError, lambda: options.override(compile_seconds=0).__enter__()),
}


def test_messages(golden):
    golden(messages({what: call for what, (_, call) in BAD.items()}))


def test_the_calls_that_these_change_are_good():
    assert torch.equal(run()[0], -A)
    assert traced(run)[0].shape == A.shape
    assert mm().shape == (5, 8)
    assert mlp().shape == X.shape


@pytest.mark.parametrize(
    "what",
    [
        "K disagrees",
        "groups disagree",
        "codes are int8",
        "up and down disagree",
        "an unknown activation format",
    ],
)
def test_fakes_are_checked_too(what):
    """Whatever types show is found while tracing."""
    error, call = BAD[what]
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error):
        call()


def test_an_unknown_variable_of_the_environment():
    (said,) = options.ignored({"FUSION_MOE_TARGETS": "cpu", "FUSION_MOE_TARGET": "cpu"})
    assert said == (
        "the environment variable FUSION_MOE_TARGETS is ignored: fusion_moe has no such option; "
        "did you mean 'FUSION_MOE_TARGET'?"
    )
    with pytest.warns(UserWarning, match="FUSION_MOE_TARGETS is ignored"):
        options.from_environment({"FUSION_MOE_TARGETS": "cpu"})


def test_a_bad_value_in_the_environment():
    with pytest.raises(
        OptionError,
        match="environment variable FUSION_MOE_COMPILE_SECONDS: option compile_seconds = 'soon'",
    ):
        options.from_environment({"FUSION_MOE_COMPILE_SECONDS": "soon"})


# Translators of users -----------------------------------------------------------------------------


@pytest.fixture
def registered():
    """Registers a translator for the length of a test."""
    names = []

    def register(op, function):
        names.append(op)
        return translator(op)(function)

    yield register
    for name in names:
        translate.unregister(name)


def call(op, *expected):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[4], dtype="f32")
    return translate.find(op)(fd, [x], {}, expected)


F32 = TensorType((4,), "f32")


def test_a_translator_that_raises(registered):
    registered("tests::raises", lambda fd, x: 1 / 0)
    with pytest.raises(
        TranslatorError,
        match=r"test_bad_input\.py:\d+: the translator of tests::raises failed: "
        r"ZeroDivisionError",
    ) as caught:
        call("tests::raises", F32)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [
        (
            "dtype",
            lambda fd, x: fd.ops.cast(x, dtype="bf16"),
            r"returned bf16\[4\]; expected "
            r"f32\[4\], as its fake returns",
        ),
        (
            "shape",
            lambda fd, x: fd.ops.reshape(x, new_shape=(2, 2)),
            r"returned f32\[2, 2\]; "
            r"expected f32\[4\]",
        ),
        ("count", lambda fd, x: (x, x), r"returned f32\[4\], f32\[4\]; expected f32\[4\]"),
        ("number", lambda fd, x: 3, "returned a int"),
        ("nothing", lambda fd, x: None, "returned a NoneType"),
    ],
)
def test_a_translator_that_lies(registered, name, function, said):
    registered(f"tests::{name}", function)
    with pytest.raises(
        TranslatorError,
        match=r"test_bad_input\.py:\d+: the translator of "
        rf"tests::{name} {said}",
    ):
        call(f"tests::{name}", F32)


def test_a_translator_registered_twice(registered):
    registered("tests::twice", lambda fd, x: x)
    with pytest.raises(
        TranslatorError,
        match=r"tests::twice already has a translator, at "
        r"test_bad_input\.py:\d+",
    ):
        translator("tests::twice")(lambda fd, x: x)
    with pytest.raises(TranslatorError, match="already has a translator, at"):
        translator("aten::exp")(lambda fd, x: x)
