"""Adapters of low rank in fused_experts and grouped_mm: against whole weights W + scale * B @ A in
float64, with all gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cover import examples, few
from fusions import fusion_of_call
from hypothesis import given, strategies as st
from routings import Partition, Routing, partitions
from test_autograd import Called, kept_by
from test_float_weights import FORMATS, SMALL, H, I, drawn, gradients, loop, plain
from torch import Tensor
from torch.library import opcheck

import fusion_moe
from fusion_moe.backends import TARGETS
from fusion_moe.compile import lower
from fusion_moe.encodings import ENCODINGS, dequantize, quantize
from fusion_moe.errors import DtypeError, ShapeError
from fusion_moe.ir.derivative import differentiate

ops = torch.ops.fusion_moe
pytestmark = pytest.mark.usefixtures("meaning")  # but where a test says otherwise
R, SCALE = 3, 0.75
FACTORS = {
    "both": ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b"),
    "gate_up": ("gate_up_lora_a", "gate_up_lora_b"),
    "down": ("down_lora_a", "down_lora_b"),
}
# nobody goes to 2 and 5
ROUTING = Routing(torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [4, 4]]), 6)


def factors(
    experts: int, hidden: int, inner: int, rank: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    shapes = (
        (experts, rank, hidden),
        (experts, 2 * inner, rank),
        (experts, rank, inner),
        (experts, hidden, rank),
    )
    return {
        name: drawn(*shape, seed=20 + i, dtype=dtype) / 2
        for i, (name, shape) in enumerate(zip(FACTORS["both"], shapes, strict=True))
    }


def layer(routing: Routing, which: str, transposed: bool = False) -> dict[str, Tensor]:
    """The tensors of fused_experts in float64."""
    (t, k), e = routing.ids.shape, routing.groups
    weights = {"gate_up": drawn(e, 2 * I, H, seed=2), "down": drawn(e, H, I, seed=3)}
    made = {"x": drawn(t, H), "ids": routing.ids, "w": drawn(t, k, seed=1)}
    made |= {n: v.mT.contiguous() if transposed else v for n, v in weights.items()}
    made |= {"gate_up_bias": drawn(e, 2 * I, seed=4), "down_bias": drawn(e, H, seed=5)}
    return made | {n: t for n, t in factors(e, H, I, R).items() if n in FACTORS[which]}


def call(given: dict[str, Tensor], **options: Any) -> Tensor:
    lists = {n: [t] if n in ("gate_up", "down") else t for n, t in given.items()}
    return ops.fused_experts(
        **lists, weight_format=FORMATS[given["gate_up"].dtype], lora_scale=SCALE, **options
    )


def whole(given: dict[str, Tensor], transposed: bool = False) -> dict[str, Tensor]:
    """The same tensors with adapters in the weights."""
    made = {n: t for n, t in given.items() if "lora" not in n}
    for name in ("gate_up", "down"):
        if f"{name}_lora_a" in given:
            added = SCALE * given[f"{name}_lora_b"] @ given[f"{name}_lora_a"]
            made[name] = made[name] + (added.mT if transposed else added)
    return made


@pytest.mark.parametrize("which", FACTORS)
@examples(0.3)
@given(routing=SMALL, transposed=st.booleans(), scale_on=st.sampled_from(("output", "input")))
def test_fused_experts_against_whole_weights(routing, which, transposed, scale_on):
    given, dy = layer(routing, which, transposed), drawn(len(routing.ids), H, seed=9)
    wanted = [n for n, t in given.items() if t.is_floating_point()]
    found = gradients(
        lambda leaves: call(leaves, transposed=transposed, scale_on=scale_on), given, wanted, dy
    )
    want = gradients(
        lambda leaves: plain(whole(leaves, transposed), transposed, scale_on), given, wanted, dy
    )
    for n in wanted:
        torch.testing.assert_close(found[n], want[n], rtol=1e-10, atol=1e-10)


@examples(0.3)
@given(partition=partitions().filter(lambda partition: len(partition.sizes) < 10))
def test_grouped_mm_against_whole_weights(partition: Partition):
    """Rows past the last end give zeros and enter no gradient."""
    groups, used = len(partition.sizes), sum(partition.sizes)
    given = {"a": drawn(partition.rows, 5), "w": drawn(groups, 4, 5, seed=1)}
    given |= {"la": drawn(groups, R, 5, seed=2), "lb": drawn(groups, 4, R, seed=3)}
    dy = drawn(partition.rows, 4, seed=4)
    given["a"][used:] = dy[used:] = float("nan")

    def ours(g: dict[str, Tensor]) -> Tensor:
        return ops.grouped_mm(
            g["a"],
            [g["w"]],
            partition.ends,
            g["la"],
            g["lb"],
            weight_format="f64",
            lora_scale=SCALE,
        )

    def theirs(g: dict[str, Tensor]) -> Tensor:
        return loop(g["a"][:used], g["w"] + SCALE * g["lb"] @ g["la"], partition.ends)

    found, want = gradients(ours, given, given, dy), gradients(theirs, given, given, dy[:used])
    assert not ours(given)[used:].any()
    for n in given:
        torch.testing.assert_close(found[n].nan_to_num(7.0), want[n], rtol=1e-10, atol=1e-10)


# Each cell of "auto" is three kernels with added products, seconds of a compiler. That one adapter
# may be missing is another program, and the same for all encodings.
CELLS = [(name, "both") for name in ("nvfp4", "mxfp4", "int4", "bf16")]
CELLS += [("nvfp4", "gate_up"), ("nvfp4", "down")]
ON_TARGETS = [(*cell, "reference") for cell in CELLS] + few(
    [pytest.param(*cell, "auto", marks=pytest.mark.slow) for cell in CELLS]
)


@pytest.mark.parametrize(("encoding", "which", "target"), ON_TARGETS)
def test_over_frozen_weights(encoding, which, target):
    """In bf16 with float32 factors, each target: outputs and gradients near those of float64 on the
    decoded weights.
    """
    hidden, inner, rank = 64, 32, 8
    floats = [drawn(6, hidden, n, seed=n, dtype=torch.float32) / 8 for n in (hidden, inner)]
    weights = [quantize(w, encoding=ENCODINGS[encoding]) for w in floats]
    given = {
        "x": drawn(5, hidden, dtype=torch.bfloat16),
        "w": drawn(5, 2, seed=1, dtype=torch.float32),
    }
    given |= {
        n: t / 4
        for n, t in factors(6, hidden, inner, rank, torch.float32).items()
        if n in FACTORS[which]
    }
    dy = drawn(5, hidden, seed=9, dtype=torch.bfloat16)

    def ours(g: dict[str, Tensor]) -> Tensor:
        rest = {n: t for n, t in g.items() if "lora" in n}
        return ops.fused_experts(
            g["x"],
            ROUTING.ids,
            g["w"],
            *map(list, weights),
            **rest,
            weight_format=encoding,
            lora_scale=SCALE,
        )

    def theirs(g: dict[str, Tensor]) -> Tensor:
        decoded = {
            n: dequantize(q).double() for n, q in zip(("gate_up", "down"), weights, strict=True)
        }
        zeros = {
            "gate_up_bias": g["x"].new_zeros(6, 2 * inner),
            "down_bias": g["x"].new_zeros(6, hidden),
        }
        return plain(whole(g | decoded) | zeros | {"ids": ROUTING.ids})

    wide = {n: t.double() for n, t in given.items()}
    with fusion_moe.options.override(target=target):
        y, found = ours(given), gradients(ours, given, given, dy)
    want = gradients(theirs, wide, given, dy.double())
    assert (y.double() - theirs(wide)).norm() < 8e-3 * theirs(wide).norm()
    for n, t in given.items():
        assert found[n].dtype == t.dtype
        assert (found[n].double() - want[n]).norm() < 1.5e-2 * want[n].norm(), n
        assert "lora" not in n or not found[n][[2, 5]].any()


def test_gradcheck():
    given = {n: t.requires_grad_(t.is_floating_point()) for n, t in layer(ROUTING, "both").items()}
    assert torch.autograd.gradcheck(
        lambda *values: call(dict(zip(given, values, strict=True))),
        tuple(given.values()),
        fast_mode=True,
    )


def test_without_b_nothing_is_added():
    """Not a bit, where no grad is tracked and roundings are the same."""
    given = layer(ROUTING, "both")
    for n in ("gate_up_lora_b", "down_lora_b"):
        given[n].zero_()
    assert torch.equal(call(given), call({n: t for n, t in given.items() if "lora" not in n}))


def narrow(**wanted: bool) -> dict[str, Tensor]:
    """bf16 tensors over frozen weights, float32 factors."""
    given = {
        n: t.float() if "lora" in n or n == "w" else t.bfloat16()
        for n, t in layer(ROUTING, "both").items()
        if n not in ("ids",)
    }
    return {n: t.requires_grad_("lora" in n or n in wanted) for n, t in given.items()} | {
        "ids": ROUTING.ids
    }


def test_what_is_kept():
    """Beside inputs FC1's result, the r features of both adapters, and indices; weights and results
    of the second product are not.
    """
    given, rows = narrow(x=True, w=True), ROUTING.ids.numel()
    found = kept_by(lambda: call(given), given)
    made = [t for t in found if not isinstance(t, str)]
    indices = [("int32", 6), ("int32", rows), ("int32", *ROUTING.ids.shape)]
    assert sorted(map(str, made)) == sorted(
        map(str, [*indices, ("bfloat16", rows, 2 * I), *2 * [("bfloat16", rows, R)]])
    )


@pytest.mark.compiler
def test_the_cpu_adds_products_before_it_stores_them():
    """In the forward and for gradients of activations: one kernel for both, and nothing of a
    weight's width in memory in float32.
    """
    given = narrow()
    tensors = [given[n] for n in ("x", "ids", "w")] + [[given[n]] for n in ("gate_up", "down")]
    options = {n: given[n] for n in FACTORS["both"]} | {
        "weight_format": "bf16",
        "lora_scale": SCALE,
    }
    fusion = fusion_of_call("fused_experts", *tensors, **options)
    made = differentiate(fusion, [0, 2, *range(len(fusion.inputs) - 4, len(fusion.inputs))])
    for program, kind, counts in (
        (made.forward, "grouped_mm", [1, 2, 1, 2]),
        (made.backward, "grouped_mm_t", [1, 2, 1, 2]),
    ):
        segments = lower(program, TARGETS["cpu"], fusion_moe.options.current()).segments
        found = [sum(op.kind.name == kind for op in s.fusion.ops) for s in segments]
        assert [count for count in found if count] == counts
        between = {v.type for s in segments for v in s.fusion.outputs if v not in program.outputs}
        assert not [
            t
            for t in between
            if t.dtype == "f32" and len(t.shape) == 2 and t.shape[1] in (2 * I, I, H)
        ]


def test_frozen_weights_have_no_gradient_and_no_product():
    given = narrow(x=True, w=True)
    with Called() as seen:
        y = call(given)
        y.sum().backward()
    assert seen.names == ["run", "run"]
    assert {n for n, t in given.items() if t.grad is not None} == {"x", "w", *FACTORS["both"]}


def test_autocast():
    """Products in its dtype; factors get float32 gradients."""
    given = {
        n: t.float() if t.is_floating_point() else t for n, t in layer(ROUTING, "both").items()
    }
    given = {n: t.requires_grad_("lora" in n) for n, t in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = call(given)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert {given[n].grad.dtype for n in FACTORS["both"]} == {torch.float32}


def test_compiled():
    given, dy = narrow(x=True, w=True), drawn(5, H, seed=9, dtype=torch.bfloat16)
    wanted = [n for n, t in given.items() if t.requires_grad]
    want = gradients(call, given, wanted, dy)
    with fusion_moe.options.override(target="auto"):
        found = gradients(
            torch.compile(call, backend="fusion_moe", fullgraph=True), given, wanted, dy
        )
    for n in wanted:
        assert (found[n] - want[n]).norm() <= 2e-2 * want[n].norm()


# Features of three adapters, in any order. One token has none, two numbers name none of them.
OF_TOKENS = torch.tensor([2, -1, 0, 7, 1])
OF_FEATURES = torch.tensor([0, 2, 1, 1, 0, 2, 2])
RANKS = torch.arange(R)
OF = "gate_up_lora_of", "down_lora_of"


def several() -> dict[str, Tensor]:
    """Those of `layer` with adapters of which each token has at most one."""
    given = layer(ROUTING, "both") | factors(ROUTING.groups, H, I, len(OF_FEATURES))
    return given | {"lora_of": OF_TOKENS} | dict.fromkeys(OF, OF_FEATURES)


@pytest.mark.parametrize("other", [None, torch.int32], ids=["i64", "i32"])
def test_each_token_has_one_of_several(other: torch.dtype | None):
    """Results, and what each adapter learns, are those of calls for one adapter's tokens."""
    given, dy = several(), drawn(len(OF_TOKENS), H, seed=9)
    given["lora_of"] = given["lora_of"].to(other)
    wanted = [n for n, t in given.items() if t.is_floating_point()]
    found = gradients(call, given, wanted, dy)
    y, want = call(given), {n: torch.zeros_like(t) for n, t in given.items() if n in wanted}
    for adapter in OF_TOKENS.unique():
        here, features = adapter == OF_TOKENS, adapter == OF_FEATURES
        one = {n: t[here] if n in ("x", "ids", "w") else t for n, t in given.items()}
        for n in FACTORS["both"]:
            one[n] = given[n] * (features if n.endswith("b") else features[:, None])
        alone = {n: t for n, t in one.items() if not n.endswith("_of")}
        torch.testing.assert_close(y[here], call(alone), rtol=1e-12, atol=1e-12)
        for n, grad in gradients(call, alone, wanted, dy[here]).items():
            if n in ("x", "w"):
                want[n][here] = grad
            elif n in wanted:
                mask = features if n.endswith("lora_b") else features[:, None]
                want[n] += grad * mask if n in FACTORS["both"] else grad
    for n in wanted:
        torch.testing.assert_close(found[n], want[n], rtol=1e-10, atol=1e-10)


def test_what_one_adapter_reads_is_not_what_another_has():
    """Not a number in A of one adapter: others, and tokens without one, do not see it."""
    given = several()
    want = call(given)
    for n in "gate_up_lora_a", "down_lora_a":
        given[n][:, OF_FEATURES == 1] = float("nan")
    found = call(given)
    assert found[OF_TOKENS == 1].isnan().all()
    assert torch.equal(found[OF_TOKENS != 1], want[OF_TOKENS != 1])


def test_tokens_of_sequences():
    given = several()
    lists = {n: t[None] if n in ("x", "lora_of") else t for n, t in given.items()}
    assert torch.equal(call(lists)[0], call(given))


def test_opcheck():
    given = narrow(x=True, w=True)
    tensors = [given[n] for n in ("x", "ids", "w")] + [[given[n]] for n in ("gate_up", "down")]
    opcheck(
        ops.fused_experts.default,
        (*tensors, None, None, *(given[n] for n in FACTORS["both"]), OF_TOKENS, *[RANKS] * 2),
        {"weight_format": "bf16"},
    )


A, B = torch.zeros(6, R, H), torch.zeros(6, 2 * I, R)
BOTH = {"gate_up_lora_a": A, "gate_up_lora_b": B, "lora_of": OF_TOKENS}
REFUSED = {
    "features of none": (BOTH, ShapeError, "lora_of without gate_up_lora_of; expected the adapter"),
    "features of others": (
        BOTH | {"gate_up_lora_of": RANKS[1:]},
        ShapeError,
        r"gate_up_lora_of \[2\]; expected \[3\], the adapter of each feature of gate_up_lora_a",
    ),
    "adapters in floats": (
        BOTH | {"lora_of": OF_TOKENS.float(), "gate_up_lora_of": RANKS},
        DtypeError,
        "lora_of is torch.float32; expected torch.int",
    ),
    "another number of tokens": (
        BOTH | {"lora_of": OF_TOKENS[1:], "gate_up_lora_of": RANKS},
        ShapeError,
        "x has 5 rows, lora_of 4",
    ),
    "one alone": (
        {"gate_up_lora_a": A},
        ShapeError,
        "gate_up_lora_a without gate_up_lora_b; expected both or neither",
    ),
    "rank": (
        {"gate_up_lora_a": A[0], "gate_up_lora_b": B},
        ShapeError,
        r"gate_up_lora_a has rank "
        r"2; expected \[G, r, K\]",
    ),
    "another K": (
        {"gate_up_lora_a": A[..., :5], "gate_up_lora_b": B},
        ShapeError,
        r"gate_up_lora_a \[6, 3, 5\]; expected \[6, 3, 6\], r features of the 6 that gate_up \[6, "
        r"8, 6\] reads",
    ),
    "another r": (
        {"gate_up_lora_a": A, "gate_up_lora_b": B[..., :2]},
        ShapeError,
        r"gate_up_lora_b \[6, 8, 2\]; expected \[6, 8, 3\], the 8 out-features of gate_up \[6, 8, "
        r"6\] from those of gate_up_lora_a",
    ),
    "integers": (
        {"gate_up_lora_a": A.int(), "gate_up_lora_b": B},
        DtypeError,
        "gate_up_lora_a is torch.int32",
    ),
    "float64": (
        {"gate_up_lora_a": A.double(), "gate_up_lora_b": B},
        DtypeError,
        r"gate_up_lora_a is torch.float64, rows torch.float32; expected torch.float64 for both, "
        r"or for neither; pass gate_up_lora_a.to",
    ),
}


@pytest.mark.parametrize(("added", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_refused(added, error, says):
    given = {
        n: t.float() if t.is_floating_point() else t
        for n, t in layer(ROUTING, "both").items()
        if "lora" not in n
    }
    with pytest.raises(error, match=f"fused_experts: .*{says}"):
        call(given | added)
