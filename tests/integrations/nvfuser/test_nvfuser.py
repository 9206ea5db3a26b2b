"""nvFuser definitions: their text for Blackwell, what is refused with which reason, what is shared,
and errors before a launch.

That a definition prints, rebuilds and means what its segment means is asked for every Fusion of the
suite: tests/fusions.py.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from fusions import evaluate, fusion_of_call
from judge import judge

from fusion_moe import FusionDefinition, options
from fusion_moe.backends import TARGETS, emit
from fusion_moe.compile import lower
from fusion_moe.definitions import translate
from fusion_moe.encodings import ENCODINGS, NVFP4, Quantized, dequantize, quantize
from fusion_moe.errors import UnsupportedError
from fusion_moe.integrations.nvfuser import headers, library, scheduler as facts
from fusion_moe.integrations.nvfuser.definition import RULES, define
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import differentiate
from fusion_moe.ir.kinds import KINDS
from fusion_moe.ir.types import DTYPES
from fusion_moe.layouts import SF128X4

needs_nvfuser = pytest.mark.nvfuser
OPS = torch.ops.fusion_moe
G, H, I, SLOTS, TOKENS = 4, 128, 128, 2, 5  # groups, hidden, intermediate


def generator():
    return torch.Generator().manual_seed(0)


def weight(n, k, runs=0):
    """nvfp4[G, n, k] as the three tensors; runs: decode scales along n."""
    x = torch.randn(G, n, k, generator=generator())
    return list(
        quantize(
            x, NVFP4, torch.rand(G, runs, generator=generator()) / 300 + 1e-3 if runs else None
        )
    )


def rows(count=11):
    return torch.randn(count, H, generator=generator()).bfloat16()


ENDS = torch.tensor([3, 3, 10, 11], dtype=torch.int32)


def call(name, args, static=False, **kwargs) -> Fusion:
    return fusion_of_call(name, *args, static=static, **kwargs)


def sources(fusion, target="sm_100"):
    """The definitions of the segments, as they are printed; of the others the operations."""
    lowered = lower(fusion, TARGETS[target], options.Options())
    return [emit(s, TARGETS[target]).source for s in lowered.segments]


def output_dtypes(fusion, target="sm_100"):
    """The dtypes of the outputs of each segment: of a definition by nvFuser's names."""
    for s in lower(fusion, TARGETS[target], options.Options()).segments:
        names = (
            (v.dtype().name for v in define(s.fusion).fd.fusion.outputs())
            if s.kind == "nvfuser"
            else (v.type.dtype for v in s.fusion.outputs)
        )
        yield ", ".join(names)


# Text ---------------------------------------------------------------------------------------------


def grouped_matmul(static):
    return call(
        "nvfp4_grouped_mm",
        [rows(), *weight(2 * I, H, runs=2), ENDS],
        static,
        activation_format="nvfp4",
    )


def expert_mlp_of_sorted_rows(static):
    """grouped product, SwiGLU, grouped product: rows that are sorted by expert already."""
    return inlined(
        static,
        lambda fd, x, ends, up, down: [
            y := product(fd, x, up, ends),
            y := translated("scaled_swiglu")(fd, y),
            product(fd, y, down, ends),
        ][-1],
    )


def moe_layer(static):
    """Routing, gather, both products, SwiGLU, and the sum of each token's rows."""
    x, ids = rows(TOKENS), torch.randint(0, G, (TOKENS, SLOTS), generator=generator())
    args = [
        x,
        ids,
        torch.rand(TOKENS, SLOTS, generator=generator()),
        *weight(2 * I, H, runs=2),
        *weight(H, I),
    ]
    return call("expert_mlp", args, static, activation_format="nvfp4")


def translated(name):
    return translate.find(f"fusion_moe::{name}").function


def product(fd, a, w, ends):
    return translated("nvfp4_grouped_mm")(fd, a, *w, ends, activation_format="nvfp4")


def inlined(static, build) -> Fusion:
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[11 if static else fd.define_size("m"), H], dtype="bf16")
    ends = fd.define_tensor(shape=[G], dtype="i32")
    up, down = ([fd.from_pytorch(t) for t in w] for w in (weight(2 * I, H, runs=2), weight(H, I)))
    fd.add_output(build(fd, x, ends, up, down))
    return fd.fusion()


def summary(source: str) -> str:
    """What one looks for in hundreds of lines: inputs, products, outputs, and how many other
    operations of each name.
    """
    lines = [line.strip() for line in source.splitlines()]
    kept = [line for line in lines if re.search(r"fd\.define_tensor|_mm\(|fd\.add_output", line)]
    counts = Counter(
        m[1] for line in lines if line not in kept and (m := re.search(r"fd\.ops\.(\w+)", line))
    )
    others = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return "\n".join([*kept, f"# {len(lines)} lines; beside these {others}"])


@needs_nvfuser
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("build", [grouped_matmul, expert_mlp_of_sorted_rows, moe_layer])
def test_blackwell(build, static, golden):
    """One definition each, but for the sort of an open number of rows; with the output dtypes that
    the text does not tell.

    The smallest is kept as it is.
    """
    found, shown = sources(build(static)), str if static and build is grouped_matmul else summary
    assert len(found) == (2 if build is moe_layer and not static else 1)
    dtypes = output_dtypes(build(static))
    golden(
        "\n\n".join(
            f"{shown(source)}\n# outputs: {made}"
            for source, made in zip(found, dtypes, strict=True)
        )
    )


@needs_nvfuser
def test_hopper(golden):
    """16-bit activations: the weight is decoded inside, from int32 words."""
    (source,) = sources(
        call("nvfp4_grouped_mm", [rows(), *weight(2 * I, H, runs=2), ENDS]), "sm_90"
    )
    golden(source)


# Meaning ------------------------------------------------------------------------------------------


@needs_nvfuser
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("runs", [0, 1, 2])
@pytest.mark.parametrize("activation_format", ["bf16", "nvfp4"])
def test_a_product_means_the_same(activation_format, runs, dtype):
    args = [rows().to(dtype), *weight(2 * I, H, runs), ENDS]
    found = judge(call("nvfp4_grouped_mm", args, activation_format=activation_format), args)
    assert [s.kind for s in found["sm_100"]] == ["nvfuser"]
    assert ("sm_90" in found) == (activation_format == "bf16")


# MXFP8 --------------------------------------------------------------------------------------------


def copies(shape, encoding, dtype="bf16"):
    """x -> codes, scales and the numbers of its copy."""
    fd = FusionDefinition()
    copied = fd.ops.quantize(fd.define_tensor(shape=shape, dtype=dtype), encoding=encoding)
    for v in (*fd.ops.unpack(copied), fd.ops.dequantize(copied, dtype="bf16")):
        fd.add_output(v)
    return fd.fusion()


def every_amax():
    """bf16[..., 32]: each that the largest of a block can be, from zero to infinity, subnormal ones
    too, and NaN.
    """
    amax = torch.arange(0x7F82, dtype=torch.int16).view(torch.bfloat16)
    finite = amax.clamp(max=torch.finfo(torch.bfloat16).max).float()
    x = ((torch.rand(len(amax), 32, generator=generator()) * 2 - 1) * finite[:, None]).bfloat16()
    x[:, 5] = amax
    return x


@needs_nvfuser
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
@pytest.mark.parametrize("encoding", ["mxfp8", "mxfp8_columns"])
def test_copies_in_mxfp8_are_the_encodings_bit_for_bit(encoding, dtype):
    x = every_amax().to(DTYPES[dtype])
    x = x if encoding == "mxfp8" else x.mT.contiguous()
    found = judge(copies(list(x.shape), encoding, dtype), [x])
    assert [s.kind for s in found["sm_100"]] == ["nvfuser"]
    assert "nvfuser" not in {s.kind for s in found["sm_90"]}  # e8m0 would leave


def stored_copy():
    """A weight that comes in 8 bits."""
    fd = FusionDefinition()
    codes, scale = (
        fd.define_tensor(shape=[G, 8, 64], dtype="f8e4m3"),
        fd.define_tensor(shape=[G, 8, 2], dtype="f8e8m0"),
    )
    fd.add_output(
        fd.ops.dequantize(
            fd.ops.pack(codes, scale, encoding="mxfp8", layout="linear"), dtype="bf16"
        )
    )
    return fd.fusion()


@needs_nvfuser
def test_stored_copies_are_read_where_there_is_e8m0():
    codes, scale = quantize(
        torch.randn(G, 8, 64, generator=generator()), encoding=ENCODINGS["mxfp8"]
    )
    found = judge(stored_copy(), [codes, scale])
    assert [[s.kind for s in segments] for segments in found.values()] == [["single"], ["nvfuser"]]


def mxfp8_product(static=False, transposed=False):
    w = torch.zeros(G, H, I) if transposed else torch.zeros(G, I, H)
    how = {"weight_format": "bf16", "activation_format": "mxfp8", "transposed": transposed}
    return call("grouped_mm", [rows(), [w.bfloat16()], ENDS], static, **how)


@needs_nvfuser
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_mxfp8_copies_is_one_definition(transposed, static):
    """Made, decoded and multiplied, on both; nothing of 8 bits leaves."""
    w = torch.randn(G, H, I, generator=generator()).bfloat16()
    found = judge(mxfp8_product(static, transposed), [rows(), w, ENDS])
    assert [[s.kind for s in segments] for segments in found.values()] == [["nvfuser"]] * 2


@needs_nvfuser
def test_training_in_mxfp8_leaves_blocks_along_rows_to_the_reference():
    """The forward's product and the gradient of x are definitions."""
    made = differentiate(mxfp8_product(), (0, 1))
    for fusion, product in ((made.forward, "grouped_mm"), (made.backward, "grouped_mm_t")):
        for target in ("sm_90", "sm_100"):
            segments = lower(fusion, TARGETS[target], options.Options()).segments
            assert product in {
                op.kind.name for s in segments if s.kind == "nvfuser" for op in s.fusion.ops
            }
            others = [
                op
                for s in segments
                if s.kind != "nvfuser"
                for op in s.fusion.ops
                if op.kind.name == "quantize"
            ]
            assert {op.attrs["encoding"] for op in others} == {"mxfp8_columns"}


# --------------------------------------------------------------------------------------------------


def of_problem(n=2 * I, sizes=(3, 0, 7, 1)):
    """The arguments of the operation with thunder's signature; its weight is stored as it wants
    it.
    """
    codes, scale, decode = weight(n, H)
    starts = [sum(sizes[:g]) for g in range(G)]
    padded = [sum(-(-m // 128) * 128 for m in sizes[:g]) for g in range(G)]
    ints = [
        torch.tensor(t, dtype=torch.int32) for t in (starts, padded, [[m, n, H] for m in sizes])
    ]
    return [rows(), codes.mT, SF128X4.forward(scale), decode, *ints]


@needs_nvfuser
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_thunders_operation_means_the_same_in_4_bits(static):
    """Its codes and scales go into the 4-bit product as they are: nothing is decoded, and no scale
    of a weight moved.
    """
    args = of_problem()
    fusion = call("f16a_nvfp4weight_scaled_grouped_mm", args, static, activation_format="nvfp4")
    assert list(judge(fusion, args)) == ["sm_100"]
    (source,) = sources(fusion)
    assert source.count("cutlass_nvfp4_grouped_mm(") == 1
    assert source.count("dtype=DataType.Float4_e2m1fn)") == 1
    assert "bitwise_right_shift" not in source
    assert "permute" not in source


@needs_nvfuser
@pytest.mark.parametrize("activation_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize(
    "ids", [[[0, 0]], [[3, 3], [3, 3]], [[2, 0]] * 130, [[-1, 2], [-1, -1]], []]
)
def test_a_layer_means_the_same_for_any_routing(ids, activation_format):
    """One token, the last expert alone, more than a tile of rows, slots of no expert, no tokens;
    empty experts.
    """
    slots = torch.tensor(ids, dtype=torch.int64).reshape(-1, SLOTS)
    args = [
        rows(len(ids)),
        slots,
        torch.rand(len(ids), SLOTS, generator=generator()),
        *weight(2 * I, H, runs=2),
        *weight(H, I),
    ]
    for static in (True, False):
        found = judge(call("expert_mlp", args, static, activation_format=activation_format), args)
        kinds = [s.kind for s in found["sm_100"]]
        assert kinds == (
            ["single", "nvfuser"] if not static else ["nvfuser"] if ids else ["single"] * len(kinds)
        )


@needs_nvfuser
@pytest.mark.parametrize("n", [128, 96])
def test_swizzled_weights_are_read_as_they_are(n):
    """With 4-bit activations the definition does not move their scales; with 16-bit ones they are
    put back in order.
    """
    codes, scale, decode = weight(n, H)
    stored = SF128X4.forward(scale)
    fd = FusionDefinition()
    a, ends = fd.from_pytorch(rows()), fd.from_pytorch(ENDS)
    packed = fd.ops.pack(
        *map(fd.from_pytorch, (codes, stored, decode)), encoding="nvfp4", layout="sf128x4"
    )
    partition = fd.groups_of(ends, 11)
    a = fd.ops.partition(a, partition)
    fd.add_output(
        fd.ops.cast(fd.ops.grouped_mm(a, packed, partition, w_layout="sf128x4"), dtype="bf16")
    )
    if n == 128:
        four = fd.ops.zero_rest(a, partition)
        four = fd.ops.quantize(four, fd.ops.decode_scale(four, encoding="nvfp4"), encoding="nvfp4")
        fd.add_output(
            fd.ops.cast(
                fd.ops.grouped_mm(four, packed, partition, w_layout="sf128x4"), dtype="bf16"
            )
        )
    found = evaluate(fd.fusion(), rows(), ENDS, codes, stored, decode)
    matrices = dequantize(Quantized(codes, scale, decode, encoding=NVFP4))
    begin = 0
    for g, end in enumerate(ENDS.tolist()):
        torch.testing.assert_close(
            found[0][begin:end].float(),
            rows()[begin:end].float() @ matrices[g].T,
            rtol=2e-2,
            atol=0.5,
        )
        begin = end


@needs_nvfuser
def test_gate_and_up_share_the_quantized_activation():
    """Two products of the same rows: quantized once, swizzled once."""

    def build(fd, x, ends, up, down):
        fd.add_output(product(fd, x, up, ends))
        return product(fd, x, down, ends)

    (source,) = sources(inlined(False, build))
    assert source.count("cutlass_nvfp4_grouped_mm") == 2
    assert source.count("preprocess_grouped_matmul_input_sf") == 1
    assert source.count("dtype=DataType.Float4_e2m1fn)") == 1


@needs_nvfuser
@pytest.mark.parametrize("name", ["group_add", "group_mul"])
@pytest.mark.parametrize("sizes", [[3, 0, 4, 2], [7]])
def test_parameters_of_groups_mean_the_same(name, sizes):
    """Rows of no group stay as they are; with one group there is no gather."""
    fd, x = FusionDefinition(), rows(11)
    table = torch.randn(len(sizes), H, generator=generator()).bfloat16()
    args = [x, table, torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)]
    y, of_groups, offs = (fd.from_pytorch(t) for t in args)
    ends = fd.groups_of(offs, 11)
    fd.add_output(getattr(fd.ops, name)(fd.partition_by(y * 2.0, ends), of_groups, ends))
    found = judge(fd.fusion(), args)
    assert [s.kind for s in found["sm_100"]] == ["nvfuser"]


# Refusals -----------------------------------------------------------------------------------------


def test_every_kind_is_written_or_refused():
    """What no rule writes is refused whatever its types, and says why."""
    assert set(KINDS) - set(RULES) == {"grouped_outer", *facts.NEVER}
    assert set(RULES) <= set(KINDS)


def one(build, *shapes):
    """A Fusion of one operation on inputs of these (shape, dtype)."""
    fd = FusionDefinition()
    made = build(fd, *(fd.define_tensor(shape=list(s), dtype=d) for s, d in shapes))
    for v in made if isinstance(made, tuple) else (made,):
        fd.add_output(v)
    return fd.fusion()


def partitioned_product(fd, a, w, offs, to="bf16", **kinds):
    ends = fd.groups_of(offs, a.type.shape[0])
    y = fd.ops.grouped_mm(fd.ops.partition(a, ends), w, ends)
    return fd.ops.cast(y, dtype=to) if to else y


def four_bit(n, k):
    return one(
        lambda fd, a, *rest: product(fd, a, rest[:-1], rest[-1]),
        *(([11, k], "bf16"), ([G, n, k // 2], "u8"), ([G, n, k // 16], "f8e4m3")),
        *(([G], "f32"), ([G], "i32")),
    )


def copies_of_rows():
    def build(fd, x, offs):
        ends = fd.groups_of(offs, 11)
        copied = fd.ops.quantize(fd.ops.partition(x, ends), ends, encoding="mxfp8_columns")
        return fd.ops.unpack(copied)

    return one(build, ([11, H], "bf16"), ([G], "i32"))


REFUSED = {
    "a sum of bytes": one(lambda fd, x: fd.ops.add(x, x), ([4], "u8")),
    "a cast to e4m3": one(lambda fd, x: fd.ops.cast(x, dtype="f8e4m3"), ([4], "f32")),
    "float32 activations": one(
        partitioned_product, ([11, H], "f32"), ([G, 8, H], "f32"), ([G], "i32")
    ),
    "two 16-bit types": one(
        partitioned_product, ([11, H], "f16"), ([G, 8, H], "bf16"), ([G], "i32")
    ),
    "a product kept in float32": one(
        lambda fd, *v: partitioned_product(fd, *v, to=None),
        ([11, H], "bf16"),
        ([G, 8, H], "bf16"),
        ([G], "i32"),
    ),
    "a scatter that adds": one(
        lambda fd, a, i, v: fd.ops.index_put_accumulate(a, i, v),
        ([4, 8], "f32"),
        ([3], "i64"),
        ([3, 8], "f32"),
    ),
    "no rows": one(lambda fd, x: fd.ops.neg(x), ([0, 4], "f32")),
    "routing of any number of tokens": call(
        "route", [torch.zeros(3, 2, dtype=torch.int64)], groups=4
    ),
    "routing of 4100 rows": call(
        "route", [torch.zeros(2050, 2, dtype=torch.int64)], True, groups=4
    ),
    "K = 96": four_bit(128, 96),
    "N = 64": four_bit(64, 128),
    "quantize": call("nvfp4_quantize", [torch.randn(64, 64)]),
    "scales of 8 bits": stored_copy(),
    "blocks along rows of groups": copies_of_rows(),
    "swizzle": call(
        "grouped_swizzle_block_scale", [torch.zeros(11, 4).to(torch.float8_e4m3fn), ENDS]
    ),
}


def test_refusals(golden):
    """Each in its own segment, with the reason."""
    said = []
    for name, fusion in REFUSED.items():
        for target in ("sm_90", "sm_100"):
            try:
                segments = lower(fusion, TARGETS[target], options.Options()).segments
            except UnsupportedError as error:
                said.append(f"{name} on {target}: {error}")
                continue
            for s in segments:
                if s.kind == "single":
                    said.append(
                        f"{name} on {target}: {facts.can_schedule(s.fusion, TARGETS[target])}"
                    )
    golden("\n".join(dict.fromkeys(said)))


def test_a_program_for_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    match = r"sm_100 requires a CUDA device with compute capability 10\.0"
    with options.override(target="sm_100"), pytest.raises(UnsupportedError, match=match):
        OPS.nvfp4_grouped_mm(rows(), *weight(2 * I, H), ENDS)


def test_without_nvfuser_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    library.nvfuser.cache_clear()
    try:
        with pytest.raises(
            UnsupportedError,
            match=r"nvFuser is not installed; pip install "
            r"'\.\[nvfuser\]' in a clone",
        ):
            sources(grouped_matmul(True))
    finally:
        library.nvfuser.cache_clear()


@needs_nvfuser
def test_a_launch_on_the_cpu_is_an_error():
    args = [rows(), *weight(2 * I, H), ENDS]
    lowered = lower(
        call("nvfp4_grouped_mm", args, activation_format="nvfp4"),
        TARGETS["sm_100"],
        options.Options(),
    )
    (segment,) = lowered.segments
    kernel = emit(segment, TARGETS["sm_100"])
    given = dict(zip(lowered.stages[-1][1].inputs, args, strict=True))
    with pytest.raises(UnsupportedError, match="got cpu"):
        kernel([given[v] for v in segment.fusion.inputs], {})


# CUDA headers -------------------------------------------------------------------------------------


def sort(tokens=TOKENS):
    return call("route", [torch.zeros(tokens, SLOTS, dtype=torch.int64)], True, groups=G)


def toolkit(folder, version, cub="cccl/cub/block"):
    """A folder of headers as a toolkit of this version has it; newer ones have CUB in "cccl"."""
    folder.mkdir()
    (folder / "cuda.h").write_text(f"/* */\n#define CUDA_VERSION {version}\n")
    (folder / cub).mkdir(parents=True)
    (folder / cub / "block_radix_sort.cuh").touch()
    return folder


def test_headers_that_fit(tmp_path, monkeypatch):
    """Those of the major version of torch's CUDA, which is nvFuser's."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for i, fits in enumerate([(12060,), (12080, "cub/block"), (12090,)]):
        monkeypatch.setattr(headers, "FOLDER", toolkit(tmp_path / str(i), *fits))
        headers.check_headers()


def test_headers_that_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    toolkit(tmp_path / "no cuda.h", 12080)
    (tmp_path / "no cuda.h" / "cuda.h").unlink()
    folders = {
        tmp_path / "missing": "has none",
        toolkit(tmp_path / "old", 11080): "has those of CUDA 11.8",
        toolkit(tmp_path / "new", 13000): "has those of CUDA 13.0",
        toolkit(tmp_path / "no cub", 12080, "cccl"): "has none",
        tmp_path / "no cuda.h": "has none",
    }
    for folder, why in folders.items():
        monkeypatch.setattr(headers, "FOLDER", folder)
        with pytest.raises(UnsupportedError) as caught:
            headers.check_headers()
        assert str(caught.value) == (
            "nvfuser: nvFuser compiles sorts with the headers of a CUDA toolkit, and "
            f"{folder} {why}; "
            "expected those of CUDA 12.8, or of its major version; install that toolkit, and "
            "point /usr/local/cuda at it"
        )


def test_what_sorts():
    """Products and all that stands around them compile without a toolkit."""
    assert facts.sorts(sort())
    assert facts.sorts(moe_layer(True))
    assert not facts.sorts(grouped_matmul(True))
    assert not facts.sorts(expert_mlp_of_sorted_rows(True))
