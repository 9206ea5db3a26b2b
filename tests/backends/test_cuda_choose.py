"""What CUDA's backend chooses for a call: a value made of facts, without a GPU and without a
compiler.
"""

from __future__ import annotations

import re
from itertools import combinations

import pytest
import torch
from cover import few
from fusions import fusion_of_call

from fusion_moe.arch import A100, H100, H200, KNOWN
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda import launch
from fusion_moe.backends.cuda.choose import Choice
from fusion_moe.backends.cuda.grouped_mm import IDS
from fusion_moe.backends.cuda.product import Product
from fusion_moe.backends.cuda.readers import readable
from fusion_moe.compile import compile_fusion
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.errors import OptionError, UnsupportedError
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.options import Options
from fusion_moe.runtime import cuda, nvrtc

pytestmark = pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
GROUPS, K = 8, 256


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a choice needs neither a GPU nor a compiler")

    monkeypatch.setattr(launch, "build", fail)
    monkeypatch.setattr(cuda, "arch", fail)
    monkeypatch.setattr(cuda, "driver", fail)


def products(*after: str, outputs: tuple[int, ...] = (-1,), width: int = K) -> Fusion:
    """Products in a row on rows that are sorted; after each of them "" or "add", of its own
    rows.
    """
    fd = FusionDefinition()
    m, groups = fd.define_size("m"), fd.define_groups("g", GROUPS)
    x, offs = (
        fd.define_tensor(shape=[m, K], dtype="bf16"),
        fd.define_tensor(shape=[GROUPS], dtype="i32"),
    )
    ends = fd.ops.ends(offs, rows=m, groups=groups)
    made = [fd.ops.partition(x, ends)]
    for what in after:
        shapes = (
            ([GROUPS, width, K // 2], "u8"),
            ([GROUPS, width, K // 16], "f8e4m3"),
            ([GROUPS], "f32"),
        )
        packed = [fd.define_tensor(shape=s, dtype=d) for s, d in shapes]
        y = fd.ops.cast(
            fd.ops.grouped_mm(
                made[-1],
                fd.ops.pack(*packed, encoding="nvfp4", layout="w16x64"),
                ends,
                w_layout="w16x64",
            ),
            "bf16",
        )
        made.append(fd.ops.add(y, made[-1]) if what == "add" else y)
    for i in outputs:
        fd.add_output(made[i])
    return fd.fusion()


def call_of(fusion: Fusion, **changes: object) -> launch.Call:
    program = compile_fusion(fusion, TARGETS["cuda"], Options().replace(**changes))
    assert isinstance(program.joined, launch.Call), [k.why for k in program.kernels]
    return program.joined


def choice_of(fusion: Fusion, rows: int, arch=H200, **changes: object) -> Choice:
    call = call_of(fusion, **changes)
    return call.choose(dict.fromkeys(call.parts.symbols, rows), arch)


def test_a_choice_is_a_value():
    call = call_of(products("", "", ""))
    (symbol,) = call.parts.symbols
    found = call.choose({symbol: 4000}, H200)
    assert found == call.choose({symbol: 4000}, H200)
    assert str(found) == str(call.choose({symbol: 4000}, H200))
    assert (
        len(
            {
                str(found),
                *(
                    str(call.choose({symbol: n}, arch))
                    for n, arch in ((4000, H100), (4001, H200), (4000, A100))
                ),
            }
        )
        == 4
    )
    assert [k.text for k in found.kernels] == [k.text for step in found.steps for k in step.kernels]


@pytest.mark.parametrize("arch", KNOWN.values(), ids=lambda arch: arch.name)
def test_every_known_gpu_has_one(arch):
    for rows in (0, 1, 4000):
        assert len(choice_of(products("", ""), rows, arch).steps) == 2


def test_what_follows_what_is_a_fact():
    assert call_of(products("", "", "")).parts.links == ((0, 1), (1, 2))
    # a result that somebody else reads
    assert call_of(products("", "", "", outputs=(1, -1))).parts.links == ((1, 2),)
    assert call_of(products("", "add")).parts.links == ()  # rows that are read as they are, too
    assert all(p.matrix is not None for p in call_of(products("", "add")).parts.parts)


def layer(change: str) -> Fusion:
    """A product of sorted rows, another one, and the sums of tokens, with something in between."""
    fd = FusionDefinition()
    tokens, groups = fd.define_size("t"), fd.define_groups("g", GROUPS)
    x = fd.define_tensor(shape=[tokens, K], dtype="bf16")
    ids = fd.define_tensor(shape=[tokens, 2], dtype="i64")
    w = fd.define_tensor(shape=[tokens, 2], dtype="f32")
    offs = fd.define_tensor(shape=[GROUPS], dtype="i32")
    bias, *weights = (
        fd.define_tensor(shape=[GROUPS, *shape], dtype="bf16") for shape in ([K], [K, K], [K, K])
    )
    ends, row_of, slot_of = fd.ops.route(ids, groups=groups, first_expert=4)
    fewer = fd.ops.ends(ends, rows=tokens, groups=fd.define_groups("f", GROUPS))
    index = fd.ops.reshape(slot_of, new_shape=[tokens * 2]) if change == "rows by slot" else row_of
    of_first = fewer if change == "fewer rows" else ends
    up = x if change == "fewer rows" else fd.ops.index_select(x, index, dim=0)
    up = fd.ops.grouped_mm(fd.ops.partition(up, of_first), weights[0], of_first)
    up = fd.ops.cast(up, dtype="bf16")
    if change == "tokens added":
        up = fd.ops.add(up, fd.ops.index_select(x, row_of, dim=0))
    elif change == "a first bias":
        up = fd.ops.group_add(up, bias, ends)
    rows, of_rows = up, of_first
    if change == "fewer rows after":
        of_rows, some = fewer, fd.define_tensor(shape=[tokens], dtype="i32")
        rows = fd.ops.partition(fd.ops.index_select(up, some, dim=0), fewer)
    if change == "other rows":
        rows = fd.ops.index_select(up, fd.ops.invert(slot_of, rows=up.type.shape[0]), dim=0)
    elif change == "other groups":
        of_rows = fd.ops.ends(offs, rows=tokens * 2, groups=fd.define_groups("h", GROUPS))
        rows = fd.ops.partition(fd.ops.reshape(up, new_shape=[tokens * 2, K]), of_rows)
    y = fd.ops.cast(fd.ops.grouped_mm(rows, weights[1], of_rows), dtype="bf16")
    if change == "a bias":
        y = fd.ops.group_add(y, bias, of_rows)
    elif change == "a bias of other groups":
        of_bias = fd.ops.ends(offs, rows=tokens * 2, groups=fd.define_groups("h", GROUPS))
        y = fd.ops.partition(fd.ops.reshape(y, new_shape=[tokens * 2, K]), of_bias)
        y = fd.ops.reshape(fd.ops.group_add(y, bias, of_bias), new_shape=[tokens * 2, K])
        y = fd.ops.partition(y, of_rows)
    elif change == "plus one":
        y = fd.ops.add(y, 1.0)
    fd.add_output(fd.ops.combine(y, slot_of, w))
    if change in ("first stored", "second stored"):
        fd.add_output(up if change == "first stored" else y)
    return fd.fusion()


@pytest.mark.parametrize(
    ("change", "unread"),
    [
        ("nothing", {0, 1}),
        ("a bias", {0, 1}),
        ("a bias of other groups", set()),
        ("plus one", set()),
        ("first stored", {1}),
        ("second stored", set()),
        ("other rows", {1}),
        ("other groups", {1}),
    ],
)
def test_rows_of_no_group_that_nothing_reads(change, unread):
    """Products leave them out, by kernels of variants and by one that has none, where sums do."""
    call = call_of(layer(change))
    assert call.parts.without_rest == unread
    for tokens in (40, 4000):
        steps = call.choose(dict.fromkeys(call.parts.symbols, tokens), H200).steps
        for i, step in enumerate(steps):
            (kernel,) = (k for k in step.kernels if k.size_class or "gemm_" in k.name)
            told = kernel.size_class[1] if kernel.size_class else kernel.text
            unwritten = told == 2**31 - 2 if kernel.size_class else "UNBOUNDED - 1}" in told
            assert unwritten == (i in unread)


def test_large_m_kernels_that_follow_each_other_are_chained():
    for rows, pairs in ((1500, [(None, 1), (0, 2), (1, None)]), (8, [(None, None)] * 3)):
        found = choice_of(products("", "", ""), rows)
        assert [(step.previous, step.next) for step in found.steps] == pairs
        assert [(s.chosen.rows_given, s.chosen.writes_fragment_order) for s in found.steps] == [
            (before is not None, after is not None) for before, after in pairs
        ]
        for step in found.steps:
            product = step.kernels[-1].text
            assert ("Columns = FragmentOrder" in product) == (step.next is not None)
            assert any(k.name == "reorder_activations" for k in step.kernels) == (
                rows == 1500 and step.previous is None
            )
    alone = call_of(products("", "", "")).parts.parts[1].source.choose({"m": 4000}, H200)
    assert not alone.rows_given


def test_memory_of_a_choice():
    """Every array that is needed has its own place for as long as it is needed; the rows between
    products take turns.
    """
    rows = 4000
    found, call = choice_of(products(*[""] * 6), rows), call_of(products(*[""] * 6))
    arrays = list(
        zip(call.parts.arrays.inner, found.workspace.arrays, found.workspace.offsets, strict=True)
    )
    for inner, array, offset in arrays:
        assert (inner.first, inner.last) == (array.first, array.last)
        assert offset + array.nbytes <= found.workspace.nbytes
    for (_, a, i), (_, b, j) in combinations(arrays, 2):
        apart = a.last < b.first or b.last < a.first
        assert apart or i + a.nbytes <= j or j + b.nbytes <= i or 0 in (a.nbytes, b.nbytes)
    assert found.workspace.nbytes == 2 * rows * K * 2
    given = len(call.parts.inputs) + len(call.parts.made)
    for i, places in enumerate(call.parts.arrays.places):
        assert all(
            arrays[p - given][0].first <= i <= arrays[p - given][0].last
            for p in places
            if p >= given
        )


def test_what_reads_or_writes_before_it_waits_does_not_overlap_what_makes_that():
    (first, second, _) = choice_of(products("", "", ""), 8).steps
    assert first.kernels[0].reads_before_wait  # ends
    assert first.overlaps[0] is False
    assert second.kernels[0].reads_before_wait
    assert second.overlaps[0] is True  # a product makes no ends


def test_a_pinned_variant_is_chosen_for_every_product():
    for rows in (1, 4000):
        found = choice_of(products("", ""), rows, cuda_variant="large_m_80x4")
        assert [[s.variant.name for s in step.chosen.size_classes] for step in found.steps] == [
            ["large_m_80x4"]
        ] * 2
    # of two that differ in how many share a multiprocessor alone, that of the weights' own regimes
    ((size_class,),) = (
        s.chosen.size_classes
        for s in choice_of(products(""), 1, cuda_variant="small_m_1x1x2x1x3").steps
    )
    assert size_class.variant.per_sm == 8


def test_whole_clusters_are_launched():
    for rows, blocks in ((1, 2), (4000, 132)):
        found = choice_of(products(""), rows, cuda_variant="large_m_64x4_k2")
        *_, kernel = found.kernels
        assert kernel.grid(H200) == blocks
        assert f"large_m_64x4_k2: {blocks} blocks in clusters of 2 of 640 threads" in str(found)
        assert "__cluster_dims__(2)" in kernel.text


def test_a_pinned_variant_that_does_not_fit_is_refused():
    with pytest.raises(UnsupportedError) as refused:
        choice_of(products(""), 1, A100, cuda_variant="large_m_48x4x2")
    text = str(refused.value)
    assert (
        "cuda_variant = 'large_m_48x4x2' does not fit a product of 8 matrices [256, 256] on A100; "
        "expected one of small_m_1x1x1x1x3" in text
    )
    assert "large_m_" not in text.split("expected")[1]
    with pytest.raises(
        OptionError,
        match=r"cuda_variant = 'small'; expected one of auto, "
        r"small_m_1x1x1x1x3, ",
    ):
        call_of(products(""), cuda_variant="small")


def test_a_choice_reads_well(golden):
    golden(str(choice_of(products("", ""), 4000)))
    assert isinstance(call_of(products("")).parts.parts[0].source, Product)


@pytest.mark.parametrize(
    ("change", "routes"),
    [
        ("nothing", True),
        ("a bias", True),
        ("a first bias", True),
        ("tokens added", False),
        ("first stored", True),
        ("rows by slot", False),
        ("other rows", False),
        ("other groups", False),
        ("fewer rows after", False),
    ],
)
def test_few_ids_are_routed_by_the_first_product(change, routes):
    """Up to 32, if the next product finds its tiles in the same ids, which are passed to it."""
    call = call_of(layer(change))
    (ids,) = (v for v in call.parts.inputs if v.type.dtype == "i64")
    number, places = call.parts.arrays.numbers[ids], call.parts.arrays.places[1]
    for tokens in (1, 16, 17):
        first, second = call.choose(dict.fromkeys(call.parts.symbols, tokens), H200).steps
        few = routes and tokens < 17
        assert (first.kernels[0].name == "route") != few
        by_ids = [k.size_class[-3:] for x in (first, second) for k in x.kernels if k.size_class]
        by_slot = few and tokens == 1  # each id has tiles of its own
        assert by_ids == [(tokens < 17, by_slot, few), (few, by_slot, False)]
        assert not few or (first.overlaps == (True,) and not first.kernels[0].reads_before_wait)
        passed = call.parts.parts[1].source.arrays_of(second.chosen)
        assert (number in [places[n] for n in passed]) == routes
    any_size = call.choose(dict.fromkeys(call.parts.symbols, 1), H200, any_size=True)
    assert any_size.kernels[0].name == "route"


def test_ids_that_are_more_than_rows_are_sorted_before():
    """A product finds its tiles in as many ids as it has rows."""
    call = call_of(layer("fewer rows"))
    steps = call.choose(dict.fromkeys(call.parts.symbols, 8), H200).steps
    assert steps[0].kernels[0].name == "route"
    assert [k.size_class[-3:] for s in steps for k in s.kernels if k.size_class] == [(0, 0, 0)] * 2


# encodings of weights that have kernels: with blocks along K
READ = [e for e in dict(readable()) if not e.endswith(("columns", "columns_f32"))]


@pytest.mark.parametrize("encoding", few(READ, 3))
def test_ids_are_passed_where_nothing_is_written(encoding):
    """They have a field of their own, constant, which a product names to find its tiles alone."""
    shapes = (GROUPS, 2 * 128, K), (GROUPS, K, 128)
    dtype = torch.float16 if encoding == "f16" else torch.bfloat16
    weights = [list(quantize(torch.ones(s, dtype=dtype), ENCODINGS[encoding])) for s in shapes]
    factors = {
        f"{name}_lora_{factor}": torch.ones(GROUPS, *shape, dtype=dtype)
        for name, k, n in (("gate_up", K, 256), ("down", 128, K))
        for factor, shape in (("a", (16, k)), ("b", (n, 16)))
    }
    bias = {"gate_up_bias": torch.ones(GROUPS, 256, dtype=dtype)}
    forms = [*(("free", x) for x in ({}, bias, factors, {"first_expert": 4})), ("row", {})]
    given = torch.ones(3, K, dtype=dtype), torch.zeros(3, 2).long(), torch.ones(3, 2), *weights
    found = set[str]()
    for rows in {"bf16": ("bf16", "fp8", "mxfp8"), "f16": ("bf16",)}.get(encoding, ("bf16", "fp8")):
        how = {"weight_format": encoding, "activation_format": rows}
        for order, more in forms:
            call = call_of(fusion_of_call("fused_experts", *given, **how, **more), order=order)
            (ids,) = (v for v in call.parts.inputs if v.type.dtype == "i64")
            number, parts = call.number(ids), (call.parts.parts, call.parts.arrays.places)
            for tokens in (1, 3, 4, 5):
                steps = call.choose(dict.fromkeys(call.parts.symbols, tokens), H200).steps
                found |= {rows for step in steps if step.chosen.few_ids}
                for part, places, step in zip(*parts, steps, strict=True):
                    fields = [n for n, place in enumerate(places) if place == number]
                    assert not step.chosen.ids or fields == [part.source.array_number(IDS)]
                    for kernel in step.kernels:
                        named = set(re.findall(r"\S+ ids\b.|\S*\bids\b", kernel.text))
                        read = named - {"void* ids;"}
                        assert read <= ({"i64*>(ids"} if kernel.size_class else set())
    assert "bf16" in found
