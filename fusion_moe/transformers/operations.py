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
    """An immutable operation, so that many tensors can share one.

    part: how the part is stored; None for a tensor that is stored unchanged, such as a bias.
    """

    def __init__(self, part: StoredPart | None):
        self.part = part

    def __deepcopy__(self, memo: dict[int, Any]) -> _Operation:
        return self

    @property
    def scalar(self) -> bool:
        """Whether the part is the scale of a whole matrix."""
        return self.part is not None and self.part.direction is not None

    def to_part(self, t: Tensor) -> Tensor:
        """A tensor as stored -> as the parameter has it."""
        return t if self.part is None else self.part.to_part(t)


class JoinExperts(_Operation):
    """Tensors of E experts -> one [E, ...]; with several patterns, one above the other within each
    expert: gate, then up.

    On the CPU the result lies on large pages, and nothing else is allocated.
    """

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: Any,
        **_: Any,
    ) -> Tensors:
        """Removes the tensors that it has copied from input_dict."""
        first = input_dict[source_patterns[0]]
        into = empty(tensor_of(model, full_layer_name), first[0].device)
        runs = into.view(len(first), len(source_patterns), -1)
        for i, pattern in enumerate(source_patterns):
            for run, t in zip(runs, input_dict.pop(pattern), strict=True):
                run[i] = self.to_part(t).reshape(-1)
        return {target_patterns[0]: into}

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that splits the parameter into views."""
        return SplitExperts(self.part)


class SplitExperts(_Operation):
    """One [E, ...] -> tensors of E experts; for several patterns, equal runs of each expert's
    rows.
    """

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> Tensors:
        """Names with the index of an expert in place of `*`."""
        (whole,) = map(one, input_dict.values())
        # [E, patterns, ...]
        runs = (
            whole[:, None] if whole.dim() == 1 else whole.unflatten(1, (len(target_patterns), -1))
        )
        if self.scalar:
            runs = runs.flatten(1)
        found = {
            pattern.replace("*", str(e)): run[i]
            for e, run in enumerate(runs)
            for i, pattern in enumerate(target_patterns)
        }
        return (
            found
            if self.part is None
            else dict(
                stored for name, t in found.items() for stored in stored_tensors(self.part, name, t)
            )
        )

    @property
    def reverse_op(self) -> ConversionOps:
        """The inverse."""
        return JoinExperts(self.part)


class FromFused(_Operation):
    """The stored tensor of all experts -> [E, N, ...], gate above up. in_turns: gate and up rows
    alternate in the file.
    """

    def __init__(self, part: StoredPart | None, in_turns: bool):
        super().__init__(part)
        self.in_turns = in_turns

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: Any,
        **_: Any,
    ) -> Tensors:
        """A parameter that is no part of an encoding, because its layer was not quantized, stays
        unchanged.
        """
        t, like = one(input_dict.pop(source_patterns[0])), tensor_of(model, full_layer_name)
        if not is_encoded(model, full_layer_name):
            return {target_patterns[0]: t}
        t = self.to_part(t)
        if self.in_turns and not self.scalar:
            t = deinterleave(t, 1, 1)
        into = empty(like, t.device)
        return {target_patterns[0]: into.copy_(t)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The inverse."""
        return ToFused(self.part, self.in_turns)


class ToFused(FromFused):
    """The inverse of FromFused. UnsupportedError if one scale for all matrices is needed but they
    have several.
    """

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: Any,
        **_: Any,
    ) -> Tensors:
        """The tensor as it is to be stored."""
        (t,) = map(one, input_dict.values())
        return {
            target_patterns[0]: self._stored(t, full_layer_name)
            if is_encoded(model, full_layer_name)
            else t
        }

    def _stored(self, t: Tensor, name: str) -> Tensor:
        if self.scalar:
            if (t != t.flatten()[0]).any():
                raise UnsupportedError(
                    "matrices with scales of their own",
                    expected="one scale for all experts",
                    where=name,
                )
            return t.flatten()[0].clone()
        if self.in_turns:
            t = interleave(t, 1, 1)
        return t if self.part is None else self.part.from_part(t)

    @property
    def reverse_op(self) -> ConversionOps:
        """The inverse."""
        return FromFused(self.part, self.in_turns)


class QuantizeEightBit(_Operation):
    """The 8-bit floats of E experts and their scales -> the parts of their NVFP4, rounded to
    bfloat16 first, as by `quantize_`.

    Without scales, a layer's experts are in floats: they are quantized as they are.
    names: the parameters that hold the parts.
    """

    def __init__(self, names: Sequence[str]):
        super().__init__(None)
        self.names = names

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> Tensors:
        """source_patterns: first all scales, then all values."""
        half = len(source_patterns) // 2
        runs = []
        for scales, values in zip(source_patterns[:half], source_patterns[half:], strict=True):
            found, factors = input_dict.pop(values), input_dict.pop(scales, None)
            if factors is not None:
                found = [
                    _dequantized(v, s, scales.rpartition(".")[2])
                    for v, s in zip(found, factors, strict=True)
                ]
            runs.append(torch.stack(found))
        parts = quantized(runs[0]) if half == 1 else quantize_gate_up(torch.cat(runs, 1))
        where = target_patterns[0].removesuffix(self.names[0])
        return {where + name: part for name, part in zip(self.names, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """None: the rounded weights are saved as NVFP4."""
        raise NotImplementedError


def is_ours(conversion: Any) -> bool:
    """Whether this library made a conversion."""
    return any(isinstance(op, _Operation) for op in getattr(conversion, "operations", ()))


def _dequantized(values: Tensor, scale: Tensor, name: str) -> Tensor:
    """bfloat16 [N, K]; NonFiniteError for a scale that no quantizer writes. name: the scale's, for
    the error.
    """
    check_fp8_scales(scale, name)
    return dequantize_fp8(values, scale).bfloat16()


def stored_tensors(part: StoredPart, name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A part as it is stored, under its name; also the weight's shape if another package expects it
    next to 32-bit words.
    """
    yield name, t if part.direction else part.from_part(t)
    if part.suffix == ".weight_packed":
        yield f"{name.removesuffix('packed')}shape", torch.tensor([t.shape[0], 2 * t.shape[1]])


def one(value: Any) -> Tensor:
    """The tensor of a pattern that has a single tensor."""
    return value[0] if isinstance(value, list) else value


def is_encoded(model: Any, name: str) -> bool:
    """Whether the parameter belongs to a module with encoded weights."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), PackedModule)


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
