"""What ranks exchange by stores into each other's memory: the kernels compile, what has none says
so, and they keep to their protocol, on the CPU, where headers stand for what is PTX
(cuda_on_cpu/), under ThreadSanitizer.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from cover import few
from fusions import fusion_of_call
from on_cpu import compiled, copy
from test_cuda_source import encoded, meta, needs_nvdisasm, sass, spills, tokens_of

from fusion_moe import FusionDefinition, options
from fusion_moe.arch import A100, H200
from fusion_moe.backends import TARGETS, emit
from fusion_moe.backends.cuda import plan
from fusion_moe.backends.cuda.join import join
from fusion_moe.backends.cuda.launch import KERNELS, Call, build
from fusion_moe.compile import Lowered, lower, segments
from fusion_moe.distributed import exchange
from fusion_moe.distributed.exchange.cuda import Collective
from fusion_moe.errors import UnsupportedError
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import differentiate
from fusion_moe.ir.sizes import symbol
from fusion_moe.options import Options
from fusion_moe.runtime import nvrtc

pytestmark = pytest.mark.once
T = symbol("s0")
EXCHANGE = ["dispatch", "combine_from"]


def round_trip(
    ranks: int = 4, h: int = 256, k: int = 3, dtype: str = "bf16", ids: str = "i64", room=T
) -> Fusion:
    """Tokens go to the ranks of their experts and come back as they are."""
    fd = FusionDefinition()
    weights = "f64" if dtype == "f64" else "f32"
    given = ((T, h), dtype), ((T, k), ids), ((T, k), weights), ((ranks + 4,), "i64")
    x, ids, w, peers = (fd.define_tensor(shape=s, dtype=d) for s, d in given)
    of_ranks = fd.define_groups("s", ranks, stride=room)
    how = {"experts": 32, "group": "g"}
    rows, all_ids, _, ends = fd.ops.dispatch(x, ids, w, peers, groups=of_ranks, **how)
    y = fd.ops.partition(fd.ops.add(rows, rows), ends)
    fd.add_output(fd.ops.combine_from(y, all_ids, ids, ends, peers, **how))
    return fd.fusion()


def collectives(fusion: Fusion) -> list[Collective]:
    found = segments(fusion.verify(), TARGETS["cuda"], Options())
    return [s.plan.work for s in found if s.kind == "collective" and s.plan.backend == "cuda"]


@needs_nvdisasm
@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
@pytest.mark.parametrize(
    "case",
    few(
        [
            {"ranks": 2, "h": 64, "dtype": "f32", "ids": "i32"},
            {"ranks": 8, "h": 7168, "k": 8, "room": 2048},
            {"ranks": 16, "k": 1, "dtype": "f16"},
        ]
    ),
    ids=str,
)
def test_kernels_compile_and_keep_all_in_registers(case):
    sources = collectives(round_trip(**case))
    assert [s.op.kind.name for s in sources] == ["dispatch", "combine_from"]
    for source in sources:
        for arch in (A100, H200):
            for kernel in source.launches(source.choose({}, arch), {"s0": 9}, arch):
                assert not spills(sass(build(kernel, arch))), kernel.name


def layer(tokens: int, of_experts: int = 32, **how: str) -> Fusion:
    """A layer of which four ranks have experts."""
    ranks, slots, h, inner = 4, 3, 512, 256
    weights = [encoded("nvfp4", 8, *nk) for nk in ((2 * inner, h), (h, inner))]
    return fusion_of_call(
        "fused_experts",
        *tokens_of(tokens, slots, h),
        *weights,
        weight_format="nvfp4",
        first_expert=8,
        peers=meta(ranks + 4, dtype=torch.int64),
        across="g",
        of_experts=of_experts,
        **how,
    )


def joined_of(lowered: Lowered) -> Call:
    made = [emit(s, TARGETS["cuda"]) for s in lowered.segments]
    joined = join(lowered.stages[-1][1], made)[1]
    assert joined
    return joined


@needs_nvdisasm
@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
@pytest.mark.parametrize("rows", few(["bf16", "fp8"]))
def test_sums_are_made_where_they_are_sent(rows):
    """In a layer of experts: of the rows between, only those of groups are written. Rows in FP8 are
    quantized before they are sent.
    """
    tokens = 6
    lowered = lower(layer(tokens, activation_format=rows), TARGETS["cuda"], Options())
    *before, first, _, _, last = lowered.segments
    assert [s.kind for s in before] == (["layout"] if rows == "fp8" else [])
    assert [op.kind.name for op in first.fusion.ops] == ["dispatch"]
    assert [op.kind.name for op in last.fusion.ops] == [
        *("combine", "cast", "partition", "combine_from")
    ]
    joined = joined_of(lowered)
    for arch in (A100, H200):
        kernels = joined.choose(dict.fromkeys(joined.parts.symbols, tokens), arch).kernels
        products = [kernel.size_class[:2] for kernel in kernels if kernel.size_class]
        assert products == [(0, 2**31 - 2)] * 2
        sends = [kernel for kernel in kernels if kernel.name in EXCHANGE]
        assert [kernel.name for kernel in sends] == EXCHANGE
        assert not any(spills(sass(build(kernel, arch))) for kernel in sends)


@needs_nvdisasm
@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
@pytest.mark.parametrize(
    ("tokens", "layout", "ordered"),
    [(500, "w16x64", True), (500, "linear", True), (5, "w16x64", False), (5, "linear", False)],
)
def test_rows_travel_in_the_order_in_which_products_read_them(tokens, layout, ordered):
    """Of large-M kernels, for which weights that are not in tiles become so: nothing reorders rows
    where they come.
    """
    joined = joined_of(lower(layer(tokens, weight_layout=layout), TARGETS["cuda"], Options()))
    found = joined.choose(dict.fromkeys(joined.parts.symbols, tokens), H200)
    assert (found.steps[0].next == 1) == (found.steps[1].previous == 0) == ordered
    assert "reorder_activations" not in [kernel.name for kernel in found.kernels]
    (dispatch,) = found.steps[0].kernels
    assert not spills(sass(build(dispatch, H200)))


@pytest.mark.parametrize(("of_experts", "background"), [(31, False), (32, True)])
def test_rows_travel_as_they_are_where_ranks_may_choose_otherwise(of_experts, background):
    """The last rank has fewer experts; or each has kernels for any size until its own are there."""
    fusion = layer(500, of_experts, weight_layout="w16x64")
    joined = joined_of(lower(fusion, TARGETS["cuda"], Options()))
    with options.override(background_compile=background):
        for any_size in (False, True):
            sizes = dict.fromkeys(joined.parts.symbols, 500)
            found = joined.choose(sizes, H200, any_size)
            assert found.steps[0].next is found.steps[1].previous is None


@needs_nvdisasm
@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
def test_gradients_take_the_same_kernels():
    """There before all products, and back before those for weights."""
    ranks, tokens, slots, h, inner = 4, 6, 3, 256, 128
    fusion = fusion_of_call(
        "fused_experts",
        torch.zeros(tokens, h, dtype=torch.bfloat16),
        torch.zeros(tokens, slots, dtype=torch.int64),
        torch.zeros(tokens, slots),
        *([torch.zeros(8, *nk, dtype=torch.bfloat16)] for nk in ((2 * inner, h), (h, inner))),
        weight_format="bf16",
        first_expert=8,
        peers=torch.zeros(ranks + 4, dtype=torch.int64),
        across="g",
        of_experts=32,
    )
    backward = differentiate(fusion, [0, 2, 3, 4]).backward
    lowered = lower(backward, TARGETS["cuda"], Options())
    joined = joined_of(lowered)
    for arch in (A100, H200):
        kernels = joined.choose(dict.fromkeys(joined.parts.symbols, tokens), arch).kernels
        names = [kernel.name for kernel in kernels]
        sent = [name for name in names if name in EXCHANGE]
        assert sent == [*EXCHANGE, EXCHANGE[1]]
        of_weights = [i for i, name in enumerate(names) if name.startswith("wgrad")]
        assert len(of_weights) == 2
        assert min(of_weights) > max(i for i, name in enumerate(names) if name in EXCHANGE)
        for kernel in (kernel for kernel in kernels if kernel.name in EXCHANGE):
            assert not spills(sass(build(kernel, arch))), kernel.name


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"h": 12}, "rows of 24 bytes, no multiple of 16: has no kernel here"),
        ({"ranks": 17}, "17 ranks: has no kernel here"),
        ({"dtype": "f64"}, "f64, whose words may be any bits: has no kernel here"),
    ],
    ids=str,
)
def test_what_has_no_kernel_runs_in_torch(case, why):
    fusion = round_trip(**case).verify()
    assert not collectives(fusion)
    (dispatch,) = (
        s.fusion for s in segments(fusion, TARGETS["cuda"], Options()) if len(s.fusion.outputs) > 1
    )
    with pytest.raises(UnsupportedError, match=why):
        plan(dispatch, "collective")


@pytest.mark.exhaustive
@pytest.mark.compiler
def test_ranks_keep_to_the_protocol(tmp_path):
    """Two and four, with tokens of their own numbers, while words come late; with the NaN that
    stands for words that have not come; a rank that is silent, that dies after it has sent, that is
    in another layer, that has no memory.
    """
    here = Path(__file__).parent / "cuda_on_cpu"
    copy(tmp_path, exchange.KERNELS / "exchange.cuh", KERNELS / "fragment_order.cuh")
    copy(tmp_path, here / "exchange.cpp", here / "words.cuh")
    (tmp_path / "memory.cuh").write_text('#include "ragged.cuh"')
    made = compiled(tmp_path, "", "-g", "-fsanitize=thread", name="exchange")
    environment = {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([made], capture_output=True, text=True, env=environment, timeout=600)
    assert done.stderr == ""
    parts = ["two", "four", "nan", "silent", "dead", "differs", "alone", "ends"]
    assert done.stdout.split() == parts
