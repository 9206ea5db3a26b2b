"""The grouped product as a library: the one that came with the package, else built by the user's compiler at first use.

Where there is no compiler, the one that came with the package computes the products, and plain torch what is around them.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ...encodings import Quantized
from ...errors import UnsupportedError
from ...groups import check_ends
from ...runtime import build, isa
from ...segment import Segment
from ..cxx.plan import plan

KERNELS = Path(__file__).parent / "kernels"
SHIPPED = Path(__file__).parent / "shipped"  # filled when the package is built: tools/build_kernels.py
READERS = (("nvfp4", "linear"),)  # of weights: kernels/tiles.h
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kernels/product.h


@cache
def product_of(tier: str) -> ctypes.CDLL:
    """The library of a tier. BuildError if none came with the package and there is no compiler."""
    return build.library(recipe(tier))


def kernels(tier: str, dtype: torch.dtype) -> str:
    """Which of a tier's kernels multiply groups of how many rows of activations of a dtype."""
    function = product_of(tier).kernels
    function.restype = ctypes.c_char_p
    return str(function(_DTYPES[dtype]).decode())


def evaluate(segment: Segment) -> Any:
    """launch(*inputs, sizes=...) of a grouped_gemm segment, its product by the library that came with the package.

    UnsupportedError if none came, or the product is none that it has.
    """
    planned, tier = plan(segment.fusion, READERS), isa.selected()
    came = recipe(tier).came_with()
    if came is None or not came.is_file():
        raise UnsupportedError(f"{build.why_no_compiler()}; nor did kernels for {tier} come with this installation")
    return partial(segment.fusion.evaluate, using={planned.product: partial(_grouped_mm, product_of(tier).plain)})


def recipe(tier: str) -> build.Recipe:
    """How the library of a tier is built, and where one that came with the package lies."""
    return build.Recipe((KERNELS / "product.cpp").read_text(encoding="utf-8"), "product", tier, (KERNELS,), shipped=SHIPPED)


def _grouped_mm(entry: Any, a: torch.Tensor, w: Quantized, ends: torch.Tensor, **layouts: str) -> tuple[torch.Tensor]:
    """a [M, K], w nvfp4 [G, N, K], ends i32 [G] -> f32 [M, N], as the kind grouped_mm has it."""
    check_ends(ends, a.shape[0], "ends")
    g, n, k = w.shape
    out, runs = torch.empty(a.shape[0], n), w.decode_scale[:1].numel()
    arrays, sizes = [*(t.contiguous() for t in (*w, ends, a)), out], (g, n, k, runs, a.shape[0])
    pointers = (ctypes.c_void_p * len(arrays))(*[t.data_ptr() for t in arrays])
    entry(pointers, (ctypes.c_longlong * len(sizes))(*sizes), _DTYPES[a.dtype], torch.get_num_threads())
    return (out,)
