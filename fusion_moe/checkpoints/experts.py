"""Experts in files: which names belong to the experts of one layer, and in which order.

    …experts.3.gate_proj, up_proj, down_proj      a matrix for each expert; w1, w3, w2 in Mixtral
                                                  and others
    …experts.gate_up_proj, down_proj              one tensor for all experts; up_proj without a
                                                  gate

Every expert from 0 to E - 1 has the same projections. What else classes call tensors of experts,
they say themselves (families.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import CheckpointError
from .configurations import TEXT_MODEL
from .headers import shown

T = TypeVar("T")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # entries of config.json
# gate, up and down by either name
PER_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_SAME = dict(zip(PER_EXPERT[1], PER_EXPERT[0], strict=True))
_ONE = re.compile(
    r"(?P<layer>.*\bexperts)\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)"
)
_LAYER, _MTP = re.compile(r"\blayers\.(\d{1,9})\."), re.compile(r"\bmtp(_|\b)")
_CANONICAL = re.compile("0|[1-9][0-9]*")
_FUSED = re.compile(r"(?P<layer>.*\bexperts)\.(?P<projection>gate_up_proj|up_proj|down_proj)")


@dataclass(frozen=True)
class LayerExperts:
    """The tensors of the experts of one layer, as files name them.

    name: the part before the experts' numbers; projections: for "gate_proj", "up_proj", "down_proj"
    ("gate_up_proj" if both are one tensor), the names of weights in the order of experts, or the
    single name of a fused tensor.
    """

    name: str
    projections: Mapping[str, tuple[str, ...]]
    fused: bool = False

    @property
    def experts(self) -> int | None:
        """How many experts there are; None if fused: then the tensors say it."""
        return None if self.fused else len(next(iter(self.projections.values())))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all weights of the layer's experts in files."""
        return tuple(name for names in self.projections.values() for name in names)


def parts_of(config: Mapping[str, Any], name: str = "") -> list[Mapping[str, Any]]:
    """The parts of config.json that may describe the module of a tensor: of a tower, the one that
    its name begins as, `vision_config` for `vision_tower…` or `visual…`; of all else the text model
    and the whole.
    """
    words = name.split(".")
    for key, part in config.items():
        begins = key.removesuffix("_config")[:3]
        tower = key.endswith("_config") and isinstance(part, Mapping)
        if tower and any(word.startswith(begins) for word in words):
            return parts_of(part, name)
    return [*(part for key in TEXT_MODEL if isinstance(part := config.get(key), Mapping)), config]


def experts_of(config: Mapping[str, Any], name: str = "") -> int | None:
    """How many experts a layer has, by config.json; None if it does not say. name: the layer's, or
    that of a tensor in it, for a model with several towers; "" for the text model.
    """
    return number(config, name, COUNTS)


def hidden_layers_of(config: Mapping[str, Any], name: str = "") -> int | None:
    """How many layers a model has, or its tower with a tensor of this name, by config.json, without
    those that predict further tokens; None if it does not say.
    """
    return number(config, name, ("num_hidden_layers",))


def predicts_further_tokens(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to multi-token prediction (MTP): a module `mtp…`, or a layer beyond
    those that config.json counts.
    """
    layer, hidden_layers = _LAYER.search(name), hidden_layers_of(config, name)
    return bool(_MTP.search(name)) or (
        layer is not None and hidden_layers is not None and int(layer[1]) >= hidden_layers
    )


def number(config: Mapping[str, Any], name: str, keys: Iterable[str]) -> int | None:
    """The first of some entries of config.json that is an integer, for the module of a tensor."""
    results = (part.get(key) for part in parts_of(config, name) for key in keys)
    return next((value for value in results if type(value) is int), None)


def expert_of(name: str) -> tuple[str, str, int] | None:
    """The layer, the projection and the number of the expert whose weight has this name; None for
    other weights.

    CheckpointError for a number that is not written as usual: 01 would be expert 1 again.
    """
    match = _ONE.fullmatch(name)
    if match is None:
        return None
    if not _CANONICAL.fullmatch(match["expert"]):
        raise CheckpointError(
            f"expert {match['expert']}",
            expected="a number in digits 0 to 9, without leading zeros",
            where=name,
        )
    return match["layer"], _SAME.get(match["projection"], match["projection"]), int(match["expert"])


def layers_of_experts(
    weights: Iterable[str], experts: int | Mapping[str, Any] | None = None
) -> dict[str, LayerExperts]:
    """The layers of experts among weight names (without `.weight` or another suffix), by name.
    experts: how many each layer has, or the config.json that says it.

    CheckpointError if experts are missing or there twice, have other projections than the rest, or
    are stored in both ways, and as from `expert_of`.
    """
    single: dict[str, dict[str, dict[int, str]]] = {}
    fused: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in weights:
        first = name
        if (one := expert_of(name)) is not None:
            where, projection, expert = one
            first = single.setdefault(where, {}).setdefault(projection, {}).setdefault(expert, name)
        elif match := _FUSED.fullmatch(name):
            where = match["layer"]
            (first,) = fused.setdefault(where, {}).setdefault(match["projection"], (name,))
        if first != name:
            raise CheckpointError(f"{first} and {name}", expected="one of the two", where=where)
    if both := single.keys() & fused.keys():
        raise CheckpointError(
            "experts one by one, and all in one tensor", expected="one of the two", where=min(both)
        )
    layers = {
        name: LayerExperts(name, _in_order(name, projections))
        for name, projections in single.items()
    }
    for layer in layers.values():
        wanted = experts_of(experts, layer.name) if isinstance(experts, Mapping) else experts
        if wanted not in (None, layer.experts):
            raise CheckpointError(
                f"{layer.experts} experts",
                expected=f"{shown(wanted)}, by config.json",
                where=layer.name,
            )
    return layers | {
        name: LayerExperts(name, _sorted(projections), fused=True)
        for name, projections in fused.items()
    }


def _in_order(
    layer: str, projections: Mapping[str, Mapping[int, str]]
) -> dict[str, tuple[str, ...]]:
    """The names of each projection by the number of the expert."""
    experts = 1 + max(e for of in projections.values() for e in of)
    if not {"up_proj", "down_proj"} <= projections.keys():
        raise CheckpointError(
            f"{', '.join(_sorted(projections))} alone",
            expected="up_proj and down_proj, or w3 and w2, of each expert",
            where=layer,
        )
    for projection, of in _sorted(projections).items():
        if missing := experts - len(of):  # a number may be beyond any memory
            first = next(e for e in range(experts) if e not in of)
            more = f" and {missing - 1} more" if missing > 1 else ""
            raise CheckpointError(
                f"no {projection} of expert {first}{more}",
                expected=f"all experts from 0 to {experts - 1}",
                where=layer,
            )
    return {
        projection: tuple(of[e] for e in range(experts))
        for projection, of in _sorted(projections).items()
    }


def _sorted(projections: Mapping[str, T]) -> dict[str, T]:
    order = ("gate_up_proj", *PER_EXPERT[0])
    return {name: projections[name] for name in order if name in projections}
