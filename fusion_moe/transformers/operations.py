"""How tensors in a file become parameters, and the inverse: transformers' ConversionOps for encoded
weights.

transformers collects the tensors of a source pattern in a list, in the order of experts, and asks
for the tensor of one parameter. When it saves a model, it asks the reverse operation for the
tensors of all names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from ..checkpoints import StoredPart
from ..checkpoints.fp8 import check_fp8_scales, dequantize_fp8
from ..errors import UnsupportedError
from ..nn.frozen.base import quantized
from ..nn.frozen.experts import quantize_gate_up
from ..nn.frozen.packed import PackedModule
from ..nn.trained.activations import deinterleave, interleave
from ..runtime.host_memory import pages

Tensors = dict[str, Any]  # a tensor, or a list of tensors, by pattern


class _Operation(ConversionOps):
    """An immutable operation, so that many tensors can share one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Operation:
        return self


class StoredExperts(_Operation):
    """The stored tensors of E experts -> one parameter [E, N, ...], gate above up within each
    expert; or the inverse.

    part: how the part is stored; None for a tensor that is stored unchanged, such as a bias.
    joined: each expert has tensors of its own. in_turns: gate and up rows alternate in the file.
    saves: the inverse. On the CPU parameters lie on large pages, and nothing else is allocated.
    """

    def __init__(
        self, part: StoredPart | None, joined: bool, in_turns: bool = False, saves: bool = False
    ):
        self.part, self.joined, self.saves = part, joined, saves
        self.scalar = part is not None and part.direction is not None  # the scale of a matrix
        self.in_turns = in_turns

    @property
    def reverse_op(self) -> ConversionOps:
        """The inverse."""
        return StoredExperts(self.part, self.joined, self.in_turns, not self.saves)

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **_: Any,
    ) -> Tensors:
        """Removes the tensors that it has copied from input_dict. A fused parameter that is no part
        of an encoding, because its layer was not quantized, stays unchanged.

        UnsupportedError if one scale for all matrices is to be saved but they have several.
        """
        if self.joined and not self.saves:
            tensors = [input_dict.pop(pattern) for pattern in source_patterns]
            return {target_patterns[0]: self._joined(tensors, tensor_of(model, full_layer_name))}
        (t,) = map(one, input_dict.values())
        if self.joined:
            return dict(self._split(t, target_patterns))
        if isinstance(model.get_submodule(full_layer_name.rpartition(".")[0]), PackedModule):
            t = self._to_fused(t, full_layer_name) if self.saves else self._from_fused(t)
            if not self.saves:
                t = empty(tensor_of(model, full_layer_name), t.device).copy_(t)
        input_dict.clear()
        return {target_patterns[0]: t}

    def _joined(self, tensors: list[list[Tensor]], like: Tensor) -> Tensor:
        whole = empty(like, tensors[0][0].device)
        runs = whole.view(len(tensors[0]), len(tensors), -1)
        for i, of_pattern in enumerate(tensors):
            for run, t in zip(runs, of_pattern, strict=True):
                run[i] = (t if self.part is None else self.part.to_part(t)).reshape(-1)
        return whole

    def _split(self, whole: Tensor, patterns: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of each expert, views, with its index in place of `*`."""
        # [E, patterns, ...]
        runs = whole[:, None] if whole.dim() == 1 else whole.unflatten(1, (len(patterns), -1))
        for e, run in enumerate(runs.flatten(1) if self.scalar else runs):
            for pattern, t in zip(patterns, run, strict=True):
                name = pattern.replace("*", str(e))
                yield from (
                    [(name, t)] if self.part is None else stored_tensors(self.part, name, t)
                )

    def _from_fused(self, t: Tensor) -> Tensor:
        t = t if self.part is None else self.part.to_part(t)
        return deinterleave(t, 1, 1) if self.in_turns and not self.scalar else t

    def _to_fused(self, t: Tensor, name: str) -> Tensor:
        if self.scalar and (t != t.flatten()[0]).any():
            raise UnsupportedError(
                "matrices with scales of their own",
                expected="one scale for all experts",
                where=name,
            )
        if self.scalar:
            return t.flatten()[0].clone()
        t = interleave(t, 1, 1) if self.in_turns else t
        return t if self.part is None else self.part.from_part(t)


class QuantizeEightBit(_Operation):
    """The 8-bit floats of E experts and their scales -> the parts of their NVFP4, rounded to
    bfloat16 first, as by `quantize_`.

    Without scales, a layer's experts are in floats: they are quantized as they are.
    names: the parameters that hold the parts.
    """

    def __init__(self, names: Sequence[str]):
        self.names = names

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> Tensors:
        """source_patterns: first all scales, then all values."""
        half = len(source_patterns) // 2
        projections = []
        for scales, values in zip(source_patterns[:half], source_patterns[half:], strict=True):
            experts = input_dict.pop(values)
            if scales in input_dict:
                factors, name = input_dict.pop(scales), scales.rpartition(".")[2]
                for factor in factors:
                    check_fp8_scales(factor, name)
                experts = [
                    dequantize_fp8(v, s).bfloat16() for v, s in zip(experts, factors, strict=True)
                ]
            projections.append(torch.stack(experts))
        whole = torch.cat(projections, 1)
        parts = quantized(whole) if half == 1 else quantize_gate_up(whole)
        where = target_patterns[0].removesuffix(self.names[0])
        return {where + name: part for name, part in zip(self.names, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """None: the rounded weights are saved as NVFP4."""
        raise NotImplementedError


def is_ours(conversion: Any) -> bool:
    """Whether this library made a conversion."""
    return any(isinstance(op, _Operation) for op in getattr(conversion, "operations", ()))


def stored_tensors(part: StoredPart, name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A part as it is stored, under its name; also the weight's shape if another package expects it
    next to 32-bit words.
    """
    yield name, t if part.direction else part.from_part(t)
    if part.dtypes == (torch.int32,):
        yield f"{name.removesuffix('packed')}shape", torch.tensor([t.shape[0], 2 * t.shape[1]])


def one(value: Any) -> Tensor:
    """The tensor of a pattern that has a single tensor."""
    return value[0] if isinstance(value, list) else value


def tensor_of(model: Any, name: str) -> Tensor:
    """A parameter or a buffer."""
    module, _, key = name.rpartition(".")
    return getattr(model.get_submodule(module), key)


def empty(like: Tensor, device: torch.device) -> Tensor:
    """An empty tensor like `like` (on the meta device), on large pages if it is on the CPU."""
    return (
        pages.empty(like.shape, like.dtype)
        if device.type == "cpu"
        else torch.empty(like.shape, dtype=like.dtype, device=device)
    )
