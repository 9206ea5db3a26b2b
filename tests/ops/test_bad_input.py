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
)
from fusion_moe.encodings import INT4, quantize
from fusion_moe.errors import (
    OptionError,
    ShapeError,
)
from fusion_moe.nn import activation, swiglu


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


def grouped(parts, weight_format, **kwargs):
    return OPS.grouped_mm(A, parts, ends(2, 5), weight_format=weight_format, **kwargs)


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
    "a is float64": lambda: mm(a=A.double()),
    "a is int": lambda: mm(a=A.int()),
    "codes are int8": lambda: mm(codes=CODES.view(torch.int8)),
    "block scale is bf16": lambda: mm(scale=SCALE.bfloat16()),
    "block scale is uint8": lambda: mm(scale=SCALE.view(torch.uint8)),
    "decode scale is bf16": lambda: mm(decode=DECODE.bfloat16()),
    "offs are int64": lambda: mm(offs=ends(2, 5).long()),
    "out_dtype is int8": lambda: mm(out_dtype=torch.int8),
    "an out_dtype that no product has": lambda: grouped(
        [CODES, SCALE, DECODE], "nvfp4", out_dtype=torch.int16
    ),
    "ids are int16": lambda: mlp(ids=IDS.short()),
    "ids and weights in each other's place": lambda: mlp(ids=W, w=IDS),
    "ids are None": lambda: mlp(ids=None),
    "x is float64": lambda: mlp(x=X.double()),
    "x is float64 beside plain weights": lambda: plain_mlp(x=X.double()),
    "x is float32 beside weights in float64": lambda: plain_mlp(dtype=torch.float64),
    "ids are float": lambda: mlp(ids=IDS.float()),
    "w is int": lambda: mlp(w=IDS),
    "bias of another dtype": lambda: mlp(X, IDS, W, GATE_UP, DOWN, random(3, 32).bfloat16()),
    "swiglu of integers": lambda: OPS.scaled_swiglu(IDS),
    "out_dtype is int32": lambda: mm(out_dtype=torch.int32),
    "out_dtype is bool": lambda: mm(out_dtype=torch.bool),
    "quantize integers": lambda: OPS.nvfp4_quantize(torch.ones(16, 16, dtype=torch.int32)),
    "quantize float64": lambda: OPS.nvfp4_quantize(torch.ones(16, 16, dtype=torch.float64)),
    "K is no multiple of 16": lambda: OPS.nvfp4_quantize(random(4, 24)),
    "K of codes is no multiple of 16": lambda: mm(codes=CODES[..., :12], scale=SCALE[..., :1]),
    "K disagrees": lambda: mm(a=random(5, 48)),
    "groups disagree": lambda: mm(offs=ends(1, 2, 5)),
    "scales of another shape": lambda: mm(scale=SCALE[:, :4]),
    "decode scale of another shape": lambda: mm(decode=torch.ones(2, 3)),
    "decode scale for all groups": lambda: mm(decode=torch.ones(())),
    "x of other features": lambda: mlp(x=random(4, 48)),
    "x of no dimension": lambda: mlp(x=X[0, 0]),
    "a weight of one matrix": lambda: mm(codes=CODES[0], scale=SCALE[0], decode=DECODE[:1]),
    "experts disagree": lambda: mlp(down=experts(2)[1]),
    "weights of other experts a token": lambda: mlp(w=random(4, 3)),
    "ids of one dimension": lambda: mlp(ids=IDS[:, 0], w=W[:, 0]),
    "no parts of a weight": lambda: OPS.fused_experts(X, IDS, W, [], [], weight_format="nvfp4"),
    "floats without their weight_format": lambda: OPS.fused_experts(
        X, IDS, W, [random(3, 32, 32)], [random(3, 32, 16)], weight_format="nvfp4"
    ),
    "bias of other columns": lambda: mlp(X, IDS, W, GATE_UP, DOWN, random(3, 16)),
    "a limit below zero": lambda: OPS.scaled_swiglu(random(3, 12), limit=-1.0),
    "a limit of zero": lambda: mlp(activation=swiglu(limit=0.0)),
    "a limit that is no number": lambda: mlp(activation=swiglu(limit=float("nan"))),
    "a clamp to nothing": lambda: mlp(activation=swiglu(limit=7.0).replace("-7.0", "7.5")),
    "a bound that is no number": lambda: mlp(
        activation=swiglu(limit=7.0).replace("-7.0", "math.nan")
    ),
    "interleave below zero": lambda: OPS.scaled_swiglu(random(3, 12), None, -1),
    "an activation that is no program": lambda: mlp(activation="silu"),
    "an activation of one part": lambda: mlp(activation=activation(torch.relu, parts=1)),
    "offs of two dimensions": lambda: mm(offs=ends(2, 5)[None]),
    "offs of no dimension": lambda: mm(offs=ends(2, 5)[0]),
    "offs of a bias of no dimension": lambda: OPS.group_add(
        random(5, 4), random(2, 4), ends(2, 5)[0]
    ),
    "offs of a swizzle of no dimension": lambda: OPS.grouped_swizzle_block_scale(
        SCALE[0], ends(2, 5)[0]
    ),
    "ids of no dimension": lambda: OPS.route(IDS[0, 0], 3),
    "logits of no dimension": lambda: OPS.topk_router(X[0, 0], 2),
    "logits that are ids": lambda: OPS.topk_router(IDS, 2),
    "more experts a token than there are": lambda: OPS.topk_router(X, 33),
    "a bias of other experts": lambda: OPS.topk_router(X, 2, random(31)),
    "a bias in bf16": lambda: OPS.topk_router(X, 2, random(32).bfloat16()),
    "an unknown scoring": lambda: OPS.topk_router(X, 2, scoring="tanh"),
    "an unknown score_function": lambda: OPS.fused_compute_score_for_moe_aux_loss(X, 2, "tanh"),
    "a loss of integers": lambda: OPS.fused_moe_aux_loss(IDS, IDS[0], None, 2, 2, 0.01),
    "a loss of no experts": lambda: OPS.fused_moe_aux_loss(X, torch.ones(32), None, 32, 0, 0.01),
    "a loss of other experts": lambda: OPS.fused_moe_aux_loss(X, W[0], None, 32, 2, 0.01),
    "a number of tokens that is a mask": lambda: OPS.fused_moe_aux_loss(
        X, X[0], torch.tensor(True), 32, 2, 0.01
    ),
    "a loss of tokens of several sequences": lambda: OPS.fused_moe_aux_loss(
        X, X[0], torch.ones(2, dtype=torch.int64), 32, 2, 0.01
    ),
    "groups that do not divide": lambda: OPS.topk_router(X, 2, n_group=5),
    "rows of three dimensions": lambda: OPS.group_add(random(2, 3, 8), random(2, 8), ends(2, 6)),
    "rows to combine of three dimensions": lambda: OPS.combine(
        random(2, 3, 8), IDS[:3], random(3, 2)
    ),
    "logits of three dimensions": lambda: OPS.topk_router(random(2, 3, 4), 2),
    "logits of one dimension": lambda: OPS.topk_router(X[0], 2),
    "a transposed scale": lambda: OPS.scaled_swiglu(random(2, 3, 8), random(3, 2)),
    "transposed ids": lambda: mlp(
        random(2, 3, 32), torch.zeros(3, 2, 2, dtype=torch.int64), random(6, 2)
    ),
    "weights of more dimensions than ids": lambda: mlp(
        random(2, 2, 32), IDS.view(2, 2, 2), random(1, 2, 2, 2)
    ),
    "a 1-D matrix to quantize": lambda: OPS.nvfp4_quantize(random(16)),
    "an odd number of channels": lambda: OPS.scaled_swiglu(random(3, 7)),
    "interleave that does not divide": lambda: OPS.scaled_swiglu(random(3, 12), None, 4),
    "a scale for other rows": lambda: OPS.scaled_swiglu(random(3, 12), random(4)),
    "weights of other slots": lambda: OPS.combine(
        random(6, 4), torch.zeros(3, 2, dtype=torch.int32), random(3, 3)
    ),
    "weights of other tokens": lambda: mlp(w=random(3, 2)),
    "ids of other tokens": lambda: mlp(ids=IDS[:3], w=W[:3]),
    "up and down disagree": lambda: mlp(down=experts(3, inner=32)[1]),
    "down gives other features than x has": lambda: mlp(
        down=tuple(t[:, :16] if t.dim() > 1 else t for t in DOWN)
    ),
    "down gives other features, transposed": lambda: OPS.fused_experts(
        X,
        IDS,
        W,
        [random(3, 32, 32)],
        [random(3, 16, 48)],
        weight_format="f32",
        transposed=True,
    ),
    "bias of another size": lambda: OPS.group_add(random(5, 4), random(2, 3), ends(2, 5)),
    "ends decrease": lambda: mm(offs=ends(3, 2)),
    "ends are negative": lambda: mm(offs=ends(-1, 5)),
    "ends exceed the rows": lambda: mm(offs=ends(2, 6)),
    "ends exceed no rows": lambda: mm(a=A[:0], offs=ends(0, 1)),
    "ends of a bias decrease": lambda: OPS.group_add(random(5, 4), random(2, 4), ends(3, 2)),
    "ends of a swizzle exceed": lambda: OPS.grouped_swizzle_block_scale(SCALE[0], ends(2, 9)),
    "an id too large": lambda: mlp(ids=IDS + 1),
    "an id below zero": lambda: OPS.route(IDS - 2, 3),
    "a slot too large": lambda: OPS.combine(
        random(8, 4), torch.full((4, 2), 8, dtype=torch.int32), W
    ),
    "a slot below zero": lambda: OPS.combine(
        random(8, 4), torch.full((4, 2), -1, dtype=torch.int32), W
    ),
    "negative groups": lambda: OPS.route(IDS, -1),
    "ids without groups": lambda: OPS.route(IDS, 0),
    "ids without experts": lambda: mlp(
        gate_up=[t[:0] for t in GATE_UP], down=[t[:0] for t in DOWN]
    ),
    "slots without rows": lambda: OPS.combine(
        random(0, 4), torch.zeros(4, 2, dtype=torch.int32), W
    ),
    "two devices": lambda: mm(a=A.to("meta")),
    "weights elsewhere": lambda: mlp(down=[t.to("meta") for t in DOWN]),
    "NaN to quantize": lambda: OPS.nvfp4_quantize(NOT_FINITE),
    "NaN to quantize by a given scale": lambda: OPS.nvfp4_quantize(NOT_FINITE, torch.ones(2)),
    "quantize by NaN": lambda: OPS.nvfp4_quantize(
        random(2, 3, 32), torch.tensor([1.0, float("nan")])
    ),
    "quantize by infinity": lambda: OPS.nvfp4_quantize(
        random(2, 3, 32), torch.tensor([1.0, float("inf")])
    ),
    "quantize by a negative scale": lambda: OPS.nvfp4_quantize(
        random(2, 3, 32), torch.tensor([1.0, -1.0])
    ),
    "run without its sizes": lambda: run(sizes=()),
    "run with too many sizes": lambda: run(sizes=(5, 5)),
    "run with another size": lambda: run(sizes=(6,)),
    "run with a negative size": lambda: run(sizes=(-5,)),
    "run without its inputs": lambda: run(inputs=()),
    "run traced without its sizes": lambda: traced(run, sizes=()),
    "run traced with too many sizes": lambda: traced(run, sizes=(5, 5)),
    "run with inputs on two devices": lambda: fusion_moe.run(two_inputs(), [A, A.to("meta")]),
    "options that are not Python": lambda: run(switches="{nonsense"),
    "options that are no object": lambda: run(switches="[1]"),
    "an output that is a number": output_of_a_number,
    "an unknown activation format": lambda: mm(activation_format="fp6"),
    "an unknown weight format": lambda: grouped([CODES, SCALE, DECODE], "nvfp5"),
    "an unknown weight layout": lambda: mlp(weight_layout="sideways"),
    "an unknown place of the scale": lambda: mlp(scale_on="middle"),
    "nvfp4 activations on a CPU": lambda: mm(activation_format="nvfp4"),
    "nvfp4 activations of experts on a CPU": lambda: mlp(activation_format="nvfp4"),
    "4-bit activations with a transposed weight": lambda: grouped(
        [random(2, 32, 8)], "f32", activation_format="nvfp4", transposed=True
    ),
    "a is float32 beside a weight in float64": lambda: grouped(
        [random(2, 32, 8).double()], "f64", transposed=True
    ),
    "a packed weight that is transposed": lambda: grouped(
        [CODES, SCALE, DECODE], "nvfp4", transposed=True
    ),
    "parts of a weight in another format": lambda: grouped([CODES, SCALE, DECODE], "mxfp4"),
    "scales of a weight in another format": lambda: grouped([CODES, SCALE], "mxfp4"),
    "a weight of another float dtype": lambda: grouped([random(2, 8, 32).half()], "bf16"),
    "a weight without whole tiles": lambda: mm(weight_layout="w16x64"),
    "int8 activations with floats": lambda: grouped(
        [random(2, 8, 32)], "f32", activation_format="int8"
    ),
    "int8 activations with int4": lambda: grouped(
        list(quantize(random(2, 8, 32), encoding=INT4)), "int4", activation_format="int8"
    ),
    "mxfp8 activations with nvfp4": lambda: grouped(
        [CODES, SCALE, DECODE], "nvfp4", activation_format="mxfp8"
    ),
    "an unknown option": lambda: options.override(nonsense=1).__enter__(),
    "an option of another type": lambda: options.override(check="maybe").__enter__(),
    "an empty option": lambda: options.override(cache_dir="").__enter__(),
    "no time to compile": lambda: options.override(compile_seconds=0).__enter__(),
}


def test_messages(golden):
    golden(messages(BAD))


def test_the_calls_that_these_change_are_good():
    assert torch.equal(run()[0], -A)
    assert traced(run)[0].shape == A.shape
    assert mm().shape == (5, 8)
    assert mlp().shape == X.shape


def test_fakes_are_checked_too():
    """Whatever types show is found while tracing."""
    shown = {
        what: BAD[what]
        for what in (
            "K disagrees",
            "groups disagree",
            "codes are int8",
            "up and down disagree",
            "an unknown activation format",
        )
    }
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = messages(shown)
    assert found == messages(shown)


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


@pytest.mark.parametrize("turned", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_strides(turned):
    """As the first call of its sizes, and after one that is remembered."""
    a = getattr(A.float(), turned)()
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"input 0 is torch\.(sparse_coo|sparse_csr|_mkldnn)"):
            mm(a)
        mm(A.float())
