"""The CPU's tiers with weights in other layouts than the linear one: the library's and made-up
ones. They hold the same numbers, so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import own_encodings
import own_layouts
import pytest
import torch
from cpu_tiers import DTYPES, OF_VECTORS, TIERS, program
from own_encodings import LEVELS, TABLE
from test_cuda_readers import some_weight
from torch import Tensor

from fusion_moe import FusionDefinition
from fusion_moe.backends.cpu import readers
from fusion_moe.encodings import ENCODINGS, Encoding, Quantized
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.types import dtype_name
from fusion_moe.layouts import LAYOUTS

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.once,
    pytest.mark.usefixtures("amx"),
    pytest.mark.slow,
]
layouts_registered = pytest.fixture(scope="module", autouse=True)(own_layouts.registered)
encodings_registered = pytest.fixture(scope="module", autouse=True)(own_encodings.registered)
SIZES = (1, 0, 2, 5, 40)
N, K = 152, 1088  # scales fill no tile in either direction; rows of one are 17 tiles wide
OWN = [layout.name for layout in own_layouts.OWN_LAYOUTS]


def weight_of(encoding: Encoding) -> Quantized:
    """[len(SIZES), N, K] by chance."""
    made = []
    for part, t in some_weight(encoding, len(SIZES) * N, K).named():
        made.append(t.repeat(len(SIZES)) if part.of_matrix else t.view(len(SIZES), N, *t.shape[2:]))
    return Quantized(*made, encoding=encoding)


def stored(weight: Quantized, layout: str) -> list[Tensor]:
    """The parts in a layout. What lies between scales of a byte are NaN."""
    made = LAYOUTS[layout].pack(*weight, encoding=weight.encoding)
    for (part, t), here in zip(weight.named(), made, strict=True):
        if part.of_blocks and t.dtype.itemsize == 1 and layout != "linear":
            ones = torch.ones(t.shape, dtype=torch.uint8)
            here.view(torch.uint8)[LAYOUTS[layout].forward(ones) == 0] = 255
    return list(made)


def fusion_of(
    kind: str, weight: Quantized, layout: str, dtype: torch.dtype, **attributes: object
) -> Fusion:
    """x of a dtype, ends, the parts of a weight in a layout -> the product, float32."""
    fd, parts = FusionDefinition(), stored(weight, layout)
    rows, columns = fd.define_size("m"), weight.shape[1 if kind == "grouped_mm_t" else 2]
    x = fd.define_tensor(shape=[rows, columns], dtype=dtype_name(dtype))
    ends = fd.groups_of(fd.define_tensor(shape=[len(SIZES)], dtype="i32"), rows)
    given = [fd.define_tensor(shape=list(t.shape), dtype=dtype_name(t.dtype)) for t in parts]
    w = fd.ops.pack(*given, encoding=weight.encoding.name, layout=layout)
    at = {} if layout == "linear" else {"w_layout": layout}
    product = getattr(fd.ops, kind)
    fd.add_output(product(fd.ops.partition(x, ends), w, ends, **at, **attributes))
    return fd.fusion()


def check(
    kind: str,
    weight: Quantized,
    layout: str,
    tier: str,
    dtypes: Iterable[torch.dtype] = DTYPES,
    **attributes: object,
) -> None:
    """By kernels, that results have the bits of the linear layout."""
    ends, columns = torch.tensor(SIZES).cumsum(0).int(), weight.shape[1 if kind[-1] == "t" else 2]
    for dtype in dtypes:
        x = torch.randn(sum(SIZES) + 2, columns, generator=torch.Generator().manual_seed(1))
        found = []
        for of in ("linear", layout):
            run = program(fusion_of(kind, weight, of, dtype, **attributes), tier)
            found.append(run([x.to(dtype), ends, *stored(weight, of)])[0])
        assert found[0].isfinite().all()
        assert found[0].any()
        assert torch.equal(*found), dtype


@pytest.mark.parametrize("kind", ["grouped_mm", "grouped_mm_t"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("tier", TIERS)
def test_sf128x4_has_the_bits_of_linear(tier, name, kind):
    check(kind, weight_of(ENCODINGS[name]), "sf128x4", tier)


@pytest.mark.parametrize("kind", ["grouped_mm", "grouped_mm_t"])
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_scales_that_are_written_between_calls_are_read(tier, kind):
    """In place, by numbers that few kernels have in range: threads keep no copy from call to
    call.
    """
    weight, ends = weight_of(ENCODINGS["mxfp4"]), torch.tensor(SIZES).cumsum(0).int()
    x = torch.randn(sum(SIZES), weight.shape[1 if kind[-1] == "t" else 2]).bfloat16()
    parts = {layout: stored(weight, layout) for layout in ("linear", "sf128x4")}
    runs = {of: program(fusion_of(kind, weight, of, x.dtype), tier) for of in parts}
    for scale in (125, 200, 128):
        found = []
        for of, run in runs.items():
            bits = parts[of][1].view(torch.uint8)
            bits[bits < 255] = scale
            found.append(run([x, ends, *parts[of]])[0])
        assert torch.equal(*found)


@pytest.mark.parametrize("tier", OF_VECTORS)
def test_int8_operands(tier):
    check("grouped_mm", weight_of(ENCODINGS["nvfp4"]), "sf128x4", tier, DTYPES[:1], operands="int8")


@pytest.mark.parametrize("layout", OWN)
@pytest.mark.parametrize("encoding", [Encoding("levels", TABLE, LEVELS), ENCODINGS["nvfp4"]])
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_a_made_up_layout(tier, encoding, layout, monkeypatch):
    if LAYOUTS[layout].elements:  # written headers read elements in the linear order alone
        monkeypatch.setattr(readers, "reader_of", derived)
    check("grouped_mm", weight_of(encoding), layout, tier, DTYPES[2:])


def derived(encoding: str, layout: str = "linear") -> str:
    """The reader that follows from the descriptors."""
    of = None if layout == "linear" else LAYOUTS[layout]
    return readers.derived(ENCODINGS[encoding], of)
