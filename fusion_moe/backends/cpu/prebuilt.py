"""The library of a grouped product: the one that came with the package, or one built by the user's
compiler at first use.

Without a compiler, the library that came with the package computes the products, and plain torch
everything around them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ...encodings import Encoding, Quantized
from ...errors import UnsupportedError
from ...ir import Fusion, Op
from ...ir.kinds.quantized import linear
from ...layouts import check_ends
from ...runtime import build, isa
from ...schedule.product import main_and_added, products
from .readers import PARTS, came, library_source

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kernels/product.h


def product_of(
    isa_level: str, encoding: str, kind: str = "fprop", layout: str = "linear"
) -> ctypes.CDLL:
    """The library for an ISA level, an encoding and a layout of weights and a kind of product.
    BuildError without a compiler if none came with the package.

    UnsupportedError for an encoding without a registered reader.
    """
    return build.library(library_source(isa_level, encoding, kind, layout))


def product(fusion: Fusion) -> tuple[Callable[..., Any], str]:
    """What evaluates a segment, its grouped product by the library that came with the package; and
    a description for people. UnsupportedError if no such product came with the package.
    """
    main = main_and_added(fusion)[0] if products(fusion) else None
    if main is None or main.kind != "fprop":
        raise UnsupportedError(build.why_no_compiler())
    op, encoding, isa_level = main.op, main.b.type.encoding, isa.selected()
    if operands := op.attrs.get("operands"):
        raise UnsupportedError(
            f"{build.why_no_compiler()}; no products of {operands} operands came with the package"
        )
    if not came(isa_level, encoding.name):
        raise UnsupportedError(
            f"{build.why_no_compiler()}; this installation has no prebuilt "
            f"kernels of {encoding.name} for {isa_level}"
        )

    @cache  # finding it reads all sources
    def using() -> dict[Op, Callable[..., Any]]:
        entry = product_of(isa_level, encoding.name).standalone
        return {op: partial(_grouped_mm, entry, encoding)}

    def evaluate(*inputs: Any, sizes: Any) -> Any:
        return fusion.evaluate(*inputs, sizes=sizes, using=using())

    why = f"the product that came with the package for {isa_level}: {build.why_no_compiler()}"
    return evaluate, why


def _grouped_mm(
    entry: Any,
    encoding: Encoding,
    a: torch.Tensor,
    w: Quantized | torch.Tensor,
    ends: torch.Tensor,
    w_layout: str = "linear",
    **attributes: str,
) -> tuple[torch.Tensor]:
    """a [M, K], w [G, N, K], ends i32 [G] -> f32 [M, N], as defined by the kind grouped_mm. Weights
    in another layout are put in the linear one first: the library reads no other.
    """
    check_ends(ends, a.shape[0], "ends")
    w = linear(w, encoding, w_layout)
    g, n, k = w.shape
    parts = w if isinstance(w, Quantized) else (w,)
    out = torch.empty(a.shape[0], n, dtype=torch.float32, device=a.device)
    runs = max(
        [t[:1].numel() for part, t in zip(encoding.parts, parts, strict=True) if part.of_matrix],
        default=1,
    )
    tensors = (*parts, *[None] * (PARTS - len(parts)), ends, a, out)
    arrays = [t if t is None else t.contiguous() for t in tensors]
    sizes = (g, n, k, runs, a.shape[0])
    pointers = (ctypes.c_void_p * len(arrays))(*[t if t is None else t.data_ptr() for t in arrays])
    entry(
        pointers,
        (ctypes.c_longlong * len(sizes))(*sizes),
        _DTYPES[a.dtype],
        torch.get_num_threads(),
    )
    return (out,)
