"""Where encoded weights lie: on the CPU on large pages (runtime/host_memory/pages.py).

Quantizing writes directly there (weight.py); a tensor from elsewhere is copied there by itself, so
that a module made of several tensors never holds a second copy of all of them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from ...encodings import MXFP4, NVFP4, Encoding, Quantized, as_plain_tensors, quantize_weight
from ...encodings.encoded import plain
from ...ir import FusionDefinition, Value
from ...ir.text import text
from ...runtime.host_memory import pages

_ROUNDED_BY_KERNELS = NVFP4, MXFP4  # on CUDA


def frozen(t: Tensor) -> nn.Parameter:
    """t as a parameter without a gradient."""
    return nn.Parameter(pages.on_large_pages(plain(t).detach()), requires_grad=False)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """As `parameters(recurse=False)`, but not what a wrapper does first
    (`PackedModule.named_parameters`).
    """
    return [p for p in module._parameters.values() if p is not None]


def place_(module: nn.Module) -> None:
    """Puts the parameters of a module where `frozen` would have put them. Those already there, or
    in shared memory, stay.
    """
    for p in own_parameters(module):
        if pages.takes(plain(p)) and not p.is_shared():
            with torch.inference_mode(p.is_inference()), as_plain_tensors():
                p.data = pages.on_large_pages(p.data)


def round_(
    x: Tensor,
    encoding: Encoding,
    runs: int,
    matrix_scale: Tensor | None,
    layout: str,
    scales: str,
) -> list[Tensor]:
    """x float [G, N, K] -> its parts, some runs of rows by themselves; by kernels in a layout."""
    x = x if runs == 1 else x.unflatten(1, (runs, -1))
    if x.numel() and by_kernels(x.device, encoding):
        parts = _by_program(x, encoding, matrix_scale, layout, scales)
    else:
        parts = quantize_weight(x, encoding, matrix_scale, scales)
    return [t if runs == 1 or part.of_matrix else t.flatten(1, 2) for part, t in parts.named()]


def by_kernels(device: torch.device, encoding: Encoding) -> bool:
    """Whether kernels of the device round weights to an encoding, in its order too."""
    return device.type == "cuda" and encoding in _ROUNDED_BY_KERNELS


def _by_program(
    x: Tensor, encoding: Encoding, matrix_scale: Tensor | None, layout: str, rule: str
) -> Quantized:
    """x float[..., N, K] -> the same in an encoding and a layout, by the kernels of the device."""
    *lead, n, k = x.shape
    source = _program(n, k, x.dtype, encoding.name, layout, matrix_scale is not None, rule)
    inputs = [x.reshape(-1, n, k), *([] if matrix_scale is None else [matrix_scale.reshape(-1)])]
    outputs = torch.ops.fusion_moe.run(source, [t.contiguous() for t in inputs], [len(inputs[0])])
    of_matrix = [] if matrix_scale is None else [matrix_scale]
    return Quantized(*(t.unflatten(0, lead) for t in outputs), *of_matrix, encoding=encoding)


@lru_cache
def _program(
    n: int, k: int, dtype: torch.dtype, encoding: str, layout: str, scaled: bool, rule: str
) -> str:
    """The text of what makes the parts of matrices; scaled: their scales are given; rule: for those
    of blocks.
    """
    fd = FusionDefinition()
    count = fd.define_size("count")
    x, scales = fd.define_tensor(shape=[count, n, k], dtype=dtype), list[Value]()
    if scaled:
        scales = [fd.define_tensor(shape=[count], dtype="f32")]
    elif encoding == NVFP4.name:
        scales = [fd.ops.decode_scale(x, encoding=encoding)]
    weight = fd.ops.quantize(x, *scales, encoding=encoding, scales=rule)
    if layout != "linear":
        weight = fd.ops.relayout(weight, layout=layout)
    for part in (*fd.ops.unpack(weight), *([] if scaled else scales)):
        fd.add_output(part)
    return text(fd.fusion())
