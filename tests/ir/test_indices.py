"""Operands whose elements are places in memory, or numbers of rows: each bad one is an error before
anything is read, of the reference and of kernels of the CPU. GPUs: tests/gpu/test_cuda_contents.py.

A new operand that can only be integers, or ends, fails until INDICES has a row for it.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from cpu_tiers import OF_VECTORS, program, together
from test_what_verifies import KINDS, inputs, programs

from fusion_moe.distributed.collectives import Together
from fusion_moe.errors import GroupsError

FAR = -(2**31), 2**31 - 1
# positions and values. Numbers of 32 rows, or experts; -1 is no expert
INDEX = [(0, n) for n in (-1, 32, *FAR)]
IDS = [(0, n) for n in (-2, 32, *FAR)]
ENDS = [(0, -1), (0, 33), (0, FAR[0]), (1, 2), (1, 33), (1, FAR[1])]
OF_RANKS = [(0, n) for n in (-1, 33, *FAR)]
DTYPES = "bf16", "f32", "i32", "i64", "f8e4m3", "f8e8m0", "nvfp4", "mxfp8_columns"
ANY: list[tuple[int, int]] = []  # an element that is no index is none: nothing is read for it
INDICES = {
    **dict.fromkeys(("cast.x", "reshape.x", "slice.x"), ANY),  # numbers, also those that are ends
    "ends.offs": ENDS,
    "problem_ends.starts": [(i, n) for i in range(2) for n in (-1, 4, *FAR)],
    "problem_ends.problem_sizes": [(i, n) for i in range(6) for n in (-1, 33, *FAR)],
    "problem_ends.padded_starts": [(1, n) for n in (0, 64, *FAR)],
    "route.ids": IDS,
    "place.ids": IDS,
    "place.expert_map": IDS,  # of 32 places
    "index_select.index": INDEX,
    "index_put_accumulate.index": INDEX,
    "invert.slot_of": [(0, 1), *INDEX],
    "combine.slot_of": INDEX,
    "topk_weights.ids": INDEX,
    "topk_weights_backward.ids": INDEX,
    "routing_map.ids": ANY,
    **dict.fromkeys(("dispatch.ids", "combine_from.ids", "combine_from.all_ids"), ANY),
    # a program finds memory by where peers lie: tests/integrations/distributed/test_symmetric.py
    **dict.fromkeys(("dispatch.peers", "combine_from.peers"), ANY),
    "combine_from.ends": OF_RANKS,
    "quantize.beside": ENDS,
    **{
        f"{kind}.ends": ENDS
        for kind in (
            *(
                "partition",
                "zero_rest",
                "transpose_row_blocks",
                "untranspose_row_blocks",
                "dequantize",
                "relayout",
            ),
            *("grouped_swizzle", "grouped_mm", "grouped_mm_t", "grouped_outer"),
            *("group_add", "group_mul", "group_sum"),
        )
    },
}


def named(fusion):
    """The operands of a program of one operation that are inputs, by name."""
    (op,) = fusion.ops
    parameters = list(inspect.signature(op.kind.infer).parameters.values())
    for i, v in enumerate(op.inputs):
        of = next((p for p in parameters[: i + 1] if p.kind == p.VAR_POSITIONAL), None)
        if v in fusion.inputs:
            yield f"{op.kind.name}.{(of or parameters[i]).name}", fusion.inputs.index(v)


def good(fusion):
    """Inputs of a program of one operation."""
    name = fusion.ops[0].kind.name
    return [torch.tensor([3, 32]).int()] if name == "ends" else inputs(name, fusion)


def all_bad(fusion):
    """The inputs of a program, with each bad value of each operand."""
    given = good(fusion)
    for name, i in named(fusion):
        yield from ((name, *case) for case in bad(name, given, i))


def bad(name, given, i):
    dtype, values = getattr(given[i], "dtype", None), INDICES.get(name, ANY)
    if dtype == torch.int64 and values:
        values = [*values, (0, -(2**63)), (0, 2**40)]
    for at, value in values if dtype in (torch.int32, torch.int64) else ANY:
        changed = list(given)
        changed[i] = changed[i].clone()
        changed[i].view(-1)[at] = value
        yield (at, value), changed


@pytest.fixture(scope="module")
def forms():
    """Of each kind, a program for each set of indices, and the dtypes of each operand of all."""
    found, dtypes = {}, {}
    for kind in KINDS:
        for fusion in programs(kind, DTYPES):
            operands = dict(named(fusion))
            for name, i in operands.items():
                type = fusion.inputs[i].type
                dtypes.setdefault(name, set()).add("ends" if type.ends else type.dtype)
            attrs = fusion.ops[0].attrs
            indices = frozenset(
                (name, str(fusion.inputs[i].type.dtype))
                for name, i in operands.items()
                if INDICES.get(name) and fusion.inputs[i].type.dtype in ("i32", "i64")
            )
            if indices and attrs.get("first_expert") is None:
                found.setdefault((kind, indices), fusion)
    return found, dtypes


def test_each_operand_of_integers_has_a_row(forms):
    _, dtypes = forms
    indices = {name for name, of in dtypes.items() if "ends" in of or of <= {"i32", "i64"}}
    assert indices == INDICES.keys()


def test_the_reference_refuses(forms):
    for fusion in forms[0].values():
        for name, what, changed in all_bad(fusion):
            with pytest.raises(GroupsError):
                print(name, what, Together(1).run(lambda _, f=fusion, c=changed: f.evaluate(*c)))


@pytest.mark.compiler
def test_kernels_of_the_cpu_refuse(forms):
    """After a good call of the same sizes."""
    tier = OF_VECTORS[0]
    fusions = {
        (name, *others): fusion
        for (name, *others), fusion in forms[0].items()
        if all(k.backend == "cpu" for k in program(fusion, tier).kernels)
        and name != "combine_from"  # which waits for others: cases.py
    }
    assert len({name for name, *_ in fusions}) > 12
    for key, made in together(fusions, tier).items():
        made(good(fusions[key]))
        for name, what, changed in all_bad(fusions[key]):
            plan = made.joined.plan(torch.device("cpu"), made.sizes(changed, {}))
            assert plan.run(changed) is None, (name, what)
            with pytest.raises(GroupsError):
                made(changed)
