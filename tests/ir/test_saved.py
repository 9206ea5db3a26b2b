"""What a derivative saves: which values, of which dtypes, how many bytes; and that nothing dear is
done twice.
"""

from __future__ import annotations

from itertools import combinations

import pytest
from fusions import G, expert_mlp_variants, programs
from hypothesis import given

from fusion_moe import FusionDefinition
from fusion_moe.definitions.operations import fusion_of
from fusion_moe.errors import UnsupportedError
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import Derivative, differentiate
from fusion_moe.ir.sizes import symbol
from fusion_moe.ir.types import TensorType

H, I = 32, 16
T = symbol("t")
NAMES = (
    "x",
    "ids",
    "w",
    *(f"{p}_{s}" for p in ("gate_up", "down") for s in ("codes", "block_scale", "decode_scale")),
)


def mlp(dtype: str = "bf16", variant: str = "plain") -> tuple[Fusion, tuple[str, ...]]:
    """expert_mlp, and the names of its inputs."""
    options = dict(expert_mlp_variants(G, H, I)[variant])
    biases = {
        name: TensorType(shape, dtype) for name, shape in options.items() if name.endswith("bias")
    }
    parts = {
        f"{name}_{part}": TensorType(shape, part_dtype)
        for name, n, k in (("gate_up", 2 * I, H), ("down", H, I))
        for part, shape, part_dtype in (
            ("codes", (G, n, k // 2), "u8"),
            ("block_scale", (G, n, k // 16), "f8e4m3"),
            ("decode_scale", (G,), "f32"),
        )
    }
    types = {
        "x": TensorType((T, H), dtype),
        "ids": TensorType((T, 2), "i64"),
        "w": TensorType((T, 2), "f32"),
        **parts,
        **biases,
    }
    others = {
        "gate_up_bias": None,
        "down_bias": None,
        "activation": None,
    }
    others |= {
        "scale_on": "output",
        "activation_format": "bf16",
        "weight_layout": "linear",
        "first_expert": None,
        **options,
    }
    others = {name: value for name, value in others.items() if name not in types}
    return fusion_of("expert_mlp", tuple(types.items()), tuple(others.items())), tuple(types)


def saved(derivative: Derivative, fusion: Fusion) -> list[str]:
    """The types of what the forward gives beside the outputs of the Fusion."""
    return [str(v.type.with_(ends=None)) for v in derivative.forward.outputs[len(fusion.outputs) :]]


def read(derivative: Derivative, names: tuple[str, ...]) -> list[str]:
    """The inputs that the backward reads."""
    return [names[i] for i in derivative.reads if i < len(names)]


def products(fusion: Fusion) -> list[str]:
    return [op.kind.name for op in fusion.ops if op.kind.role == "grouped"]


# ends of the groups, the token of each row, the row of each slot: 8 bytes a row
INDICES = ["i32[3]", "i32[2*t/g0]", "i32[t, 2]"]
PRE_ACTIVATION, RESULT = f"bf16[2*t/g0, {2 * I}]", f"bf16[2*t/g0, {H}]"
WEIGHTS = list(NAMES[3:])
WANTED = {  # what wants a gradient: values saved, inputs read, products of the backward
    ("x",): ([*INDICES, PRE_ACTIVATION], ["w", *WEIGHTS], ["grouped_mm_t"] * 2),
    ("w",): ([*INDICES, RESULT], [], []),
    ("x", "w"): ([*INDICES, PRE_ACTIVATION], ["w", *WEIGHTS], ["grouped_mm_t"] * 2),
}


@pytest.mark.parametrize("wanted", WANTED, ids="+".join)
def test_what_expert_mlp_saves_for_each_gradient(wanted):
    """In the dtype to which the program rounds it, f32 sums never; and no product is done again."""
    fusion, names = mlp()
    derivative = differentiate(fusion, [names.index(n) for n in wanted])
    assert (
        saved(derivative, fusion),
        read(derivative, names),
        products(derivative.backward),
    ) == WANTED[wanted]
    assert products(derivative.forward) == ["grouped_mm"] * 2
    assert derivative.forward.outputs[: len(fusion.outputs)] == fusion.outputs


def test_biases_want_less_than_activations():
    """The gradient of FC2's bias reads no value, that of FC1's reads what that of x does, but for
    FC1's weight. No bias is read.
    """
    fusion, names = mlp(variant="bias")
    down, gate_up = (differentiate(fusion, [names.index(n)]) for n in ("down_bias", "gate_up_bias"))
    assert (saved(down, fusion), read(down, names), products(down.backward)) == (INDICES, ["w"], [])
    assert saved(gate_up, fusion) == [*INDICES, PRE_ACTIVATION]
    assert read(gate_up, names) == ["w", *WEIGHTS[3:]]
    assert products(gate_up.backward) == ["grouped_mm_t"]


@pytest.mark.parametrize("variant", expert_mlp_variants(G, H, I))
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_no_product_is_done_twice(variant, dtype):
    fusion, names = mlp(dtype, variant)
    floats = [i for i, name in enumerate(names) if name in ("x", "w", "gate_up_bias", "down_bias")]
    for count in range(1, len(floats) + 1):
        for wrt in combinations(floats, count):
            derivative = differentiate(fusion, wrt)
            assert products(derivative.forward) == ["grouped_mm"] * 2
            assert "grouped_mm" not in products(derivative.backward)
            # which sorts
            assert not [op for op in derivative.backward.ops if op.kind.name == "route"]
            assert all(str(v.type).startswith((dtype, "i32")) for v in derivative.forward.outputs)


def test_the_fewest_bytes_are_saved():
    """Of what leads from a product to what the backward reads: the narrowest; one value, not its
    halves; not what is spread over more.
    """
    fd = FusionDefinition()
    x, w = (
        fd.define_tensor(shape=[-1, 4], dtype="f32"),
        fd.define_tensor(shape=[1, 8, 4], dtype="f32"),
    )
    rows, ops = x.type.shape[0], fd.ops
    ends = fd.groups_of(fd.define_tensor(shape=[1], dtype="i32"), rows)
    product = ops.grouped_mm(ops.partition(x, ends), w, ends)  # 32 bytes a row
    narrow = ops.cast(product, dtype="bf16")  # 16
    left, right = (
        ops.cast(
            ops.slice(narrow, start_indices=(0, i), end_indices=(narrow.type.shape[0], i + 4)),
            dtype="f32",
        )
        for i in (0, 4)
    )
    fd.add_output(ops.mul(ops.exp(left), ops.exp(right)))
    assert saved(differentiate(fd.fusion(), (0,)), fd.fusion()) == ["bf16[s0/g0, 8]"]
    one = ops.slice(narrow, start_indices=(0, 0), end_indices=(narrow.type.shape[0], 1))
    fd.add_output(ops.silu(ops.broadcast_in_dim(one, shape=(rows, 64), broadcast_dims=(0, 1))))
    only = Fusion(fd.fusion().inputs, fd.fusion().ops, fd.fusion().outputs[1:])
    assert saved(differentiate(only, (0,)), only) == ["bf16[s0/g0, 1]"]


def test_outputs_and_inputs_are_there_anyway():
    """exp's derivative reads its result: where that is an output nothing else is saved, and where
    it leads back to an input, neither.
    """
    fd = FusionDefinition()
    x, w, offs = (
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (([-1, 4], "f32"), ([1, 4, 4], "f32"), ([1], "i32"))
    )
    ends = fd.groups_of(offs, x.type.shape[0])
    y = fd.ops.exp(fd.ops.grouped_mm(fd.ops.partition(fd.ops.exp(x), ends), w, ends))
    fd.add_output(y)
    derivative = differentiate(fd.fusion(), (0,))
    assert derivative.forward == fd.fusion()
    assert derivative.reads == (0, 1, 2, 3)


@given(programs())
def test_no_product_of_any_program_is_done_again(fusion):
    for i, v in enumerate(fusion.inputs):
        if v.type.dtype not in ("f32", "bf16") or fusion.role(v) != "argument":
            continue
        try:
            backward = differentiate(fusion, [i]).backward
        except UnsupportedError:
            continue
        for dgrad, product in ("grouped_mm_t", "grouped_mm"), ("grouped_mm", "grouped_mm_t"):
            assert products(backward).count(dgrad) <= products(fusion).count(product)
