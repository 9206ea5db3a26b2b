"""Steps with adapters, or with gradients: all experts that a step names are brought to the device
(buffers.py), and the operation itself runs there, as if they had been there. What autograd saves of
weights is which layer's they are: the backward brings them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..bodies.autograd import Differentiated, Step, refuse_transforms
from ..definitions.operations import SPECS, Call, bind, each_tensor
from ..errors import UnsupportedError
from ..runtime import cuda
from . import buffers

_WHERE = "offload"


class Layer(buffers.Layer, Protocol):
    """What a step reads of a layer."""

    @property
    def layer_buffers(self) -> buffers.Buffers:
        """Those through which its experts go."""

    def arguments(
        self, x: Tensor, ids: Tensor, w: Tensor, weights: Mapping[str, Tensor], more: Any
    ) -> dict[str, Any]:
        """Those of the operation, with weights that are on the device."""


def run(layer: Layer, x: Tensor, ids: Tensor, w: Tensor, adapters: Mapping[str, Any]) -> Tensor:
    """x [T, H], ids int[T, k], w [T, k] -> [T, H]. adapters: arguments of the operation."""
    if x.is_cuda and cuda.capturing():
        raise UnsupportedError(
            "adapters or gradients of offloaded experts in a CUDA graph",
            expected="an eager step, which copies what is not there",
            where=_WHERE,
        )
    named = _named(ids, layer.storage.experts)
    with layer.layer_buffers.hold(layer, named) as weights:
        arguments = layer.arguments(x, ids, w, weights, adapters)
        operation = partial(torch.ops.fusion_moe.fused_experts, **arguments)
        tensors = [t for _, t in each_tensor(arguments)]
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return operation()
        refuse_transforms(_WHERE)
        call = bind(SPECS["fused_experts"], (), arguments)
        step = _Step.of(layer, call, named)
        return Differentiated.apply(step, operation, *call.tensors.values())


def _named(ids: Tensor, experts: int) -> Collection[int]:
    """The experts that a step names; all of them, without a wait for the device, if it may."""
    if ids.numel() >= experts:
        return range(experts)
    return {e for e in ids.unique().tolist() if 0 <= e < experts}


@dataclass(frozen=True)
class _Step:
    """A step of the operation that saves no weights. reads: of what its backward reads, the names
    of a layer's weights, and "" for what autograd saves. key: of the weights.
    """

    step: Step
    layer: Layer
    named: Collection[int]
    reads: Sequence[str]
    key: tuple[int, int]
    dtype: torch.dtype
    parts = None

    @classmethod
    def of(cls, layer: Layer, call: Call, named: Collection[int]) -> _Step:
        step, names = Step.of_call(call), [*call.tensors]
        of_storage = [name if name in layer.storage.tensors else "" for name in names]
        reads = [
            of_storage[i] if i < len(names) else ""
            for i in (
                [] if isinstance(step.programs, Exception) else step.programs.derivative.reads
            )
        ]
        return cls(step, layer, named, reads, layer.key, call.tensors["x"].dtype)

    def forward(
        self, operation: Callable[[], Any], tensors: Sequence[Tensor]
    ) -> tuple[Any, list[Any]]:
        """As in `Step`."""
        result, saved = self.step.forward(operation, tensors)
        return result, [t for t, name in zip(saved, self.reads, strict=True) if not name]

    def backward(self, saved: Sequence[Any], grads: Sequence[Tensor]) -> dict[int, Tensor]:
        """As in `Step`. UnsupportedError for weights that are others by now."""
        if self.layer.key != self.key:
            raise UnsupportedError(
                "weights of offloaded experts that changed between forward and backward",
                expected="those of the forward",
                todo="load, merge or update weights before a forward, or after its backward",
                where=_WHERE,
            )
        with self.layer.layer_buffers.hold(self.layer, self.named) as weights:
            given, own = self.layer.storage.cast(weights, self.dtype), iter(saved)
            reads = [given[name] if name else next(own) for name in self.reads]
            return self.step.backward(reads, grads)
