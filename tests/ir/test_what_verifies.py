"""What verifies evaluates, to its type: programs of one operation, of every kind and of operands in
every dtype and encoding.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch

from fusion_moe import FusionDefinition
from fusion_moe.distributed.collectives import Together
from fusion_moe.encodings import ENCODINGS, Quantized
from fusion_moe.errors import Error
from fusion_moe.ir.kinds import KINDS
from fusion_moe.ir.kinds.quantized import STRAIGHT_THROUGH
from fusion_moe.ir.kinds.runs import part_shape
from fusion_moe.ir.types import DTYPES, dim_value
from fusion_moe.layouts import LAYOUTS, SF128x4

ROWS, ENDS = "32 rows of two groups, of 32 features", "the ends of the groups"
RANKED, OF_RANKS = "32 rows of one rank", "where its tokens end"
SLOTS_OF_RANKS = "the slots of these rows"
X, COLUMN, VECTOR, SLOTS, MATRICES = (32, 32), (32, 1), (32,), (16, 2), (2, 32, 32)
STORED_IN = dict.fromkeys((*DTYPES, *ENCODINGS))
TRUTH, ROUTING = (True, False), ("softmax", "sigmoid")
MANY = 100  # choices of dtypes


def each(name, values, **others):
    """Attributes, with each of these values for one of them."""
    return [{name: v, **others} for v in values]


def parts():
    """pack: the parts of each encoding, as each layout stores them."""
    for encoding, layout, transposed in product(ENCODINGS.values(), LAYOUTS.values(), TRUTH):
        elements, *scales = (part_shape(encoding, p, (2, 128, 128)) for p in encoding.parts)
        stored = [
            layout.storage_shape(s) if len(s) > 1 and isinstance(layout, SF128x4) else s
            for s in scales
        ]
        elements = (2, *reversed(elements[1:])) if transposed else elements
        yield (
            [elements, *stored],
            [{"encoding": encoding.name, "layout": layout.name, "transposed": transposed}],
        )


AMONG = {"experts": 32, "group": "one"}
NUMBERS = (0, 1, -1, 300, 0.5, True, 1e30, math.inf, math.nan)
TWO = [[X, X], [ROWS, ROWS], *([X, n] for n in NUMBERS), *([n, X] for n in NUMBERS)]
POINTWISE = [([X], [{}]), ([ROWS], [{}])], [(operands, [{}]) for operands in TWO]
FORMS = {  # kind -> operands (shapes, or numbers) with their attributes
    **{
        kind.name: POINTWISE[(kind.signature.operands or 1) - 1]
        for kind in KINDS.values()
        if (kind.signature.operands or 3) < 3
    },
    "cast": [([x], each("dtype", DTYPES)) for x in (X, ROWS, ENDS)],
    "where": [([X, *pair], [{}]) for pair in TWO],
    "reshape": [([X], [{"new_shape": (64, 16)}]), ([ENDS], [{"new_shape": (2, 1)}])],
    "permute": [([X], [{"dims": (1, 0)}]), ([ROWS], [{"dims": (1, 0)}])],
    "broadcast_in_dim": [([COLUMN], [{"shape": (2, 32, 4), "broadcast_dims": (1, 2)}])],
    "slice": [
        ([X], [{"start_indices": (1, 2), "end_indices": (3, 16)}]),
        ([ENDS], [{"start_indices": (1,), "end_indices": (2,)}]),
    ],
    "pad": [([X], [{"before": (1, 0), "after": (0, 2), "shape": (33, 34)}])],
    "cat": [
        ([X], each("dim", (0, 1))),
        ([X, X], each("dim", (0, 1))),
        ([ENDS, VECTOR], each("dim", (0,))),
    ],
    "full": [([], each("fill_value", NUMBERS, shape=(2, 3), dtype=dtype)) for dtype in DTYPES],
    "sum": [([X], each("keepdim", TRUTH, dims=(0,)))],
    "logsumexp": [([x], [{}]) for x in (X, ROWS, VECTOR)],
    "ends": [([(2,)], [{"rows": 32, "groups": 2}])],
    "problem_ends": [([(2,), (2, 3), (2,)], [{"rows": 32, "groups": 2, "n": 32, "k": 32}])],
    "partition": [([X, ENDS], [{}]), ([VECTOR, ENDS], [{}])],
    "zero_rest": [([ROWS, ENDS], [{}])],
    "route": [([SLOTS], [{"groups": 32}, {"groups": 2, "first_expert": 1}])],
    "place": [([SLOTS, VECTOR], each("here", (32, 64)))],
    "index_select": [([X, VECTOR], each("dim", (0, 1))), ([ROWS, VECTOR], each("dim", (0, 1)))],
    "index_put_accumulate": [([X, VECTOR, X], [{}]), ([VECTOR, VECTOR, VECTOR], [{}])],
    "dispatch": [([X, (32, 2), (32, 2), (5,)], [{"groups": (1, 32), **AMONG}])],
    "combine_from": [([RANKED, SLOTS_OF_RANKS, SLOTS, OF_RANKS, (5,)], [AMONG])],
    "invert": [([SLOTS], [{"rows": 32}])],
    "combine": [([X, SLOTS, SLOTS], [{}])],
    "topk_ids": [
        ([X, VECTOR], each("scoring", ROUTING, k=2)),
        ([X, 0], each("n_group", (1, 4), k=2, topk_group=1)),
    ],
    "routing_map": [([SLOTS], each("experts", (1, 32)))],
    "topk_weights": [
        ([X, (32, 2)], each("dtype", (None, *DTYPES), scoring=s, renormalize=r))
        for s, r in product(ROUTING, TRUTH)
    ],
    "topk_weights_backward": [([X, (32, 2), (32, 2)], [{}])],
    "pack": list(parts()),
    "transpose_blocks": [([(2, 128, 256), (2, 128, 2)], [{}])],
    "transpose_row_blocks": [([ROWS, ENDS], [{}])],
    "untranspose_row_blocks": [([(3, 32, 128), ENDS], [{"rows": ROWS}])],
    "unpack": [([x], [{}]) for x in (X, ROWS, MATRICES)],
    "straight_through": [([MATRICES] * count, each("how", STRAIGHT_THROUGH)) for count in (2, 3)],
    "decode_scale": [([x], each("encoding", ENCODINGS)) for x in (X, ROWS, MATRICES)],
    "quantize": [
        (operands, each("encoding", ENCODINGS))
        for operands in (
            [X],
            [X, ()],
            [ROWS],
            [ROWS, ()],
            [ROWS, ENDS],
            [MATRICES],
            [MATRICES, (2,)],
            [MATRICES, (2, 4)],
        )
    ],
    "dequantize": [
        (operands, each("dtype", DTYPES)) for operands in ([X], [ROWS], [ROWS, ENDS], [MATRICES])
    ],
    "grouped_swizzle": [([ROWS, ENDS], each("layout", LAYOUTS))],
    "relayout": [(x, each("layout", LAYOUTS)) for x in ([ROWS, ENDS], [MATRICES], [ROWS])],
    "grouped_mm": [
        ([ROWS, MATRICES, ENDS], each("wgrad", ("", "mxfp8", "fp8", "bf16"), operands=o))
        for o in ("", "int8")
    ],
    "grouped_mm_t": [([ROWS, MATRICES, ENDS], each("wgrad", ("", "mxfp8", "fp8", "bf16")))],
    "grouped_outer": [([ROWS, ROWS, ENDS], [{}])],
    "group_add": [([ROWS, (2, 32), ENDS], [{}])],
    "group_mul": [([ROWS, (2, 32), ENDS], [{}])],
    "group_sum": [([ROWS, ENDS], [{}])],
}


def programs(name, of=None, every=1):
    """All programs of one operation of a kind that verify, or those with operands of some dtypes
    and encodings; of operations with many, those of one of so many choices of dtypes.
    """
    for operands, attributes in FORMS[name]:
        shapes = [i for i, o in enumerate(operands) if o in (ROWS, RANKED) or isinstance(o, tuple)]
        for attrs in attributes:
            for_all = definition()
            choices = list(product(of or stored_in(name, attrs), repeat=len(shapes)))
            for dtypes in choices[:: every if len(choices) > MANY else 1]:
                given = dict(zip(shapes, dtypes, strict=True))
                try:
                    if "groups" not in attrs:  # most are refused: without a definition for each
                        results(name, operands, given, attrs, *for_all)
                    yield program(name, operands, given, attrs)
                except Error:
                    continue


def stored_in(name, attrs):
    """The dtypes and encodings that each operand is tried in: of `pack`, the dtypes of the parts of
    its encoding, each for each part, and another one.
    """
    if name in ("dispatch", "combine_from"):
        return ["f64", "f32", "bf16", "i64", "i32", "nvfp4"]
    if name != "pack":
        return STORED_IN
    of_parts = {p.dtype for p in ENCODINGS[attrs["encoding"]].parts}
    return ["bf16", *(n for n, dtype in DTYPES.items() if dtype in of_parts and n != "bf16")]


def definition():
    """A definition, and its operands, each made once."""
    fd = FusionDefinition()
    groups, ranks = fd.define_groups("g", 2), fd.define_groups("s", 1, stride=32)
    ends, rows = {ENDS: groups, OF_RANKS: ranks}, {ROWS: groups, RANKED: ranks}

    @cache
    def operand(i, o, dtype):
        if o in ends:
            return fd.define_tensor(shape=[ends[o].count], dtype="i32", ends=ends[o])
        if o == SLOTS_OF_RANKS:
            return fd.define_tensor(shape=[32 / ranks, 2], dtype="i32")
        shape = [32 / rows[o], 32] if o in rows else o
        return o if dtype is None else fd.define_tensor(shape=shape, dtype=dtype)

    return fd, groups, operand


def results(name, operands, dtypes, attrs, fd, groups, operand):
    counts = attrs.get("groups", ())
    counts = counts if isinstance(counts, tuple) else (counts,)
    made = {"groups": fd.define_groups("made", *counts)} if counts else {}
    made |= {"rows": 32 / groups} if attrs.get("rows") == ROWS else {}
    values = (operand(i, o, dtypes.get(i)) for i, o in enumerate(operands))
    found = getattr(fd.ops, name)(*values, **{**attrs, **made})
    return found if isinstance(found, tuple) else (found,)


def program(name, operands, dtypes, attrs):
    fd, *others = definition()
    for v in results(name, operands, dtypes, attrs, fd, *others):
        fd.add_output(v)
    return fd.fusion()


def sizes(shape):
    return tuple(dim_value(d, {}) for d in shape)


def numbers(type):
    """A tensor or an encoded value of a type, of numbers that are indices among 32 rows too."""
    if type.ends:
        return torch.tensor([3, 32], dtype=torch.int32)[-type.ends.count :]
    if type.quantized:
        shapes = (sizes(part_shape(type.encoding, p, type.shape)) for p in type.encoding.parts)
        parts_ = (
            torch.full(s, bool(p.scale)).to(p.dtype)
            for p, s in zip(type.encoding.parts, shapes, strict=True)
        )
        return Quantized(*parts_, encoding=type.encoding)
    shape = sizes(type.shape)
    return (torch.arange(math.prod(shape)) % 32).reshape(shape).to(DTYPES[type.dtype])


def inputs(name, fusion):
    if name == "problem_ends":
        return [
            torch.tensor(t, dtype=torch.int32)
            for t in ([0, 3], [[3, 32, 32], [29, 32, 32]], [0, 128])
        ]
    return [numbers(v.type) for v in fusion.inputs]


def of_type(made, type):
    """Whether a result is what its type says; in other layouts than linear only dtypes are
    compared.
    """
    if type.quantized:
        parts_ = [
            (t, p.dtype, part_shape(made.encoding, p, type.shape))
            for p, t in made.named()
            if not p.of_matrix
        ]
        assert made.encoding is type.encoding
    else:
        parts_ = [(made, DTYPES[type.dtype], type.shape)]
    return all(
        t.dtype == dtype and (type.layout != "linear" or tuple(t.shape) == sizes(shape))
        for t, dtype, shape in parts_
    )


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", KINDS)
def test_what_verifies_evaluates_to_its_type(name, every):
    tried = (list(programs(name, every=n)) for n in (every, 5, 3, 1))  # more where few verify
    verified = next(filter(None, tried), [])
    assert verified
    for fusion in verified:
        given = inputs(name, fusion)
        (found,) = Together(1).run(lambda _, f=fusion, given=given: f.evaluate(*given))
        for made, v in zip(found, fusion.outputs, strict=True):
            assert of_type(made, v.type), fusion
