"""Registers our operations under the names that other projects' code calls: on request, never on
import.

lightning-thunder's inference benchmarks call
`torch.ops.nvf_cutlass.f16a_nvfp4weight_scaled_grouped_mm` and register it themselves. torch keeps
one registration for each name, the last one: register after importing them.

There are two signatures: the seven arguments of thunder versions after 0.2.6, with the meaning that
`fusion_moe::f16a_nvfp4weight_scaled_grouped_mm` documents; and the nine of thunder 0.2.6, with
ab_strides and c_strides, which nothing reads, and fp4_weight as it is stored, [G, N, K/2].
nvFuser's test has an eighth one, `dropme`, a placeholder of which nothing is computed: leave it
out. Not everything that thunder passes has
it: its Llama4MoE leaves out the last group, and its quantization gives global scales that are
neither decode nor encode scales; `fusion_moe.quantize_` converts those modules as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops
from torch._ops import OpOverload

from ..definitions import translate
from ..encodings import MXFP8, NVFP4, Encoding, Quantized, dequantize, find
from ..errors import OptionError, ShapeError, Untranslatable, need_one_of
from ..ir import FusionDefinition
from ..layouts import SF128X4
from ..target import ACTIVATION_FORMATS

_ARGUMENTS = (
    "activation",
    "fp4_weight",
    "weight_scaling_factor",
    "weight_global_scale",
    "offsets",
    "blockscale_offsets",
    "problem_sizes",
)
_STRIDES = ("ab_strides", "c_strides")  # of thunder 0.2.6, before the offsets
_SIGNATURES = {7: _ARGUMENTS, 9: (*_ARGUMENTS[:4], *_STRIDES, *_ARGUMENTS[4:])}
NAME = "nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm"
_OURS = NAME.replace("nvf_cutlass", "fusion_moe")


def register_nvf_cutlass(activation_format: str = "bf16", arguments: int = 0) -> None:
    """Registers our operation as NAME, in place of another `torch.library.custom_op` of that name.

    The operation has a fake, a derivative with respect to the activation, which computes the
    product once more, and, with seven arguments, our translator, which refuses calls once somebody
    else has taken the name.

    Args:
        activation_format: "bf16": activations stay in 16 bits, as the operation's name says. Or
            they are quantized too: "nvfp4", as nvFuser's cutlass_nvfp4_grouped_mm has them (compute
            capability 10.0 only; docs/formats.md says how results differ), or "int8" (CPUs only).
        arguments: 7 or 9, the signature; 0: as many as who has the name now, or else 7.

    Raises:
        OptionError: for another format, or number of arguments.
    """
    where = "register_nvf_cutlass"
    need_one_of("activation_format", activation_format, ACTIVATION_FORMATS, where=where)
    if arguments not in (0, *_SIGNATURES):
        raise OptionError(f"arguments = {arguments}", expected="7, 9 or 0", where=where)
    names = _SIGNATURES[arguments or _registered()]

    def ours(*args: Tensor) -> Tensor:
        values = dict(zip(names, args, strict=True))
        if len(names) == 9:
            values["fp4_weight"] = values["fp4_weight"].transpose(1, 2)
        return torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm(
            *(values[name] for name in _ARGUMENTS), activation_format=activation_format
        )

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(ours(x, *others), x, dy)
        return dx, *[None] * len(others)

    custom_op = torch.library.custom_op(
        NAME,
        ours,
        mutates_args=(),
        schema=f"({', '.join(f'Tensor {name}' for name in names)}) -> Tensor",
        tags=(torch.Tag.cudagraph_unsafe,),
    )
    custom_op.register_fake(ours)
    custom_op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    translate.unregister(NAME)
    if len(names) == 7:
        translate.translator(NAME, version=f"fusion_moe.compat {activation_format}")(
            _translator(custom_op, activation_format)
        )


def _registered() -> int:
    """How many arguments the operation has that is registered now; 7 if there is none."""
    entry = custom_ops.OPDEFS.get(NAME)
    count = len(entry._opoverload._schema.arguments) if entry is not None else 7
    return count if count in _SIGNATURES else 7


def _translator(made: Any, activation_format: str) -> Callable[..., Any]:
    def translated(fd: FusionDefinition, *args: Any, **kwargs: Any) -> Any:
        if custom_ops.OPDEFS.get(NAME) is not made:
            raise Untranslatable(f"{NAME} was registered again, after register_nvf_cutlass()")
        ours, named = translate.find(_OURS), dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        assert ours is not None
        return ours.function(
            fd, *(named[name] for name in _ARGUMENTS), activation_format=activation_format
        )

    return translated


# Products of two quantized operands ---------------------------------------------------------------


def register_nvf_cutlass_products() -> None:
    """Registers nvFuser's other products, its Python functions of the same names and arguments, as
    operations `nvf_cutlass::...` for any device:

        nvfp4_scaled_mm             a [M, K/2], b [N, K/2], scales of both in sf128x4, alpha f32[]
        nvfp4_scaled_mm_blockscale  the same -> codes [M, N/2] and their scales in sf128x4;
                                    global_normconst f32[] is their encode scale
        nvfp4_scaled_grouped_mm     a [M, K/2], b [G, N, K/2], alphas f32[G]; scales of a in sf128x4
                                    for each group, from sf_offsets on; strides are not read
        mxfp8_scaled_mm             e4m3 a [M, K], b [N, K], scales e8m0 in sf128x4, alpha f32[]
        mxfp8_scaled_grouped_mm     e4m3 a [M, K], b [G, K, N]; scales f32 [M, K/128] and [G, K/128,
                                    N/128], for blocks of 128; strides are not read

    Each is made of operations of `fusion_moe`, whose fakes, kernels, errors and translators it has:
    compilers see these in its place, and fuse what comes after the product. Rows become the numbers
    that their codes stand for, exact in bfloat16 or, of FP8 in blocks, float32; products are summed
    in float32 and multiplied by alpha. It takes the place of another `torch.library.custom_op` of
    its name.
    """
    schema = "(Tensor codes, Tensor scales, Tensor? ends, str encoding) -> Tensor"
    rows = torch.library.custom_op(_ROWS, _decoded, mutates_args=(), schema=schema)
    rows.register_fake(_decoded)
    for name, (arguments, result, function) in _PRODUCTS.items():
        library = custom_ops.get_library_allowing_overwrite("nvf_cutlass", name)
        library.define(f"{name}({arguments}) -> {result}")
        library.impl(name, function, "CompositeImplicitAutograd")


def products() -> list[OpOverload]:
    """The operations that `register_nvf_cutlass_products` has registered."""
    names = torch._C._dispatch_get_all_op_names()
    there = [name for name in _PRODUCTS if f"nvf_cutlass::{name}" in names]
    return [getattr(torch.ops.nvf_cutlass, name).default for name in there]


_ROWS = "fusion_moe_compat::rows"  # one operation: Inductor has no code for tensors of fp4


def _rows(
    codes: Tensor, scales: Tensor, b: Tensor, of: Encoding, ends: Tensor | None = None
) -> Tensor:
    """The numbers bf16[M, K] of an operand with scales in sf128x4, for a product with b."""
    if codes.dim() != 2 or codes.shape[1] != b.shape[-1]:
        actual = f"a {[*codes.shape]}, b {[*b.shape]}"
        raise ShapeError(actual, expected="rows as wide as those of b", where="nvf_cutlass")
    rows: Tensor = torch.ops.fusion_moe_compat.rows(codes, scales, ends, of.name)
    return rows


def _decoded(codes: Tensor, scales: Tensor, ends: Tensor | None, encoding: str) -> Tensor:
    of = find(encoding)
    codes = codes.view(torch.uint8) if of is NVFP4 else codes
    shape = (codes.shape[0], of.blocks(of.elements(codes.shape[1])))
    if ends is not None:  # as many rows as groups need, or as many as they may need
        missing = SF128X4.storage_shape(shape, len(ends))[0] - scales.shape[0]
        padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, 0, 0, max(0, missing)))
        scales = padded.view(scales.dtype)
    linear = SF128X4.inverse(scales, shape, ends)
    one = [torch.ones((), device=codes.device)] if of is NVFP4 else []
    return dequantize(Quantized(codes, linear, *one, encoding=of), torch.bfloat16)


def _ends(starts: Tensor, rows: Tensor) -> Tensor:
    """Where groups end that start there; the last one with all rows."""
    return torch.cat([starts[1:], starts.new_full((1,), rows.shape[0])])


def _dense(rows: Tensor, parts: list[Tensor], form: str, dtype: torch.dtype) -> Tensor:
    """rows [M, K] times one matrix with scales in sf128x4."""
    ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)
    how = {"weight_format": form, "weight_layout": SF128X4.name, "out_dtype": dtype}
    return torch.ops.fusion_moe.grouped_mm(rows, [t[None] for t in parts], ends, **how)


def _nvfp4(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alpha: Tensor, dtype: torch.dtype
) -> Tensor:
    parts = [b, sb, alpha.reshape(())]
    return _dense(_rows(a, sa, b, NVFP4), parts, NVFP4.name, dtype)


def _nvfp4_blockscale(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alpha: Tensor, normconst: Tensor
) -> tuple[Tensor, Tensor]:
    y = _nvfp4(a, b, sa, sb, alpha, torch.float32)
    codes, scales, _ = torch.ops.fusion_moe.nvfp4_quantize(y, 1 / normconst.reshape(()))
    return codes.view(torch.float4_e2m1fn_x2), SF128X4.forward(scales)


def _nvfp4_grouped(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alphas: Tensor, *others: Any
) -> Tensor:
    *_, problem_sizes, starts, sf_offsets, dtype = others
    rows, weight = _rows(a, sa, b, NVFP4, _ends(starts, a)), b.transpose(1, 2)
    of = torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm
    return of(rows, weight, sb, alphas, starts, sf_offsets, problem_sizes).to(dtype)


def _mxfp8(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alpha: Tensor, dtype: torch.dtype
) -> Tensor:
    y = _dense(_rows(a, sa, b, MXFP8), [b, sb], MXFP8.name, torch.float32)
    return (y * alpha).to(dtype)


def _fp8_grouped(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, *others: Any) -> Tensor:
    *_, starts, dtype = others
    rows = a.float() * sa.repeat_interleave(128, -1)[:, : a.shape[1]]
    parts, how = [b.mT.contiguous(), sb.mT.contiguous()], {"out_dtype": dtype}
    return torch.ops.fusion_moe.grouped_mm(
        rows, parts, _ends(starts, a), weight_format="fp8", **how
    )


def _tensors(names: str) -> str:
    return ", ".join(f"Tensor {name}" for name in names.split())


_TWO = _tensors("a b scales_a scales_b alpha")
_DTYPE = "ScalarType out_dtype"
_STARTS = "problem_sizes expert_offsets"
# name -> arguments, result, function
_PRODUCTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "nvfp4_scaled_mm": (f"{_TWO}, {_DTYPE}", "Tensor", _nvfp4),
    "nvfp4_scaled_mm_blockscale": (
        f"{_TWO}, Tensor global_normconst",
        "(Tensor, Tensor)",
        _nvfp4_blockscale,
    ),
    "nvfp4_scaled_grouped_mm": (
        _tensors(f"a b a_blockscale b_blockscale alphas ab_strides c_strides {_STARTS} sf_offsets")
        + f", {_DTYPE}",
        "Tensor",
        _nvfp4_grouped,
    ),
    "mxfp8_scaled_mm": (f"{_TWO}, {_DTYPE}", "Tensor", _mxfp8),
    "mxfp8_scaled_grouped_mm": (
        _tensors(f"a b scales_a scales_b stride_a stride_b stride_c {_STARTS}") + f", {_DTYPE}",
        "Tensor",
        _fp8_grouped,
    ),
}
