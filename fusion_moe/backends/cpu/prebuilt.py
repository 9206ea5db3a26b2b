"""The library of a grouped product: the one that came with the package, or one built by the user's
compiler at first use.

Without a compiler, the library that came with the package computes the products, and plain torch
everything around them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...encodings import Encoding, Quantized
from ...errors import UnsupportedError
from ...ir.core import Fusion, Op
from ...layouts.groups import check_ends
from ...runtime import build, isa
from ...schedule.product import main_and_added, products
from .readers import PARTS, library_source

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # kernels/product.h


def product_of(tier: str, encoding: str, kind: str = "fprop") -> ctypes.CDLL:
    """The library for a tier, an encoding of weights and a kind of product. BuildError without a
    compiler if none came with the package.

    UnsupportedError for an encoding without a registered reader.
    """
    return build.library(library_source(tier, encoding, kind))


@dataclass(frozen=True)
class Product:
    """A segment whose grouped product the library that came with the package computes, and plain
    torch the rest.
    """

    fusion: Fusion
    op: Op
    encoding: Encoding
    tier: str

    @property
    def why(self) -> str:
        """A description for people."""
        return f"the product that came with the package for {self.tier}: {build.why_no_compiler()}"

    def evaluate(self, *inputs: Any, sizes: Any) -> Any:
        """The outputs."""
        entry = product_of(self.tier, self.encoding.name).standalone
        using = {self.op: partial(_grouped_mm, entry, self.encoding)}
        return self.fusion.evaluate(*inputs, sizes=sizes, using=using)


def product(fusion: Fusion) -> Product:
    """The product of a segment. UnsupportedError if it has none, or if no such product came with
    the package.
    """
    main = main_and_added(fusion)[0] if products(fusion) else None
    if main is None or main.kind != "fprop":
        raise UnsupportedError(build.why_no_compiler())
    encoding, tier = main.b.type.encoding, isa.selected()
    if operands := main.op.attrs.get("operands"):
        raise UnsupportedError(
            f"{build.why_no_compiler()}; no products of {operands} operands came with the package"
        )
    came = library_source(tier, encoding.name).came_with()
    if came is None or not came.is_file():
        raise UnsupportedError(
            f"{build.why_no_compiler()}; this installation has no prebuilt "
            f"kernels of {encoding.name} for {tier}"
        )
    return Product(fusion, main.op, encoding, tier)


def _grouped_mm(
    entry: Any,
    encoding: Encoding,
    a: torch.Tensor,
    w: Quantized | torch.Tensor,
    ends: torch.Tensor,
    **layouts: str,
) -> tuple[torch.Tensor]:
    """a [M, K], w [G, N, K], ends i32 [G] -> f32 [M, N], as defined by the kind grouped_mm."""
    check_ends(ends, a.shape[0], "ends")
    g, n, k = w.shape
    parts, out = (
        w if isinstance(w, Quantized) else (w,),
        torch.empty(a.shape[0], n, dtype=torch.float32, device=a.device),
    )
    runs = max(
        [t[:1].numel() for part, t in zip(encoding.parts, parts, strict=True) if part.of_matrix],
        default=1,
    )
    tensors = (*parts, *[None] * (PARTS - len(parts)), ends, a, out)
    arrays, sizes = (
        [t if t is None else t.contiguous() for t in tensors],
        (g, n, k, runs, a.shape[0]),
    )
    pointers = (ctypes.c_void_p * len(arrays))(*[t if t is None else t.data_ptr() for t in arrays])
    entry(
        pointers,
        (ctypes.c_longlong * len(sizes))(*sizes),
        _DTYPES[a.dtype],
        torch.get_num_threads(),
    )
    return (out,)
