"""gpt-oss in other formats than its own, and Llama-4 in ModelOpt's NVFP4: vLLM's loaders for these
models have no names for all tensors of experts. So these are taken out of what they read, and
loaded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor
from vllm.model_executor.models.utils import WeightsMapper

from ..serving import Named

_EXPERTS = ".experts."


class LoadsExperts(Named):
    """A configuration whose methods load tensors in place of vLLM (`ExpertsMethod.loads`)."""

    @cached_property
    def experts(self) -> dict[str, Any]:
        """The layers of experts, by name."""
        return {}

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """What vLLM passes all tensors of a checkpoint through."""
        return _Experts(super().get_checkpoint_weight_mapper(), self.experts)  # type: ignore[misc]


class _Experts(WeightsMapper):
    """Loads the tensors of some layers, and leaves the others to another mapper. vLLM joins it with
    mappers on either side.
    """

    def __init__(self, mapper: WeightsMapper, layers: dict[str, Any]):
        super().__init__(**vars(mapper))
        self._mapper, self._layers = mapper, layers

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        return _Experts(self._mapper | other, self._layers)

    def __ror__(self, other: WeightsMapper) -> WeightsMapper:
        return _Experts(other | self._mapper, self._layers)

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return self._mapper.apply(self._others(weights))

    def _others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for layer, tensors in groupby(weights, self._layer):
            if layer is None:
                yield from tensors
            else:
                layer.quant_method.load(layer, ((n.split(_EXPERTS)[1], t) for n, t in tensors))

    def _layer(self, named: tuple[str, Tensor]) -> Any:
        before, _, name = named[0].partition(_EXPERTS)
        layer = self._layers.get(f"{before}.experts")
        return layer if layer is not None and layer.quant_method.loads(layer, name) else None
