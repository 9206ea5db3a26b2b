"""Launch plans: what a call of known sizes launches, decided once, whoever launches it.

plan = program.joined.plan(device, sizes)
outputs = plan.run(tensors)             # from Python
numbers = plan.numbers(tensors)         # for C++ (native.cpp), which launches the next calls
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import background, memory
from .memory import Memory


class Launches(Protocol):
    """What a plan launches: kernels in order, or one function."""

    def readable(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors as kernels read them: contiguous, and aligned as they need it."""

    def run(self, addresses: Sequence[int]) -> bool:
        """Launches all, for the address of each array. False if kernels found bad input."""

    def numbers(self) -> Sequence[int]:
        """The launches in the numbers that native.cpp reads of `OnCpu` or `OnCuda`."""


@dataclass(frozen=True)
class LaunchPlan:
    """What a call of known sizes launches on a device. Its arrays are numbered: inputs, results,
    those of the workspace.

    swapped: the inputs that are passed with their last two dimensions swapped; results: shape and
    dtype of each tensor that a call makes; outputs: which array each output is. until:
    the compilation of the kernels for these sizes, until which others run.
    """

    device: torch.device
    swapped: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    outputs: tuple[int, ...]
    workspace: Memory
    launches: Launches
    until: background.Started | None = None

    def run(
        self,
        tensors: Sequence[Tensor],
        also: Sequence[tuple[int, Sequence[int], torch.dtype]] = (),
    ) -> list[Tensor] | None:
        """The outputs: new, contiguous tensors that share no memory. None if the kernels found
        input for which the reference raises an error.

        also: arrays of the workspace with shape and dtype, to be returned after the outputs; they
        are valid until the next call.
        """
        inputs = list(tensors)
        for i in self.swapped:
            inputs[i] = inputs[i].mT
        arrays = self.launches.readable(inputs) + [
            torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.results
        ]
        held, inner = memory.allocate(self.workspace, self.device)  # kept until all are launched
        if not self.launches.run([*[t.data_ptr() for t in arrays], *inner]):
            return None
        outputs = [arrays[i] for i in self.outputs]
        for i, shape, dtype in also:
            offset = self.workspace.offsets[i - len(arrays)]
            outputs.append(memory.view(held, offset, shape, dtype))
        return outputs

    def numbers(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """The plan for C++; None if Python must launch such a call: while kernels are compiled, and
        if inputs would be copied first. tensors: in any shapes with the right elements.
        """
        if self.until or not all(
            (t.mT if i in self.swapped and t.dim() > 1 else t).is_contiguous()
            for i, t in enumerate(tensors)
        ):
            return None
        results = [self.outputs.index(len(tensors) + i) for i in range(len(self.results))]
        return [
            len(tensors),
            *counted(results),
            self.workspace.nbytes,
            *counted(self.workspace.offsets),
            *self.launches.numbers(),
        ]


def counted(numbers: Sequence[int]) -> list[int]:
    """The number of numbers, followed by the numbers."""
    return [len(numbers), *numbers]
