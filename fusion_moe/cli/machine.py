"""Which kernels this machine has for weights in an encoding, in a few words."""

from __future__ import annotations

import torch

from ..backends.cpu import readers as cpu
from ..backends.cuda import readers as cuda
from ..encodings import Encoding
from ..env import has_cuda
from ..errors import UnsupportedError
from ..runtime import build, isa


def target() -> str:
    """What programs are made for, if nobody says it."""
    return "cuda" if has_cuda() else "cpu"


def kernels_for(encoding: Encoding) -> str:
    """What multiplies by weights in an encoding."""
    if has_cuda() and (encoding.name, "linear") in cuda.readable():
        return f"CUDA, {torch.cuda.get_device_name()}"
    try:
        cpu.reader_of(encoding.name)
    except UnsupportedError:
        return "plain torch: no kernel reads it"
    if build.find_compiler() is None:
        return "plain torch, or C++ that came with the package: no compiler"
    return f"C++, {isa.selected()}"
