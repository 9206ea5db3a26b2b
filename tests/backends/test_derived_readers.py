"""Readers that are derived from descriptors: each element is what the descriptor means, for every
code under every scale, and what a hand-written reader in its place makes.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from cpu_tiers import TIERS
from own_encodings import OWN

from fusion_moe.backends.cpu import readers
from fusion_moe.encodings import (
    FP8,
    FP8_CHANNEL,
    FP8_E8M0,
    FP8_TENSOR,
    INT4,
    MXFP4,
    MXFP8,
    NVFP4,
    ROW,
    Element,
    Encoding,
    Quantized,
    Scale,
    dequantize,
)
from fusion_moe.errors import UnsupportedError
from fusion_moe.runtime import build

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("amx"), pytest.mark.slow]
F16, F32, U8 = torch.float16, torch.float32, torch.uint8
N = 256  # rows: one for each byte of a scale


NF4 = [
    -1.0,
    -0.7,
    -0.53,
    -0.39,
    -0.28,
    -0.18,
    -0.09,
    0.0,
    0.08,
    0.16,
    0.25,
    0.34,
    0.44,
    0.56,
    0.72,
    1.0,
]
INT8 = Element.integers("int8", 8, -128)


F16_ZEROS = [Scale("zero_point", F16, block, zero_point=True) for block in (ROW, 64)]
ENCODINGS = {
    e.name.replace("-", "_"): e
    for e in (
        *(NVFP4, MXFP4, INT4, MXFP8, FP8, FP8_E8M0, FP8_CHANNEL, FP8_TENSOR),
        *OWN,
        Encoding("rows", INT8, (Scale("scale", F32, ROW), F16_ZEROS[0])),
        Encoding("table_zeros", Element.look_up("z", NF4), (Scale("scale", F16, 64), F16_ZEROS[1])),
        Encoding("nf4", Element.look_up("nf4", NF4), (Scale("scale", F32, 48),)),
        Encoding("one_bit_wide", Element.look_up("b", [-1.0, 1.0]), (Scale("scale", F16, 256),)),
    )
}
READ = """
extern "C" void {name}(const void* const* parts, i64 K, float* out) {{
    Problem p{{}};
    std::copy(parts, parts + PARTS, p.parts);
    p.G = 1, p.N = {rows}, p.K = K, p.runs = 1;
    for (i64 n = 0; n < p.N; ++n) {{
        for (i64 k = 0; k < K; k += RUN) {{
            float run[RUN];
            const i64 count = std::min(RUN, K - k);
            {space}::Weight::dequantize(p, 0, n, k, count, run);
            std::copy(run, run + count, out + n * K + k);
        }}
    }}
}}
"""


def library(tier: str) -> ctypes.CDLL:
    """Functions derived_<encoding> and override_<encoding>, which dequantize a matrix."""
    made = [
        ("derived", name, readers.derived(e).replace('#include "derived.h"', ""))
        for name, e in ENCODINGS.items()
    ]
    made += [
        ("override", path.stem, path.read_text().replace("#pragma once", ""))
        for path in sorted((readers.KERNELS / "weights").glob("*.h"))
    ]
    text = '#include "derived.h"\n#include "e2m1.h"\n' + "\n".join(
        f"namespace {kind}_{name}_ {{\n{source}\n}}"
        + READ.format(name=f"{kind}_{name}", space=f"{kind}_{name}_", rows=N)
        for kind, name, source in made
    )
    return build.library(build.LibrarySource(text, "derived_readers", tier, (readers.KERNELS,)))


def every_byte(encoding: Encoding, k: int) -> Quantized:
    """[1, N, k]: every code in each run of sixteen bytes, under scales of all bytes."""
    *_, packed = encoding.part_shape(encoding.parts[0], (1,), N, k)
    row = torch.arange(packed) * 17 if encoding.element.bits == 4 else torch.arange(packed)
    codes = (row + torch.arange(N)[:, None]).to(U8)[None].view(encoding.element.dtype)
    parts = [codes]
    for part in encoding.parts[1:]:
        shape = encoding.part_shape(part, (1,), N, k)
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        if part.dtype.itemsize == 1:
            byte = torch.arange(N)[None, :, None] + torch.zeros(shape, dtype=torch.int64)
            parts.append(byte.to(U8).view(part.dtype))
        else:
            parts.append(((numbers * 37 % 4001 - 2000) / 64).to(part.dtype))
    return Quantized(*parts, encoding=encoding)


@pytest.mark.parametrize("tier", TIERS)
def test_every_code_under_every_scale(tier):
    functions = library(tier)
    for name, encoding in ENCODINGS.items():
        for k in (48 * 32, *([1000] if encoding.block == 1 else [])):
            weight = every_byte(encoding, k)
            want = dequantize(weight)[0]
            pointers = [t.data_ptr() for t in weight] + [None] * (readers.PARTS - len(weight))
            for kind in ("derived", "override"):
                if kind == "override" and name not in readers.BUILT_IN:
                    continue
                found = torch.empty(N, k)
                array = (ctypes.c_void_p * readers.PARTS)(*pointers)
                read = getattr(functions, f"{kind}_{name}")
                read(array, ctypes.c_longlong(k), ctypes.c_void_p(found.data_ptr()))
                nan = want.isnan()
                assert found[nan].isnan().all(), (kind, name)
                assert torch.equal(*(t[~nan].view(torch.int32) for t in (found, want))), (
                    kind,
                    name,
                )


def test_the_header_of_int4_is_the_derived_one():
    """Wheels are built without torch, so its text is in the package."""
    text = (readers.KERNELS / "weights" / "int4.h").read_text().replace("#pragma once\n\n", "")
    assert text.endswith(readers.derived(INT4))


@pytest.mark.parametrize(
    ("encoding", "why"),
    [
        (
            Encoding("e", INT8, (Scale("scale", F16, 8),)),
            r"for \[8\] elements; readers take multiples of 16",
        ),
        (Encoding("e", INT8, (Scale("scale", F16, 32),), axis=-2), "its blocks lie along N"),
        (
            Encoding("e", Element("h", 16, F16, 1.0), (Scale("scale", F32, 16),)),
            "its elements have 16 bits",
        ),
        (
            Encoding("e", INT8, (Scale("scale", torch.float8_e5m2, 16),)),
            "its scale is float8_e5m2; readers take",
        ),
        (
            Encoding("e", INT8, (Scale("scale", F32, 0), Scale("b", F32, 0))),
            "one of them for a whole matrix",
        ),
    ],
)
def test_what_no_reader_takes_is_said(encoding, why):
    with pytest.raises(UnsupportedError, match=f"weights in e have no reader for CPUs: .*{why}"):
        readers.derived(encoding)
