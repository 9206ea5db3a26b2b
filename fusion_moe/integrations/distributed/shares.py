"""A rank's share of an expert module: whole experts, or rows and columns of all of them.

Letters: E experts, H hidden, I intermediate features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...encodings import ROW
from ...lora.adapter import adapters_of
from ...nn import Experts, contract_of
from ...nn.frozen import Projections
from .states import ExpertShards, FeatureShards, expert_shard


def whole_experts_of(count: int, rank: int, ranks: int) -> range:
    """A rank's part of `count` experts, as by DTensor's Shard(0): equally many, but the last ranks
    may have fewer or none.
    """
    each = math.ceil(count / ranks)
    return range(min(rank * each, count), min((rank + 1) * each, count))


def experts_of(module: nn.Module) -> int:
    """E of a module that `parallelize_` supports."""
    if isinstance(module, Projections):
        return module.shape_of("down")[0]
    contract = contract_of(module)
    return contract.experts if contract else 0


def keep_experts(module: nn.Module, rank: int, ranks: int) -> None:
    """Plan "ep": keeps whole experts, copied to new memory. Ids still count all experts."""
    kept = whole_experts_of(experts_of(module), rank, ranks)
    for holder, names in _holders(module):
        for name in names:
            _replace(holder, name, getattr(holder, name).detach()[kept.start : kept.stop].clone())
    module.first_expert = kept.start  # type: ignore[assignment]
    if isinstance(module, Projections) and isinstance(module.sharding, FeatureShards):
        module.sharding.keep(kept)


def shard_experts(module: nn.Module, mesh: DeviceMesh, experts: int) -> None:
    """Makes DTensors of what trains: experts in floats, and adapters. In state dicts, encoded
    weights are DTensors too.
    """
    for holder, names in _holders(module):
        if isinstance(holder, Projections):
            first = holder.first_expert or 0
            kept = range(first, first + len(holder.down_proj))
            holder.reform(share=ExpertShards(mesh, kept, experts))
            continue
        for name in names:
            shard = expert_shard(holder.get_parameter(name).detach(), mesh, experts)
            _replace(holder, name, shard)


def _replace(holder: nn.Module, name: str, t: Tensor) -> None:
    """Puts t in the place of a parameter, whose `requires_grad` stays, or of a buffer."""
    old = getattr(holder, name)
    is_parameter = isinstance(old, nn.Parameter)
    setattr(holder, name, nn.Parameter(t, old.requires_grad) if is_parameter else t)


def _holders(module: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """The modules that have tensors [E, ...], and the names of these."""
    if not isinstance(module, Projections):
        contract = contract_of(module)
        return [(module, list(contract.names) if contract else [])]
    names = [
        name
        for name, t in (*module._parameters.items(), *module._buffers.items())
        if t is not None and t.dim() > 0
    ]
    return [(module, names), *((adapter, ["A", "B"]) for _, adapter in adapters_of(module))]


def columns(module: Experts) -> int:
    """What a share's number of features is a multiple of in plan "tp": blocks of down along I, and
    of alternating gate and up rows. All of them, if a scale is for a row.
    """
    of_rows = any(scale.block == ROW for scale in module.encoding.scales)
    block = module.shape_of("down")[-1] if of_rows else module.encoding.block
    return math.lcm(block, module.interleave or 1)


def keep_features(module: Experts, rank: int, ranks: int) -> None:
    """Plan "tp": keeps the rows of gate and up and the columns of down for some features of all
    experts. down's bias: on rank 0 only.
    """
    module.reform(layout="linear", device=None)  # its rows and columns are divided
    step = columns(module)
    experts, _, intermediate = module.shape_of("down")
    blocks = intermediate // step  # ranks have equally many, or one more
    features = range(blocks * rank // ranks * step, blocks * (rank + 1) // ranks * step)
    first = module.projections[0]
    rows = _rows(intermediate, features, 2 if first == "gate_up" else 1, module.interleave)
    share = FeatureShards(first, experts, intermediate, features, rows, rank == 0)
    weights = ((module.part_names[name], module.weight_of(name)) for name in module.projections)
    module._set_weights(*(w.of(map(share.cut, names, w)) for names, w in weights))
    for name in (*module.castable, "activation_parameters"):
        if (t := getattr(module, name)) is not None:
            _replace(module, name, share.cut(name, t.detach()))
    module.reform(share=share)


def _rows(intermediate: int, features: range, parts: int, interleave: int) -> Tensor:
    """The rows of the first projection, out of parts * I, for some features."""
    block = interleave or intermediate
    blocks = torch.arange(parts * intermediate, device="cpu").view(-1, parts, block)
    # the rows of all parts for each feature
    rows = blocks.transpose(1, 2).reshape(-1, parts)[features.start : features.stop]
    return rows.view(-1, interleave or len(rows), parts).transpose(1, 2).flatten()
