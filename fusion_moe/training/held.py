"""A quantized copy of a layer's weights, made in one call and read in later ones."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ..definitions.tensor_lists import flat
from ..errors import UnsupportedError
from ..ir import FusionDefinition, TensorType, dtype_name, one_line
from ..ir.kinds import eight_bits
from ..recipe import Float8BlockScaling
from .stages import Operand


class Held:
    """The parts of the copy. They keep their addresses, for captured graphs, as long as shapes and
    device stay the same. A copied or pickled module has none.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._parts: tuple[Tensor, ...] = ()

    def __deepcopy__(self, memo: Any) -> Held:
        return Held()

    def __reduce__(self) -> Any:
        return (Held, ())

    @_disable_dynamo
    def parts(
        self, weight: Operand, dtype: str, by: Float8BlockScaling, again: bool, where: str
    ) -> tuple[Operand, ...]:
        """Codes and block scales of a weight [G, N, K] in `dtype`, and of the transposed matrices:
        made now, or else before. UnsupportedError if there are none.
        """
        tensors, counts = flat([weight.tensor])
        key = by.activation_format, dtype, weight.shape, tensors[0].device
        if not again and key != self._key:
            raise UnsupportedError(
                "is_first_microbatch=False",
                expected="quantized weights of an earlier call, with this recipe, dtype and device",
                todo="pass True in the first call after weights change",
                where=where,
            )
        if again:
            stored = dtype_name(tensors[0].dtype)
            program = _program(stored, weight.shape, dtype, by.activation_format)
            with torch.no_grad():
                result = torch.ops.fusion_moe.run(program, tensors, [], None, counts)
                if key == self._key:
                    for part, new in zip(self._parts, result, strict=True):
                        part.copy_(new)
                else:
                    self._key, self._parts = key, tuple(result)
        return tuple(Operand(part, tuple(part.shape)) for part in self._parts)


@lru_cache(maxsize=256)
def _program(stored: str, shape: tuple[int, ...], dtype: str, activation_format: str) -> str:
    fd = FusionDefinition()
    weight = fd.ops.cast(fd.define_like(TensorType(shape, stored), "weight"), dtype=dtype)
    for part in eight_bits.copy_of_weight(fd, weight, activation_format):
        fd.add_output(part)
    return one_line(fd.fusion())
