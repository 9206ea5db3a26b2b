"""What vLLM's loaders have no names for, taken out of what they read: gpt-oss in other formats than
its own, and Llama-4 in ModelOpt's NVFP4, which are loaded here; and experts in floats, as a trainer
has them, which are rounded to what a running engine serves and go on in the form of its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import WeightsMapper

from ...checkpoints import own_entries
from ...encodings import FLOATS, check_finite, quantize_weight
from ..serving import Named

_EXPERTS = ".experts."


class LoadsExperts(Named):
    """A configuration whose methods load tensors in place of vLLM (`ExpertsMethod.loads`), or round
    them. scales: by which rule.
    """

    scales = "max"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """vLLM's configuration of a quantized directory, with the rule by which its scales were
        chosen in `scales` ("max" if the directory says none): new weights are rounded by it.
        """
        made = super().from_config(config)  # type: ignore[misc]
        made.scales = own_entries(config).get("scales", "max")
        return made

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
        return self._mapper.apply(self._others(self._rounded(weights)))

    def _rounded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        gathered: dict[tuple[Any, ...], _Gathered] = {}
        for name, t in weights:
            before, _, expert = name.partition(_EXPERTS)
            layer = self._layers.get(f"{before}.experts")
            if layer is None or layer.quant_method.loads(layer, expert):
                yield name, t
            elif place := _place(layer, expert, t):
                weight, *where = place
                key = before, weight, t.dtype, t.device
                of_all = gathered.setdefault(key, _Gathered(layer.quant_method.whole(weight)))
                if of_all.add(expert, where, t):
                    layer.quant_method.renew_(layer, weight, gathered.pop(key).values)
            elif not layer.quant_method.renew_(layer, expert, t):
                yield from _named(before, rounded(layer, [(expert, t)]))
        for (before, *_), of_some in gathered.items():
            yield from _named(before, rounded(self._layers[f"{before}.experts"], of_some.matrices))

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


def _named(before: str, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, t in tensors:
        yield f"{before}{_EXPERTS}{name}", t


class _Gathered:
    """A weight of all experts, of whose matrices some have come: copies, as a trainer may use a
    tensor again. vLLM's loader would take about 0.3 ms for each.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self._places = shape, dict[str, tuple[int, int, int]]()
        self.values = torch.empty(0)

    def add(self, name: str, where: Sequence[int], t: Tensor) -> bool:
        """Whether all are there with this one, which begins at a row of an expert."""
        if not self._places:
            self.values = t.new_empty(self.shape)
        expert, row = where
        self._places[name] = expert, row, len(t)
        self.values[expert, row : row + len(t)].copy_(t)
        return len(self._places) * len(t) == self.shape[0] * self.shape[1]

    @property
    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Those that have come, by their names."""
        for name, (expert, row, rows) in self._places.items():
            yield name, self.values[expert, row : row + rows]


def _place(layer: Any, name: str, t: Tensor) -> tuple[str, int, int] | None:
    """Where a matrix of one expert, in floats, is in a weight of all: its name, the expert, the
    first row. None for a tensor that vLLM loads.
    """
    method = layer.quant_method
    expert, _, projection = name.removesuffix(".weight").rpartition(".")
    if not expert.isdigit() or t.dim() != 2 or not is_rounded(method, name, t):
        return None
    gate, up, down = (getattr(layer, f"ckpt_{p}_proj_name") for p in ("gate", "up", "down"))
    first, second = (f"{p}_proj" for p in method.kept.module.projections)
    parts = [down] if projection == down else [gate, up][-method.moe.w13_num_shards :]
    weight = second if projection == down else first
    experts, rows, columns = method.whole(weight) or (0, 0, 0)
    if projection not in parts or int(expert) >= experts:
        return None
    if t.shape != (rows // len(parts), columns):
        return None
    return weight, int(expert), parts.index(projection) * len(t)


_FUSED = "gate_up_proj", "up_proj", "down_proj"


def is_rounded(method: Any, name: str, t: Tensor) -> bool:
    """Whether a tensor is a weight in floats for experts that are served in an encoding."""
    return (
        method.kept is not None
        and not method.scheme.own_encoding.plain
        and method.moe.activation.value != "swigluoai"
        and t.dtype in FLOATS
        and (name.endswith(".weight") or name in _FUSED)
    )


def rounded(layer: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a layer by their names after "experts.", those in floats in the form of files if
    the layer is served already. A weight is [N, K] of one expert or [E, N, K] of all, gate above
    up.

    Rounded by the rule for scales that the directory names. NonFiniteError for NaN and infinity.
    """
    for name, t in tensors:
        if is_rounded(layer.quant_method, name, t):
            yield from _parts(layer, name, t)
        else:
            yield name, t


def _parts(layer: Any, name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of each matrix, by the names that files have for them."""
    method = layer.quant_method
    check_finite(t, method.scheme.own_encoding, f"{layer.layer_name}.{name}")
    projections, first = [name.removesuffix(".weight").rpartition(".")[2]], 0
    if name in _FUSED:
        gate, up, down = (getattr(layer, f"ckpt_{p}_proj_name") for p in ("gate", "up", "down"))
        projections = {"gate_up_proj": [gate, up], "up_proj": [up], "down_proj": [down]}[name]
    else:
        first, t = int(name.partition(".")[0]), t[None]
    for projection, matrices in zip(projections, t.chunk(len(projections), 1), strict=True):
        weight = quantize_weight(
            matrices.contiguous(), method.scheme.own_encoding, scales=layer.quant_config.scales
        )
        for i in range(len(t)):
            one = f"{first + i}.{projection}"
            for stored, part in zip(method.scheme.parts, weight, strict=True):
                yield f"{one}{stored.suffix}", stored.from_part(part[i])
            for unread in method.unread:  # numbers that vLLM waits for
                if unread != "weight_shape":
                    yield f"{one}.{unread}", torch.ones(())
                elif projection != layer.ckpt_up_proj_name or method.moe.w13_num_shards == 1:
                    yield f"{one}.{unread}", torch.tensor(matrices.shape[1:])  # for gate and up one
