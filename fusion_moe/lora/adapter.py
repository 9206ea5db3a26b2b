"""LoRA: low-rank adapters beside the frozen weights of experts. Only the adapters train.

    y = W x + (alpha / rank) B (A x)        for each expert, both products added in float32

Letters: E experts, r rank, N out-features, K in-features. Source: LoRA (Hu et al., 2021); initial
values, and the choice of what trains, follow PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import plugins
from ..errors import (
    DtypeError,
    OptionError,
    UnsupportedError,
    need_one_of,
)
from ..nn.checks import FLOAT_DTYPES
from ..nn.frozen import AdaptableModule
from ..nn.local import local

TARGETS = ("gate_up", "down", "linear")
Filter = Callable[[nn.Module, str], bool]


class Adapter(nn.Module):
    """The term that is added to the weight [E, N, K] of a projection: alpha / rank times B @ A.

    Parameters: A float[E, r, K], uniform in -1 / sqrt(K) .. 1 / sqrt(K), and B float[E, N, r],
    zero, so that it adds nothing at first.
    """

    disabled = False

    def __init__(
        self,
        shape: Sequence[int],
        rank: int,
        alpha: float,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """shape: E, N and K of the weight."""
        super().__init__()
        experts, n, k = shape
        self.alpha = alpha
        self.A = nn.Parameter(torch.empty(experts, rank, k, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.zeros(experts, n, rank, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.A.flatten(0, 1), a=math.sqrt(5))

    @property
    def rank(self) -> int:
        """How many features lie between A and B."""
        return self.A.shape[1]

    @property
    def scale(self) -> float:
        """The factor of B @ A: alpha / rank."""
        return self.alpha / self.rank

    def fill_(self, a: Tensor, b: Tensor) -> None:
        """Takes A and B [E, ...], or the parts of them that are this rank's."""
        with torch.no_grad():
            local(self.A).copy_(a)
            local(self.B).copy_(b)

    def delta(self, expert: int) -> Tensor:
        """float32 [N, K]: the term that is added to the weight of an expert; counted among the
        experts on this rank.
        """
        return self.scale * (
            local(self.B)[expert].detach().float() @ local(self.A)[expert].detach().float()
        )

    def extra_repr(self) -> str:
        """What print(model) shows of the adapter."""
        experts, rank, k = self.A.shape
        return (
            f"experts={experts}, in_features={k}, out_features={self.B.shape[1]}, rank={rank}, "
            f"alpha={self.alpha}"
        )


def add_lora_(
    model: nn.Module,
    rank: int = 16,
    alpha: float = 32,
    targets: Iterable[str] = TARGETS,
    *,
    dtype: torch.dtype = torch.float32,
    filter_fn: Filter | None = None,
) -> list[str]:
    """Adds adapters to the experts of a model, in place, and freezes everything else: only A and B
    train, as with PEFT.

    Experts are modules of fusion_moe.nn, quantized (`quantize_`) or float. A model that has
    adapters already was frozen then, and what trains in it goes on training. In a model that PEFT
    has adapted, they become part of PEFT's adapter. To train anything else, call
    `requires_grad_()` on it afterwards.

    Args:
        model: the model.
        rank: the number of features between A and B.
        alpha: an adapter adds alpha / rank * B @ A to its weight.
        targets: "gate_up": the first projection (`up` if there is no gate); "down"; "linear": any
            NVFP4GroupedLinear outside of a GroupedSwiGLU.
        dtype: of A and B, float32 as in PEFT; products are computed in the dtype of activations.
        filter_fn: filter_fn(module, name) chooses experts; None: all are adapted.

    Returns:
        The names of the modules that it adapted.

    Raises:
        UnsupportedError: for a model without experts or without these targets, or with adapters
            already.
        OptionError: for an invalid rank, alpha or target.
        DtypeError: for an integer dtype.

    An error comes before anything changes.
    """
    modules = adaptable(model, "add_lora_", filter_fn)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank <= 0:
        raise OptionError(f"rank = {rank!r}", expected="a positive integer", where="add_lora_")
    if not is_alpha(alpha):
        raise OptionError(
            f"alpha = {alpha!r}", expected="a finite number in float32", where="add_lora_"
        )
    need_float(dtype, "add_lora_")
    chosen = (targets,) if isinstance(targets, str) else tuple(targets)
    for target in chosen:
        need_one_of("targets", target, TARGETS, where="add_lora_")
    need_unadapted(modules, "add_lora_")
    places = _places(modules, chosen)
    adapt_(model, places, rank, float(alpha), dtype)
    return [f"{name}.{projection}" if name else projection for name, projection in places]


def _places(
    modules: Mapping[str, AdaptableModule], targets: Sequence[str]
) -> list[tuple[str, str]]:
    """The names of modules, each with a projection that the targets name. UnsupportedError if there
    are none.
    """
    known = [
        (name, p, target)
        for name, module in modules.items()
        for p, target in zip(module.projections, module.targets, strict=True)
    ]
    places = [(name, projection) for name, projection, target in known if target in targets]
    if not places:
        there = ", ".join(dict.fromkeys(target for _, _, target in known))
        raise UnsupportedError(
            f"no {' or '.join(targets) or 'targets'} among the experts",
            expected=f"targets of these: {there}",
            where="add_lora_",
        )
    return places


def adaptable(
    model: nn.Module, where: str, filter_fn: Filter | None = None
) -> dict[str, AdaptableModule]:
    """The modules that can have adapters, by name. UnsupportedError if there are none."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"a {type(model).__name__}", expected="a torch.nn.Module with experts", where=where
        )
    known = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, AdaptableModule)
    }
    modules = {
        name: module
        for name, module in known.items()
        if filter_fn is None or filter_fn(module, name)
    }
    if not modules:
        raise UnsupportedError(
            "filter_fn rejected all experts"
            if known
            else (f"no experts of fusion_moe.nn in a {type(model).__name__}"),
            expected="at least one module of them",
            todo="" if known else "quantize_(model) first",
            where=where,
        )
    return modules


def is_alpha(value: object) -> bool:
    """Whether a value is a number that is finite in float32, in which alpha / rank multiplies."""
    return isinstance(value, (int, float)) and abs(value) <= torch.finfo(torch.float32).max


def need_float(dtype: torch.dtype, where: str) -> None:
    """DtypeError for one that adapters do not have."""
    if dtype not in FLOAT_DTYPES:
        raise DtypeError(
            f"dtype = {dtype}",
            expected=f"one of {', '.join(map(str, FLOAT_DTYPES))}",
            where=where,
        )


def need_unadapted(modules: Mapping[str, AdaptableModule], where: str) -> None:
    """UnsupportedError if one of the modules has an adapter or cannot have one."""
    for name, module in modules.items():
        if module.fixed and module.adapters_on is None:
            raise UnsupportedError(f"adapters for {name}", expected=module.fixed, where=where)
        if module.sharding is not None and not module.sharding.adaptable:
            raise UnsupportedError(
                f"{name or type(module).__name__} has a part of each expert's features",
                expected="whole experts",
                todo="parallelize_(model, mesh, plan='ep')",
                where=where,
            )
        if module.adapted:
            raise UnsupportedError(
                f"{name or type(module).__name__} has adapters already",
                todo="train these, also after load_lora_; for other ones, first call "
                "remove_lora_(model), or what removes them in the library that added them",
                where=where,
            )


def adapt_(
    model: nn.Module,
    places: Sequence[tuple[str, str]],
    rank: int,
    alpha: float,
    dtype: torch.dtype,
) -> Sequence[Any]:
    """Adds adapters to weights, each named by a module and a projection of it. The first ones in a
    model freeze all else.
    """
    for add in plugins.adapt:
        if (added := add(model, places, rank, alpha, dtype)) is not None:
            return added
    if not any(isinstance(module, Adapter) for module in model.modules()):
        model.requires_grad_(False)
    modules = dict(model.named_modules())
    return [_adapter(modules[name], p, rank, alpha, dtype) for name, p in places]


def _adapter(
    module: AdaptableModule, projection: str, rank: int, alpha: float, dtype: torch.dtype
) -> Adapter:
    """Adds an adapter to a projection, where it computes; beside a rank's share of experts, a
    share of the adapters of all experts.
    """
    device = module.adapters_on or module.weight_of(projection).device
    adapter = Adapter(module.shape_of(projection), rank, alpha, dtype, device)
    if module.sharding is not None:
        adapter.A, adapter.B = (
            nn.Parameter(module.sharding.whole(name, getattr(adapter, name).detach()))
            for name in "AB"
        )
    module.add_module(f"{projection}_lora", adapter)
    return adapter


def adapters_of(module: AdaptableModule) -> Iterator[tuple[str, Adapter]]:
    """The adapters of a module that are parts of it, by projection."""
    for projection in module.projections:
        adapter = module.adapter(projection)
        if isinstance(adapter, Adapter):
            yield projection, adapter


def adapted(model: nn.Module, where: str) -> dict[str, AdaptableModule]:
    """The modules that have adapters, by name. UnsupportedError if there are none, or others than
    these functions know.
    """
    modules = {name: module for name, module in adaptable(model, where).items() if module.adapted}
    if not modules:
        raise UnsupportedError(
            "no adapters", expected="a model that add_lora_ or load_lora_ gave some", where=where
        )
    if name := next((name for name, module in modules.items() if module.wrappers), ""):
        raise UnsupportedError(
            f"adapters of another library around {name}",
            expected="adapters of add_lora_ or load_lora_",
            todo="that library saves, merges and removes its own",
            where=where,
        )
    return modules
