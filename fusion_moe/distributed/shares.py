"""What a rank keeps of a module of experts: whole experts, or rows and columns of all of them.

Letters: E experts, H hidden, I intermediate features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..encodings import Quantized
from ..nn import Experts
from ..nn.contract import contract_of
from ..nn.lora import adapters_of
from ..nn.packed import relayout_
from ..nn.projections import Projections


def share(count: int, rank: int, ranks: int) -> range:
    """A rank's part of `count` things, one after the other, sizes differ by one at most."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def owner_of(ids: Tensor, count: int, ranks: int) -> Tensor:
    """int -> i64, the rank whose `share` of `count` things has each id; `ranks` for ids of nothing.

    >>> [share(7, rank, 3) for rank in range(3)], owner_of(torch.arange(-1, 8), 7, 3).tolist()
    ([range(0, 2), range(2, 4), range(4, 7)], [3, 0, 0, 1, 1, 2, 2, 2, 3])
    """
    there = (ids >= 0) & (ids < count)
    return torch.where(there, ((ids.long() + 1) * ranks - 1) // count, ranks)


def experts_of(module: nn.Module) -> int:
    """E of a module that parallelize_ knows."""
    contract = contract_of(module)
    return module.shape_of("down")[0] if isinstance(module, Projections) else contract.experts if contract else 0


def keep_experts(module: nn.Module, rank: int, ranks: int) -> None:
    """Plan "ep": whole experts, in memory of their own. Ids stay those of all experts."""
    kept = share(experts_of(module), rank, ranks)
    holders: list[tuple[nn.Module, list[str]]] = [(module, _weights_of(module))]
    if isinstance(module, Projections):
        holders += [(adapter, ["A", "B"]) for _, adapter in adapters_of(module)]
    for holder, names in holders:
        for name in names:
            p = holder.get_parameter(name)
            setattr(holder, name, nn.Parameter(p.detach()[kept.start : kept.stop].clone(), requires_grad=p.requires_grad))
    module.first_expert = kept.start  # type: ignore[assignment]


def _weights_of(module: nn.Module) -> list[str]:
    """The names of a module's parameters [E, ...]."""
    contract = contract_of(module)
    if isinstance(module, Projections) or contract is None:
        return [name for name, _ in module.named_parameters(recurse=False)]
    return list(contract.names)


def columns(module: Experts) -> int:
    """What the features of a share are a multiple of, in plan "tp": blocks of down along I, and of gate and up rows in turns."""
    return math.lcm(module.encoding.block, module.interleave or 1)


def keep_features(module: Experts, rank: int, ranks: int) -> None:
    """Plan "tp": of every expert the rows of gate and up, and the columns of down, of some intermediate features. down's bias: rank 0."""
    relayout_(module, "linear")  # its rows and columns are divided
    module.considered = False
    up, down = (module.weight_of(name) for name in module.projections)
    step = columns(module)
    kept = share(down.shape[-1] // step, rank, ranks)
    features = range(kept.start * step, kept.stop * step)
    rows = _rows(down.shape[-1], features, module.interleave).to(up.device)
    module._set_weights(_rows_of(up, rows), _columns_of(down, features))
    if (bias := module.gate_up_proj_bias) is not None:
        module.gate_up_proj_bias = nn.Parameter(bias.detach()[:, rows], requires_grad=False)
    if (bias := module.down_proj_bias) is not None and rank > 0:
        module.down_proj_bias = nn.Parameter(torch.zeros_like(bias), requires_grad=False)


def _rows(intermediate: int, features: range, interleave: int) -> Tensor:
    """The rows of gate_up, of 2I, that make some features."""
    block = interleave or intermediate
    blocks = torch.arange(2 * intermediate).view(-1, 2, block)
    pairs = blocks.transpose(1, 2).reshape(-1, 2)[features.start : features.stop]  # gate's and up's row of each feature
    return pairs.view(-1, interleave or len(pairs), 2).transpose(1, 2).flatten()


def _rows_of(w: Quantized, rows: Tensor) -> Quantized:
    """Rows of [E, N, K]. Scales of runs of rows become those of fewer rows in each run, or of each row if they do not divide anew."""
    return w.of(_runs_of(t, w.shape[1], rows) if part.of_matrix else _bytes(t)[:, rows].view(t.dtype) for part, t in w.named())


def _runs_of(scale: Tensor, n: int, rows: Tensor) -> Tensor:
    """scale [E], or [E, S] for S runs of n rows -> the same for some of these rows."""
    if scale.dim() == 1:
        return scale.clone()
    run = rows // (n // scale.shape[1])
    if len(rows) % scale.shape[1] == 0:
        new = run.view(scale.shape[1], -1)
        if bool((new == new[:, :1]).all()):
            run = new[:, 0]
    return scale[:, run]


def _columns_of(w: Quantized, features: range) -> Quantized:
    """Columns of [E, N, K], whole blocks of them."""
    k = w.shape[-1]

    def of(part: Any, t: Tensor) -> Tensor:
        if part.of_matrix:
            return t.clone()
        per_item = k // t.shape[-1]
        return t[..., features.start // per_item : features.stop // per_item].contiguous()

    return w.of(of(part, t) for part, t in w.named())


def _bytes(t: Tensor) -> Tensor:
    """torch selects no rows of some dtypes of eight bits."""
    return t.view(torch.uint8) if t.element_size() == 1 else t
