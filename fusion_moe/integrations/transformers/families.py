"""What a class of transformers has for experts, and what it calls them in files: its own way of
saving is given small tensors whose numbers say where they are from.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from ...checkpoints import TEXT_MODEL, Directory
from ...checkpoints.families import Experts, Family, InFloats
from ...checkpoints.fused import FusedOrder
from ...errors import CheckpointError, UnsupportedError, in_one_line
from ...nn import ExpertsContract
from .config import set_quantization
from .loading import configuration, is_known, on_meta
from .names import live_names
from .on_load import layout_of

_HIDDEN, _INNER = 3, 2  # sizes of the small tensors: no two of rows and columns are alike


class _Part(NamedTuple):
    """A parameter of experts, in small. first: its first number; shape: [E, N, K] or [E, N], gate
    above up.
    """

    module: str
    projection: str
    first: int
    shape: tuple[int, ...]


def family_of(directory: Directory) -> Family | None:
    """None for a model_type that transformers does not know. UnsupportedError for a configuration
    of which there is no model, and for a class that stores experts in a way that is not described
    here.
    """
    where = str(directory.path)
    if not is_known(directory.config.get("model_type")):
        return None
    try:
        config = configuration(directory.path)
        set_quantization(config, None)
        for part in TEXT_MODEL:  # said of quantization alone, of a class without such a part
            if isinstance(vars(config).get(part), dict):
                delattr(config, part)
        model = on_meta(config, where)
    except CheckpointError as error:
        raise UnsupportedError(error.found, expected=error.expected, where=error.where) from None
    except (OSError, ImportError) as error:
        raise UnsupportedError(
            in_one_line(error), expected="a model of transformers", where=where
        ) from None
    in_model = live_names(model, directory.tensors)
    model._weight_conversions = [  # of prefixes those that the directory's names have
        c
        for c in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(c, PrefixChange)
        or any(c.rename_source_key(name)[0] != name for name in in_model)
    ]
    contracts = {n: c for n, m in model.named_modules() if (c := layout_of(m)) is not None}
    parts, state = list[_Part](), dict[str, Tensor]()
    for name, contract in contracts.items():
        for small, t in _small(name, contract, sum(t.numel() for t in state.values())):
            parts.append(small)
            key = small.projection
            state[f"{name}.{key}"] = t
            # what checks shapes compares with the parameter
            setattr(model.get_submodule(name), key, nn.Parameter(t.to("meta"), requires_grad=False))
    floats: dict[str, list[InFloats]] = {name: [] for name in contracts}
    for name, t in revert_weight_conversion(model, state).items():
        small = parts[bisect([p.first for p in parts], int(t.min())) - 1]
        floats[small.module].append(_described(name, t, small, where))
    layers = {
        name: Experts(
            _encoded(model, name),
            c.experts,
            c.hidden,
            c.intermediate,
            not c.concatenated,
            tuple(floats[name]),
        )
        for name, c in contracts.items()
    }
    ours = live_names(model, [t.name for each in floats.values() for t in each])
    theirs = {live: name for name, live in in_model.items()}
    there = {name: theirs[live] for name, live in ours.items() if live in theirs}
    return Family(layers, in_model, there)


def _encoded(model: Any, name: str) -> str:
    """What `save_pretrained` calls a module of experts that are stored one by one."""
    reverse = [
        c.reverse_transform()
        for c in model._weight_conversions[::-1]
        if isinstance(c, WeightRenaming)
    ]
    one = ".0.up_proj.weight"
    return rename_source_key(name + one, reverse, [])[0].removesuffix(one)


def _small(name: str, contract: ExpertsContract, first: int) -> Iterator[tuple[_Part, Tensor]]:
    """The parameters of a module, i64, in its own order."""
    e, runs = contract.experts, 1 + contract.has_gate
    shapes = ((e, runs * _INNER, _HIDDEN), (e, _HIDDEN, _INNER))
    for key in contract.names:
        up = key.startswith(contract.up_name)
        shape = shapes[not up][: 2 if key.endswith("_bias") else 3]
        part = _Part(name, key, first, shape)
        t = torch.arange(first, first := first + torch.Size(shape).numel()).view(shape)
        yield part, contract.view_of(key).pack(t)[0].contiguous()


def _described(name: str, t: Tensor, part: _Part, where: str) -> InFloats:
    """A tensor of files, by its numbers. UnsupportedError if it is no tensor of whole matrices."""
    bias, gated = len(part.shape) == 2, part.projection.startswith("gate_up")
    alone = t.dim() == len(part.shape) - 1
    rows, columns = (*part.shape[1:], 1)[:2]
    at = (t[None] if alone else t) - part.first
    transposed = not bias and bool((at[0, 0] // columns != at[0, 0, 0] // columns).any())
    at = at.mT if transposed else at
    experts = tuple(int(e) // (rows * columns) for e in at.flatten(1)[:, 0])
    of_rows = [int(i) // columns % rows for i in at[0].reshape(at.shape[1], -1)[:, 0]]
    half, projection = rows // 2, part.projection.removesuffix("_bias")
    every = [*range(rows)]
    ways = [(every, projection, False)]
    if gated:
        interleaved = [i for pair in zip(every[:half], every[half:], strict=True) for i in pair]
        ways += [
            (every[:half], "gate_proj", False),
            (every[half:], "up_proj", False),
            (interleaved, projection, True),
        ]
    way = next((way for way in ways if way[0] == of_rows), None)
    tensor = None
    if way is not None:
        order = FusedOrder(transposed, interleaved=way[2])
        tensor = InFloats(name, way[1], experts, order, bias, alone)
    if tensor is None or not _is_whole(tensor, t - part.first, part):
        raise UnsupportedError(
            f"{name} of {part.module}",
            expected="whole matrices of experts",
            todo="load the model: its class knows how it stores them",
            where=where,
        )
    return tensor


def _is_whole(tensor: InFloats, t: Tensor, part: _Part) -> bool:
    """Whether a tensor has exactly the numbers that its description says."""
    whole = torch.arange(torch.Size(part.shape).numel()).view(part.shape)
    half, parts = part.shape[1] // 2, {tensor.projection: whole}
    if part.projection.startswith("gate_up"):
        parts = {"gate_proj": whole[:, :half], "up_proj": whole[:, half:]}
    return all(torch.equal(one, parts[matrix][e]) for matrix, e, one in tensor.matrices(t))
