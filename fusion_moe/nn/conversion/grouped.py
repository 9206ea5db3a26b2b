"""Linear layers over groups of rows of any class, found by what they hold and compute, not by name.

A module qualifies if all it holds is one 3-D weight, and perhaps a bias [G, N], and it is called
with rows and offsets. A run on a few rows says how it reads both; it must agree with the product.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...encodings import has_values, is_dtensor
from ..config import QuantizationConfig
from ..frozen import NVFP4GroupedLinear

_NEAR = 0.02  # relative error of a product in 16 bits


@dataclass(frozen=True)
class GroupedContract:
    """How a module holds weight and offsets. transposed: [G, K, N], as in `rows @ weight`; starts:
    offsets are the first rows of groups, not where they end.
    """

    weight: str
    bias: str | None
    transposed: bool
    starts: bool

    def converted(self, module: nn.Module, config: QuantizationConfig) -> NVFP4GroupedLinear:
        """The module that replaces it; offsets stay what they are."""
        weight = _rows_out(module.get_parameter(self.weight).detach(), self.transposed)
        bias = None if self.bias is None else module.get_parameter(self.bias).detach()
        result = NVFP4GroupedLinear.from_float(
            weight, bias, config.activation_format, config.scales
        )
        result.starts, result.transposed = self.starts, self.transposed
        result.renamed = {self.weight: "weight"} | ({self.bias: "bias"} if self.bias else {})
        return result


_KNOWN: WeakKeyDictionary[nn.Module, GroupedContract | None] = WeakKeyDictionary()


def grouped_contract_of(module: nn.Module) -> GroupedContract | None:
    """The contract of a grouped linear layer; None for any other module, and for weights without
    values, of which nothing can be computed.
    """
    if module not in _KNOWN:
        _KNOWN[module] = _probed(module)
    return _KNOWN[module]


def _probed(module: nn.Module) -> GroupedContract | None:
    names = _names(module)
    if names is None:
        return None
    weight = module.get_parameter(names[0]).detach()
    if not has_values(weight) or not weight.is_floating_point() or not weight.numel():
        return None
    bias = None if names[1] is None else module.get_parameter(names[1]).detach()
    ways = [GroupedContract(*names, t, s) for t in (False, True) for s in (False, True)]
    fitting = [way for way in ways if _agrees(module, way, weight, bias)]
    return fitting[0] if len(fitting) == 1 else None


def _names(module: nn.Module) -> tuple[str, str | None] | None:
    """The names of weight and bias of a module that holds nothing else, called with two things."""
    held = [*module.named_parameters(), *module.named_buffers()]
    weights = [name for name, t in held if t.dim() == 3]
    biases = [name for name, t in held if t.dim() == 2 and "bias" in name]
    if len(weights) != 1 or len(weights) + len(biases) != len(held) or len(biases) > 1:
        return None
    if any(is_dtensor(t) for _, t in held) or any(module.children()):
        return None
    taken = inspect.signature(module.forward).parameters.values()
    needed = [p for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return (weights[0], next(iter(biases), None)) if len(needed) == len(taken) == 2 else None


def _agrees(module: nn.Module, way: GroupedContract, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a run on a few rows of up to three groups gives what this contract says."""
    matrices = _rows_out(weight, way.transposed)
    groups, n, k = matrices.shape
    if bias is not None and bias.shape != (groups, n):
        return False
    sizes = torch.zeros(groups, dtype=torch.int32)
    for g, rows in (0, 2), (groups // 2, 1), (groups - 1, 2):
        sizes[g] += rows
    ends = sizes.cumsum(0, dtype=torch.int32)
    of_rows = torch.arange(groups).repeat_interleave(sizes)
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(len(of_rows), k, generator=drawn).to(weight)
    want = torch.stack(
        [
            matrices[g].float() @ row.float() + (0 if bias is None else bias[g].float())
            for g, row in zip(of_rows.tolist(), x, strict=True)
        ]
    )
    try:
        with torch.no_grad():
            y = module(x, (ends - sizes if way.starts else ends).to(weight.device))
    except Exception:  # whatever the module makes of offsets that are none to it
        return False
    if not isinstance(y, Tensor) or y.shape != want.shape:
        return False
    return bool((y.float() - want).norm() <= _NEAR * want.norm()) and bool(want.norm() > 0)


def _rows_out(weight: Tensor, transposed: bool) -> Tensor:
    """[G, N, K]"""
    return weight.mT if transposed else weight
