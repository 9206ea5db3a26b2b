"""gpt-oss in other formats than its own: vLLM's loader for this model skips tensors of experts that
it has no names for. So they are taken out of what it reads, and loaded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor
from vllm.model_executor.models.utils import WeightsMapper

_EXPERTS = ".experts."


class LoadsGptOss:
    """A configuration whose methods load the experts of gpt-oss."""

    @cached_property
    def gpt_oss(self) -> dict[str, Any]:
        """The layers to load, by name."""
        return {}

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """What vLLM passes all tensors of a checkpoint through."""
        return _Experts(super().get_checkpoint_weight_mapper(), self.gpt_oss)  # type: ignore[misc]


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
        return self._layers.get(named[0].partition(_EXPERTS)[0] + ".experts")
