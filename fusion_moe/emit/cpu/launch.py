"""Calling a built kernel: pointers in, new tensors out, one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from ...ir.core import Value
from ...ir.sizes import value
from ...ir.types import DTYPES, plain
from ...runtime import build
from ..cxx.plan import Plan

KERNELS = Path(__file__).parent / "kernels"


class Launch:
    """launch(*inputs, sizes=...) -> outputs. The libraries are built, or found in the cache, at the first call."""

    def __init__(self, plan: Plan, source: str, tier: str):
        self._plan, self._source, self._tier = plan, source, tier
        fusion = plan.fusion
        self._symbols = fusion.symbols
        self._allocate = [_allocator(v) for v in plan.memory]
        self._results = [plan.memory.index(v) for v in fusion.outputs]
        self._codes = fusion.inputs.index(plan.weight[0]) if plan.transposed else None
        self._pointers = ctypes.c_void_p * (len(fusion.inputs) + len(plan.memory))
        self._sizes = ctypes.c_longlong * max(1, len(self._symbols))

    @cached_property
    def run(self) -> Callable[[Any, Any, int], int]:
        """run(pointers, sizes, threads): the segment's entry, given the product of its tier."""
        library = build.load(self._source, name="segment", tier=self._tier, include=[KERNELS])
        library.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        product = ctypes.cast(product_of(self._tier).product, ctypes.c_void_p)
        return lambda pointers, sizes, threads: library.run(pointers, sizes, product, threads)

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        tensors = [t.mT.contiguous() if i == self._codes else t.contiguous() for i, t in enumerate(inputs)]
        made = [allocate(sizes) for allocate in self._allocate]
        pointers = self._pointers(*[t.data_ptr() for t in tensors], *[t.data_ptr() for t in made])
        bad = self.run(pointers, self._sizes(*[sizes[s] for s in self._symbols]), torch.get_num_threads())
        if bad:  # ends or indices that the reference has an error for
            return self._plan.fusion.evaluate(*inputs, sizes=sizes)
        return tuple(made[i] for i in self._results)


@cache
def product_of(tier: str) -> ctypes.CDLL:
    """The library with the grouped product of a tier."""
    return build.load((KERNELS / "product.cpp").read_text(encoding="utf-8"), name="product", tier=tier, include=[KERNELS])


def _allocator(v: Value) -> Callable[[Mapping[str, int]], torch.Tensor]:
    """sizes -> an empty tensor for a value."""
    shape, dtype = [plain(d) for d in v.type.shape], DTYPES[v.type.dtype]
    known = [d for d in shape if isinstance(d, int)]
    if len(known) == len(shape):
        return lambda sizes: torch.empty(known, dtype=dtype)
    return lambda sizes: torch.empty([value(d, sizes) for d in shape], dtype=dtype)
