"""The C++ that reads the weights of each encoding, and the fixed library of a tier that is compiled
around it.

kernels/weight.h defines readers. Those of the built-in encodings are kernels/weights/<encoding>.h;
`register_reader` adds one for a user-defined encoding. Imports no torch, since
tools/build_kernels.py builds the libraries of the built-in encodings into the package.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import UnsupportedError
from ...runtime import build

KERNELS = Path(__file__).parent / "kernels"
# filled when the package is built: tools/build_kernels.py
SHIPPED = Path(__file__).parent / "shipped"
BUILT_IN = tuple(sorted(path.stem for path in (KERNELS / "weights").glob("*.h")))
# weights that an added product may have: kernels/added.h
FLOATS = (("bf16", "linear"), ("f16", "linear"), ("f32", "linear"))
PARTS = 3  # the most parts that a weight may have: kernels/product.h
_registered: dict[str, str] = {}  # encoding -> C++


def register_reader(encoding: str, source: str | Path) -> None:
    """Registers the reader of an encoding: C++ or a file with it, which defines `Weight`. Replaces
    an earlier one unless that is built in.

    UnsupportedError for a built-in encoding.
    """
    if encoding in BUILT_IN:
        raise UnsupportedError(
            f"the CPU already has a reader of {encoding}", expected="an encoding of your own"
        )
    _registered[encoding] = (
        source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    )


def unregister_reader(encoding: str) -> None:
    """Undoes `register_reader`. Programs that are compiled already keep their reader."""
    _registered.pop(encoding, None)


def reader_of(encoding: str) -> str:
    """C++ that defines `Weight`. UnsupportedError if the encoding has none."""
    if encoding in BUILT_IN:
        return f'#include "weights/{encoding}.h"\n'
    if encoding not in _registered:
        todo = "register one with fusion_moe.backends.cpu.readers.register_reader"
        raise UnsupportedError(f"weights in {encoding} have no reader for CPUs", todo=todo)
    return _registered[encoding]


def linear() -> tuple[tuple[str, str], ...]:
    """The encodings that have a reader, each with the layout that kernels read."""
    return tuple((encoding, "linear") for encoding in (*BUILT_IN, *_registered))


def library_source(tier: str, encoding: str, kind: str = "fprop") -> build.LibrarySource:
    """How to build the library for a tier, an encoding and a kind of product, and where the one
    that came with the package is.

    kind: as in schedule/product.py, or "int8", an fprop with int8 operands. encoding: "" for wgrad,
    which reads no weight. Raises like `reader_of`.
    """
    reader = reader_of(encoding) if encoding else ""
    text = f"{reader}\n{(KERNELS / f'{kind}.cpp').read_text(encoding='utf-8')}"
    return build.LibrarySource(
        text, f"{kind}_{encoding}" if encoding else kind, tier, (KERNELS,), shipped=SHIPPED
    )
