"""Modules that hold NVFP4 weights as arguments of `f16a_nvfp4weight_scaled_grouped_mm`, by the
names of their buffers: what thunder's inference benchmark makes, or copies of its classes.

Nothing is rounded again: codes and block scales stay what they are, in linear order.
"""

from __future__ import annotations

import torch
from torch import nn

from ...encodings import NVFP4, Quantized, has_values
from ...errors import NonFiniteError, ShapeError
from ...layouts import SF128X4
from ...nn import GroupedSwiGLU, NVFP4GroupedLinear, QuantizationConfig, QuantizedLinear
from ...nn.conversion.register import Converter

PARTS = "fp4_weight", "weight_scaling_factor", "weight_global_scale"
_STRIDES = {"ab_strides", "c_strides"}  # beside weights [G, N, K/2], with offsets that are ends
_PROJECTIONS = "gate_proj", "up_proj", "down_proj"


def packed_converter(module: nn.Module) -> Converter | None:
    """The converter of a linear layer over groups, a SwiGLU of three, or a dense linear layer,
    whose weights are packed; None for any other module.
    """
    if is_packed(module):
        return _linear if module.get_buffer(PARTS[0]).dim() == 3 else _dense
    children = dict(module.named_children())
    swiglu = "SwiGLU" in type(module).__name__ and tuple(children) == _PROJECTIONS
    return _swiglu if swiglu and all(map(is_packed, children.values())) else None


def is_packed(module: nn.Module) -> bool:
    """Whether all it holds is such a weight, and perhaps strides or a bias."""
    held = {name for name, t in (*module.named_parameters(), *module.named_buffers())}
    return held >= {*PARTS} and held - {*PARTS} <= {*_STRIDES, "bias"}


def packed_weight(module: nn.Module) -> Quantized:
    """The weight [..., N, K] of such a module. As thunder's `dequantize_to_dtype` reads it: e2m1 *
    scale / global scale.

    Raises:
        ShapeError: for scales that are not in the layout sf128x4, as of sizes that thunder cuts.
        NonFiniteError: for a global scale that is zero, infinite or NaN.
    """
    codes, scales, encode = (module.get_buffer(name).detach() for name in PARTS)
    codes = codes.view(torch.uint8)
    if codes.dim() == 3 and not _has_strides(module):
        codes = codes.mT  # [G, K/2, N]
    shape = (*codes.shape[:-1], NVFP4.blocks(NVFP4.elements(codes.shape[-1])))
    stored = SF128X4.storage_shape(shape)
    if scales.shape != stored or encode.shape != codes.shape[:-2]:
        raise ShapeError(
            f"weight_scaling_factor {[*scales.shape]}, weight_global_scale {[*encode.shape]}",
            expected=f"{[*stored]} and {[*codes.shape[:-2]]} for codes {[*codes.shape]}",
            todo="pad out-features to 128 and in-features to 64 before quantizing: scales that are "
            "swizzled and then cut to other sizes are lost",
        )
    decode = encode.float().reciprocal()
    if has_values(decode) and not (decode.isfinite() & decode.ne(0)).all():
        raise NonFiniteError(
            f"weight_global_scale {encode.flatten().tolist()}",
            expected="finite scales above zero: weights are divided by them",
            todo="quantize the experts that are zero with a scale of 1",
        )
    return Quantized(codes.contiguous(), SF128X4.inverse(scales, shape), decode, encoding=NVFP4)


def packed_gate_up(gate: nn.Module, up: nn.Module) -> Quantized:
    """One weight [G, 2I, H], gate above up, each with the scales it has."""
    a, b = packed_weight(gate), packed_weight(up)
    rows = (torch.cat([x, y], 1) for x, y in zip(a[:2], b[:2], strict=True))
    return Quantized(*rows, torch.stack([a[2], b[2]], 1), encoding=NVFP4)


def _linear(linear: nn.Module, config: QuantizationConfig) -> nn.Module:
    return _grouped(linear, packed_weight(linear), config)


def _swiglu(swiglu: nn.Module, config: QuantizationConfig) -> nn.Module:
    gate, up, down = (swiglu.get_submodule(name) for name in _PROJECTIONS)
    gate_up = _grouped(gate, packed_gate_up(gate, up), config)
    return GroupedSwiGLU(gate_up, _grouped(down, packed_weight(down), config))


def _dense(linear: nn.Module, config: QuantizationConfig) -> nn.Module:
    held = dict((*linear.named_parameters(), *linear.named_buffers()))
    return QuantizedLinear(packed_weight(linear), held.get("bias"))


def _grouped(of: nn.Module, weight: Quantized, config: QuantizationConfig) -> NVFP4GroupedLinear:
    linear = NVFP4GroupedLinear(weight, None, config.activation_format)
    linear.starts = not _has_strides(of)
    return linear


def _has_strides(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _STRIDES)
