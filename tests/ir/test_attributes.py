"""Operands and attributes: by position and by name, each of its type. What is not gets into no
Fusion, and so into no kernel's text.
"""

from __future__ import annotations

import pytest
import torch
from fusions import evaluate

from fusion_moe import FusionDefinition
from fusion_moe.errors import Error, FusionError
from fusion_moe.ir.kinds import KINDS
from fusion_moe.ir.text import text

CODE = 'system("touch ran")'
HOSTILE = [
    CODE,
    f"0); {CODE}; //",
    f'"); {CODE}; ("',
    "\\",
    "x\nint y = 0;",
    "",
    b"bf16",
    None,
    1j,
    2.5,
    10**25,
    -(2**63) - 1,
    [CODE],
    [[0]],
    [2.5],
    [None],
    {},
    {"a": 1},
    ("bf16",),
    ...,
    float,
    torch.float32,
    torch.tensor(2),
    object(),
]


def program():
    """Inputs for every kind, and its attributes by which each can be called."""
    fd = FusionDefinition()
    m, g = fd.define_size("m"), fd.define_groups("g", 2)

    def tensor(*shape, dtype="f32", ends=None):
        return fd.define_tensor(shape=shape, dtype=dtype, ends=ends)

    x, ids, i32 = tensor(m, 32), tensor(m, 2, dtype="i64"), tensor(2, dtype="i32")
    ends = tensor(2, dtype="i32", ends=g)
    parts = [tensor(2, 32, 16, dtype="u8"), tensor(2, 32, 2, dtype="f8e4m3"), tensor(2)]
    weight = fd.ops.pack(*parts, "nvfp4", "linear")
    rows, dense = fd.ops.partition(x, ends), tensor(2, 32, 32)
    columns = fd.ops.quantize(dense, "mxfp8_columns")
    ranks, peers = fd.define_groups("s", 2, stride=m), tensor(6, dtype="i64")
    sums, all_ids = tensor(m * 2 / ranks, 32), tensor(m * 2 / ranks, 2, dtype="i32")
    calls = {
        "cast": ([x], {"dtype": "bf16"}),
        "reshape": ([x], {"new_shape": [m * 32]}),
        "permute": ([x], {"dims": [1, 0]}),
        "broadcast_in_dim": ([x], {"shape": [m, 4, 32], "broadcast_dims": [0, 2]}),
        "slice": ([x], {"start_indices": [0, 1], "end_indices": [m, 9]}),
        "pad": ([x], {"before": [0, 4], "after": [0, 4], "shape": [m, 40]}),
        "cat": ([[x, x]], {"dim": 1}),
        "full": ([], {"shape": [m, 3], "fill_value": 2.5, "dtype": "f32"}),
        "sum": ([x], {"dims": [1], "keepdim": True}),
        "ends": ([i32], {"rows": m, "groups": fd.define_groups("h", 2)}),
        "problem_ends": (
            [i32, tensor(2, 3, dtype="i32"), i32],
            {"rows": m, "groups": fd.define_groups("p", 2), "n": 32, "k": 32},
        ),
        "place": ([ids, i32], {"here": 2}),
        "route": ([ids], {"groups": fd.define_groups("r", 2), "first_expert": 1}),
        "dispatch": (
            [[x, ids, tensor(m, 2), peers]],
            {"groups": fd.define_groups("d", 2, stride=m), "experts": 4, "group": "name"},
        ),
        "combine_from": (
            [sums, all_ids, ids, tensor(2, dtype="i32", ends=ranks), peers],
            {"experts": 4, "group": "name"},
        ),
        "topk_ids": (
            [x, tensor(32)],
            {"k": 4, "scoring": "sigmoid", "n_group": 4, "topk_group": 2, "best_of_group": 2},
        ),
        "routing_map": ([ids], {"experts": 4}),
        "topk_weights": (
            [x, ids],
            {
                "scoring": "sigmoid",
                "renormalize": True,
                "routed_scaling_factor": 2.5,
                "dtype": "bf16",
            },
        ),
        "topk_weights_backward": (
            [x, ids, tensor(m, 2)],
            {"scoring": "sigmoid", "renormalize": True, "routed_scaling_factor": 2.5},
        ),
        "index_select": ([x, tensor(3, dtype="i64")], {"dim": 0}),
        "invert": ([tensor(m, 2, dtype="i32")], {"rows": m * 2}),
        "pack": (parts, {"encoding": "nvfp4", "layout": "linear", "transposed": False}),
        "straight_through": ([weight, dense], {"how": "exact"}),
        "decode_scale": ([dense], {"encoding": "nvfp4"}),
        "quantize": ([dense, tensor(2)], {"encoding": "nvfp4", "scales": "max"}),
        "untranspose_row_blocks": (
            [
                fd.ops.transpose_row_blocks(
                    fd.ops.partition(tensor(m, 32, dtype="f8e4m3"), ends), ends
                ),
                ends,
            ],
            {"rows": m / g},
        ),
        "grouped_swizzle": (
            [fd.ops.partition(tensor(m, 2, dtype="f8e4m3"), ends), ends],
            {"layout": "sf128x4"},
        ),
        "relayout": ([fd.ops.quantize(rows, tensor(), "nvfp4"), ends], {"layout": "sf128x4"}),
        "dequantize": ([weight], {"dtype": "f32"}),
        "grouped_mm": (
            [rows, weight, ends],
            {"a_layout": "linear", "w_layout": "linear", "wgrad": "", "operands": ""},
        ),
        "grouped_mm_t": (
            [fd.ops.quantize(rows, "mxfp8"), columns, ends],
            {"w_layout": "linear", "wgrad": "mxfp8"},
        ),
    }
    return fd, calls


CALLS = program()[1]
OPTIONAL = {("route", "first_expert"), ("topk_weights", "dtype")}  # which None stands for too


def test_every_kind_with_attributes_has_a_call():
    assert set(CALLS) == {name for name, kind in KINDS.items() if kind.signature.attributes}
    for name, (_, attrs) in CALLS.items():
        assert list(attrs) == list(KINDS[name].signature.attributes)


@pytest.mark.parametrize("name", CALLS)
def test_by_name_and_by_position_is_the_same(name):
    said = []
    for by_position in False, True:
        fd, calls = program()
        operands, attrs = calls[name]
        made = (
            getattr(fd.ops, name)(*operands, *attrs.values())
            if by_position
            else getattr(fd.ops, name)(*operands, **attrs)
        )
        fd.add_output(made[0] if isinstance(made, tuple) else made)
        said.append(text(fd.fusion()))
    assert said[0] == said[1]


@pytest.mark.parametrize("name", CALLS)
def test_hostile_attributes_are_refused(name):
    for attr, good in CALLS[name][1].items():
        for bad in [*HOSTILE, True, [True]]:
            fine = ((name, attr) in OPTIONAL and bad is None) or (
                attr == "fill_value" and type(bad) in (bool, float)
            )
            if fine or bad == good or type(bad) is type(good) is bool:
                continue
            fd, calls = program()
            operands, attrs = calls[name]
            before = fd.count
            with pytest.raises(Error):
                getattr(fd.ops, name)(*operands, **{**attrs, attr: bad})
            assert fd.count == before


@pytest.mark.parametrize("bad", HOSTILE, ids=lambda v: type(v).__name__)
def test_operands_are_values_or_numbers(bad):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1], dtype="f32")
    other = FusionDefinition().define_tensor(shape=[-1], dtype="f32")
    if bad == 2.5:
        fd.ops.mul(x, bad)
        return
    for value in bad, x.type.shape[0], other.type:
        with pytest.raises(Error):
            fd.ops.mul(x, value)
    assert fd.count == 0


@pytest.mark.parametrize(
    "name",
    [
        *("fd", "i0", "t12", "class", "lambda", "nan", "inf", "ceildiv", "a b", "a-b", "x = 1"),
        *("1", "", CODE, "x" * 64, "µ", 3, None),
    ],
)
def test_names_are_what_kernels_can_be_written_with(name):
    fd = FusionDefinition()
    for define in fd.define_size, lambda n: fd.define_groups(n, 2):
        with pytest.raises(FusionError, match="the name"):
            define(name)


def test_wrong_numbers_of_arguments():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    for call, found in (
        (lambda: fd.ops.cast(x), "no dtype"),
        (lambda: fd.ops.cast(x, "bf16", "f32"), "3 arguments by position"),
        (lambda: fd.ops.cast(x, "bf16", dtype="bf16"), "dtype given twice"),
        (lambda: fd.ops.cast(dtype="bf16"), "cast"),
        (lambda: fd.ops.cast(x, kind="bf16"), "an attribute 'kind'"),
        (lambda: fd.ops.exp(x, x), "2 arguments by position"),
        (lambda: fd.ops.add(x), "1 arguments by position"),
    ):
        with pytest.raises(FusionError, match=found):
            call()


def test_attributes_by_position_mean_what_nvfusers_do():
    x = torch.arange(6.0).reshape(2, 3)
    fd = FusionDefinition()
    v = fd.from_pytorch(x)
    for made in (
        fd.ops.cast(v, "bf16"),
        fd.ops.slice(v, [0, 1], [2, 3]),
        fd.ops.cat([v, v], 0),
        fd.ops.permute(v, [1, 0]),
    ):
        fd.add_output(made)
    found = evaluate(fd.fusion(), x)
    for a, b in zip(found, (x.bfloat16(), x[:, 1:], torch.cat([x, x]), x.T), strict=True):
        assert torch.equal(a, b)
