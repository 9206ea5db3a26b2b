"""The CUDA backend's products with weights of every encoding that it reads, for both types of
activations, on a GPU.

NVFP4 with bfloat16 is in test_cuda_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
from kernel_tables import use_variant, variants_of
from own_encodings import registered
from test_cuda_kernels import LAYOUTS, RAGGED, close, generator, poison, program, tokens

from fusion_moe import options
from fusion_moe.backends.cuda.grouped_mm import Product
from fusion_moe.backends.cuda.variants import Variant
from fusion_moe.definitions.operations import SPECS, bind
from fusion_moe.encodings import ENCODINGS, Encoding, Quantized, dequantize, quantize
from fusion_moe.layouts import W16X64
from fusion_moe.layouts.groups import ceil_to
from fusion_moe.nn import swiglu

pytestmark = pytest.mark.gpu
registered = pytest.fixture(scope="module", autouse=True)(registered)

ops = torch.ops.fusion_moe
PAIRS = [  # of weights and activations
    ("nvfp4", "f16"),
    ("mxfp4", "bf16"),
    ("mxfp4", "f16"),
    ("int4", "bf16"),
    ("int4", "f16"),
    ("bf16", "bf16"),
    ("f16", "f16"),
]
DERIVED = [  # read by their descriptors: zero points, levels of scales, a table
    ("uint4_128", "bf16"),
    ("uint4_128", "f16"),
    ("uint4_-1", "bf16"),
    ("levels", "bf16"),
]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# of a layer: those of its results, and of what is between its products
ROUNDINGS = {"bf16": 8e-3, "f16": 1.5e-3}
# scales: kernels/weights/int4.cuh
INT4_EXACT = {"bf16": (2.0**-66, 2.0**54), "f16": (2.0**-22, 255.0)}
# bytes of scales: kernels/weights/mxfp4.cuh
MXFP4_EXACT = {"bf16": (127 - 72, 127 + 61), "f16": (127 - 21, 127 + 8)}
E, H, I, SLOTS = 8, 256, 192, 3  # experts, hidden and intermediate features, slots of a token


def stored(weight: Quantized, layout: str) -> list[torch.Tensor]:
    """The parts on the GPU, in a layout."""
    parts = [part.cuda() for part in weight]
    return parts if layout == "linear" else list(W16X64.pack(*parts, encoding=weight.encoding))


def exact_weight(encoding: Encoding, *shape: int) -> Quantized:
    """Elements whose sums with small integers float32 holds exactly: all codes, or small integers;
    scales are powers of two.
    """
    *groups, n, k = shape
    g, parts = generator(), []
    for part in encoding.parts:
        size = encoding.part_shape(part, groups, n, k)
        if part.scale is None and encoding.plain:
            parts.append(torch.randint(-3, 4, size, generator=g).to(part.dtype))
        elif part.scale is None:
            parts.append(torch.randint(0, 256, size, generator=g, dtype=torch.uint8))
        else:
            parts.append((2.0 ** torch.randint(-1, 2, size, generator=g)).to(part.dtype))
    return Quantized(*parts, encoding=encoding)


def product(a: torch.Tensor, weight: Quantized, ends: torch.Tensor, layout: str) -> torch.Tensor:
    """In float32, by kernels alone."""
    args = (a, stored(weight, layout), ends)
    kwargs = {
        "weight_format": weight.encoding.name,
        "weight_layout": layout,
        "out_dtype": torch.float32,
    }
    made = program("grouped_mm", args, kwargs)
    poison()
    return made(list(bind(SPECS["grouped_mm"], args, kwargs).tensors.values()))[0]


# One product --------------------------------------------------------------------------------------


def ways() -> list[tuple[str, str, str, Variant, bool]]:
    """Encoding, activations, table, kernel, and whether a kernel before it puts rows in order. f16
    differs from bf16 in instructions.
    """
    found = []
    for fmt, activations in [*PAIRS, *DERIVED]:
        wide = "wide_" if fmt in DTYPES else ""
        for table in (f"{wide}linear", f"{wide}tiled"):
            kernels = variants_of(table)
            kernels = (
                kernels
                if fmt != "f16"
                else [kernels[0], *(v for v in kernels if v.header == "large_m.cuh")][:2]
            )
            found += [
                (fmt, activations, table, v, order)
                for v in kernels
                for order in (False, True)[: 1 + v.reads_fragment_order]
            ]
    return found


@pytest.mark.parametrize(
    ("fmt", "activations", "table", "variant", "in_fragment_order"), ways(), ids=str
)
def test_every_variant_exactly(fmt, activations, table, variant, in_fragment_order, monkeypatch):
    monkeypatch.setattr(
        Product,
        "needs_reordering",
        lambda self, variant: in_fragment_order and variant.reads_fragment_order,
    )
    use_variant(monkeypatch, table, variant)
    layout = "w16x64" if table.endswith("tiled") else "linear"
    for k, n in (320, 144), (384, 1024):
        k = ceil_to(k, ENCODINGS[fmt].block)
        weight = exact_weight(ENCODINGS[fmt], 7, n, k)
        matrices = dequantize(weight).cuda()
        for partition in RAGGED[:6]:
            x = (
                torch.randint(-3, 4, (partition.rows, k), generator=generator())
                .to(DTYPES[activations])
                .cuda()
            )
            x[int(partition.ends[-1]) :] = torch.nan  # rows of no group are not read
            want = torch.zeros(partition.rows, n, device="cuda")
            for group, rows in partition.runs:
                want[rows] = x[rows].float() @ matrices[group].T
            assert torch.equal(product(x, weight, partition.ends.cuda(), layout), want)


@pytest.mark.parametrize(
    ("fmt", "activations"), [*PAIRS, *DERIVED, ("twos", "bf16"), ("two_bits", "f16")]
)
@pytest.mark.parametrize(("k", "n"), [(96, 33), (288, 70)])
def test_sizes_off_the_tile_run_in_the_linear_layout(fmt, activations, k, n):
    k = ceil_to(k, ENCODINGS[fmt].block)
    weight, ends = exact_weight(ENCODINGS[fmt], 4, n, k), [1, 1, 12, 19]
    x = torch.randint(-3, 4, (20, k), generator=generator()).to(DTYPES[activations])
    want = torch.zeros(20, n)
    for g, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
        want[a:b] = x[a:b].float() @ dequantize(weight)[g].T
    assert torch.equal(
        product(x.cuda(), weight, torch.tensor(ends, dtype=torch.int32).cuda(), "linear").cpu(),
        want,
    )


def every_code(
    scales: torch.Tensor, encoding: Encoding, activations: str, layout: str, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, scales]: found and wanted. Row n of the matrix has scale n, block b of columns code b;
    a row of activations picks a code.
    """
    block, n = encoding.block, len(scales)
    code = torch.arange(16, dtype=torch.uint8)
    codes = (code | code << 4).repeat_interleave(block // 2).expand(1, n, 8 * block).contiguous()
    ones = [torch.ones(1)] * (len(encoding.scales) - 1)
    weight = Quantized(
        codes, scales[None, :, None].expand(1, n, 16).contiguous(), *ones, encoding=encoding
    )
    row = torch.arange(rows)
    x = torch.zeros(rows, 16 * block, dtype=DTYPES[activations])
    x[row, row % 16 * block + row % (block - 1)] = 1
    found = product(x.cuda(), weight, torch.tensor([rows], dtype=torch.int32).cuda(), layout)
    return found.cpu(), dequantize(weight)[0, :, ::block].T[row % 16]


@pytest.mark.parametrize("rows", [16, 400])  # small-M and large-M kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activations", ["bf16", "f16"])
def test_every_code_under_every_scale_of_mxfp4(activations, layout, rows):
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found, want = every_code(scales, ENCODINGS["mxfp4"], activations, layout, rows)
    first, last = MXFP4_EXACT[activations]
    assert torch.equal(found[:, first : last + 1], want[:, first : last + 1])
    # larger ones count as the last
    assert torch.equal(found[:, last + 1 : 255], want[:, last : last + 1].expand(-1, 254 - last))
    # smaller ones are as good as zero
    assert (found[:, :first] - want[:, :first]).abs().max() <= 6 * 2.0 ** (first - 1 - 127)
    assert found[:, 255].isnan().all()


@pytest.mark.parametrize("rows", [16, 400])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_under_every_scale_of_nvfp4_in_f16(layout, rows):
    """In the linear layout negative scales and NaN too."""
    byte = torch.arange(256 if layout == "linear" else 127, dtype=torch.uint8)
    scales = byte.repeat(3)[:256].view(torch.float8_e4m3fn)
    found, want = every_code(scales, ENCODINGS["nvfp4"], "f16", layout, rows)
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("rows", [16, 400])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activations", ["bf16", "f16"])
def test_every_code_under_every_scale_of_int4(activations, layout, rows):
    """Each of the scales in range, and its opposite; in bfloat16 a weight is rounded to it."""
    scales = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    first, last = INT4_EXACT[activations]
    scales = scales[(scales >= first) & (scales <= last)]
    scales = torch.cat([signed[: len(scales) // 256 * 256] for signed in (scales, -scales)])
    for some in scales.split(4096):
        found, want = every_code(some, ENCODINGS["int4"], activations, layout, rows)
        assert torch.equal(found, want.bfloat16().float() if activations == "bf16" else want)


# A whole layer ------------------------------------------------------------------------------------

LAYERS = {
    "plain": {},
    "interleaved by 1": {"activation": swiglu(interleave=1, limit=1.0, alpha=1.702, up_offset=1.0)},
    "bias": {
        "activation": swiglu(interleave=8),
        "gate_up_bias": torch.randn(E, 2 * I),
        "down_bias": torch.randn(E, H),
    },
    "scale on the input": {"scale_on": "input"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("fmt", "activations"), PAIRS)
def test_a_whole_layer(fmt, activations, name, layout):
    dtype, g = DTYPES[activations], generator()
    changes = {
        k: v.to(dtype).cuda() if isinstance(v, torch.Tensor) else v for k, v in LAYERS[name].items()
    }
    gate_up, down = (
        stored(
            quantize(torch.randn(E, *shape, generator=g) * 0.05, encoding=ENCODINGS[fmt]), layout
        )
        for shape in ((2 * I, H), (H, I))
    )
    for count in (1, 37, 500):
        x, ids, w = tokens(torch.randint(0, E, (count, SLOTS), generator=generator()))
        args, kwargs = (
            (x.to(dtype), ids, w, gate_up, down),
            {**changes, "weight_format": fmt, "weight_layout": layout},
        )
        made = program("fused_experts", args, kwargs)
        poison()
        found = made(list(bind(SPECS["fused_experts"], args, kwargs).tensors.values()))[0]
        with options.override(target="reference"):
            close(found, ops.fused_experts(*args, **kwargs), ROUNDINGS[activations])
