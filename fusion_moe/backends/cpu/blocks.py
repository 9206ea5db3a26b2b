"""The search for the scales of blocks, and their codes, in C++ (kernels/blocks.cpp): the same bits
as encodings/search.py and encodings/convert.py in plain torch, in a tenth of the time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...encodings import Element, real_tensors
from ...encodings.e2m1 import E2M1
from ...errors import BuildError
from ...messages import warn_once
from ...runtime import build, isa
from .readers import blocks_source

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = (*_FLOATS, torch.float8_e4m3fn)  # as blocks.cpp counts them
_BLOCKS, _LEAST = (16, 32, 64, 128), 16  # elements of a block; how many blocks


class _Numbers(ctypes.Structure):
    """`Numbers` of blocks.cpp."""

    _fields_ = (
        ("count", ctypes.c_int),
        ("bounds", ctypes.c_float * 16),
        ("numbers", ctypes.c_float * 16),
        ("codes", ctypes.c_int32 * 16),
    )


class CPUBlockKernels:
    """Kernels over blocks of an element type; `find` gives None where there are none."""

    def __init__(self, numbers: _Numbers):
        self._numbers_of = ctypes.byref(numbers)

    @classmethod
    def find(cls, x: Tensor, element: Element) -> CPUBlockKernels | None:
        """The kernels that quantize blocks x float [n, block] to 4-bit codes of `element`; None for
        other dtypes, blocks or codes, and where no C++ compiler is.
        """
        some = x.dtype in _FLOATS and x.shape[-1] in _BLOCKS and len(x) >= _LEAST
        numbers = _numbers(element) if some and element.bits == 4 else None
        return cls(numbers) if numbers and _library(isa.selected()) else None

    def largest(self, x: Tensor) -> Tensor:
        """x float [n, block] -> f32 [n]: the largest magnitudes, or NaN."""
        return self._run("largest", x, out=x.new_empty(len(x), dtype=torch.float32))

    def least_errors(self, x: Tensor, scales: Tensor, outers: Tensor) -> Tensor:
        """x float [n, block], scales [tried, n], outers f32 [n] -> u8 [n]: which of the steps
        scales * outers rounds with the least squared error, the first of equal ones.
        """
        scales = scales if scales.dtype in _DTYPES else scales.float()
        dtype, tried = ctypes.c_int(_DTYPES.index(scales.dtype)), ctypes.c_int(len(scales))
        best = x.new_empty(len(x), dtype=torch.uint8)
        others = self._numbers_of, scales, dtype, outers, tried
        return self._run("least_errors", x, *others, out=best)

    def encode(self, x: Tensor, units: Tensor) -> Tensor:
        """x float [n, block], units f32 [n] -> u8 [n, block / 2]: the codes of x / units."""
        codes = x.new_empty(len(x), x.shape[-1] // 2, dtype=torch.uint8)
        return self._run("encode_blocks", x, self._numbers_of, units, out=codes)

    def _run(self, entry: str, x: Tensor, *others: Any, out: Tensor) -> Tensor:
        """Calls an entry with x, what else it takes, and its output."""
        kept = [  # a sign may only be marked
            t.resolve_neg().contiguous() if isinstance(t, Tensor) else t for t in (x, *others, out)
        ]
        given = [ctypes.c_void_p(t.data_ptr()) if isinstance(t, Tensor) else t for t in kept]
        sizes = (
            ctypes.c_int(_DTYPES.index(x.dtype)),
            ctypes.c_longlong(len(x)),
            ctypes.c_int(x.shape[-1]),
        )
        threads = ctypes.c_int(torch.get_num_threads())
        getattr(_library(isa.selected()), entry)(given[0], *sizes, *given[1:], threads)
        return out


@cache
@real_tensors()
def _numbers(element: Element) -> _Numbers | None:
    """The numbers and bounds of an element type, with which rounding is comparing; None if it does
    not round so.
    """
    searched = element is E2M1 or element.affine or not element.nearest  # as searches round
    if element.encode is None or element.decode is None or element.holds_nan or not searched:
        return None
    codes = sorted(range(16), key=lambda i: (element.values[i], i < 8))
    numbers = [element.values[i] for i in codes]
    if numbers == [-v for v in reversed(numbers)] and codes[8:] == list(range(8)):
        codes, numbers = codes[8:], numbers[8:]  # signs apart
    values = torch.tensor(numbers)
    middle = (values[1:] + values[:-1]) / 2
    upper = torch.tensor(codes[1:], dtype=torch.uint8)
    up = element.encode(middle) == upper
    infinity = torch.tensor(float("inf"))
    bounds = torch.where(up, middle.nextafter(-infinity), middle)
    lower = torch.tensor(codes[:-1], dtype=torch.uint8)
    exact = (element.encode(bounds) == lower) & (
        element.encode(bounds.nextafter(infinity)) == upper
    )
    if not exact.all():
        return None
    made = _Numbers(count=len(codes))
    made.bounds[: len(codes)] = [0.0, *bounds.tolist()]
    made.numbers[: len(codes)], made.codes[: len(codes)] = numbers, codes
    return made


@cache
def _library(isa_level: str) -> ctypes.CDLL | None:
    """None where it cannot be compiled, with a warning."""
    try:
        return build.library(blocks_source(isa_level))
    except BuildError as error:
        warn_once(f"scales are searched by torch, which takes ten times as long: {error}")
        return None
