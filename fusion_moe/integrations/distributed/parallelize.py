"""`parallelize_`: each rank keeps its share of the experts of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import OptionError, ShapeError, UnsupportedError, need_one_of
from ...nn import Experts, contract_of
from ...nn.conversion.traced_activation import activation_of
from ...nn.frozen import Projections
from .all_to_all import AllToAll
from .dispatch import TOKENS, Dispatcher, Everywhere, divide_forward
from .shares import (
    columns,
    experts_of,
    keep_experts,
    keep_features,
    shard_experts,
    whole_experts_of,
)
from .symmetric import GroupMemory, say_collectives, send_tokens

DISPATCH = ("all_gather", "all_to_all", "symmetric")
# What each dimension of the mesh divides.
PLANS: dict[str, tuple[Callable[[Any, int, int], None], ...]] = {
    "ep": (keep_experts,),
    "tp": (keep_features,),
    "ep_tp": (keep_experts, keep_features),
}


def parallelize_(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: str = "ep",
    tokens: str = "replicated",
    dispatch: str = "all_gather",
    capacity: int | float = 1.0,
    float32_sums: bool = False,
) -> list[str]:
    """Divides the experts of a model between the ranks of a mesh, in place. Returns the names of
    the modules that were divided.

    Every rank calls it with the same model, whose weights are loaded. It divides modules of
    fusion_moe.nn, and transformers' experts with experts_implementation="fusion_moe", which train.

    plan: "ep": a rank keeps whole experts, divided like DTensor's Shard(0): E / R rounded up; the
    last ranks have fewer, but at least one. Adapters go with their experts. "tp": a rank keeps some
    intermediate features of all experts: rows of gate and up, columns of down, in whole blocks of
    the encoding; for `Experts` without adapters. "ep_tp": both: experts are divided along the
    mesh's first dimension, and their features along its second. tokens: "replicated": every rank
    calls the model with the same tokens and gets the same results, by an all-reduce. "sharded":
    every rank calls it with its own tokens, as many as every other rank along the tensors' first
    dimension, and gets their results. Gradients of a rank's experts then already cover the tokens
    of all ranks, with nothing left to add. dispatch: how sharded tokens get to experts.
    "all_gather": all tokens to all ranks, and a reduce-scatter of the sums. "all_to_all", for "ep"
    and "ep_tp": each token once to every rank that has one of its experts, and back. "symmetric",
    for "ep": the same by memory that the ranks of one node share, inside the program of the
    experts, and in that of their gradients; ranks that share none, and modules that are more than
    one operation, go through collectives, which is said once. capacity: for "symmetric", the most
    tokens of any rank in a call, for which memory is allocated at once; 1.0: all ranks have equally
    many, and memory grows with them. For "all_to_all", the most tokens that a rank sends to any
    other: a float is a fraction of its own tokens, rounded up; an int is a number, equal on all
    ranks, whose own tokens may then be fewer, more or none. Exactly this many are always sent and
    computed. The last tokens, those beyond the capacity, do without the experts of that rank: these
    experts' contribution is left out, the rest is unchanged. Modules count such tokens in a buffer
    `dropped`, int64[]. With the default, 1.0, there are none. mesh: one-dimensional, or
    two-dimensional for "ep_tp"; at most E ranks along "ep", at most as many as I has blocks along
    "tp".

    Each rank's sum is rounded to the dtype of activations before the ranks' sums are added, unless
    float32_sums, for "symmetric", which doubles what comes back in 16 bits: apart from that,
    results equal one process's. Parameters become new tensors of other shapes: create optimizers,
    `prepare_` and compile afterwards. State dicts have a rank's share. Fails before it changes
    anything: OptionError for a mesh or an option, UnsupportedError for modules that cannot be
    divided like this, ShapeError for ranks whose models have other sizes. In a call nothing checks
    that tokens, experts a token and dtypes are as many and the same on all ranks: the process group
    fails by its own errors.
    """
    division = Division(mesh, plan, tokens, dispatch, capacity, float32_sums)
    modules = division.modules(model)
    division.need_alike(modules)
    for module in modules.values():
        experts = division.keep(module)
        division.join(module, experts)
    division.allocate()
    return list(modules)


class Division:
    """How experts are divided, in two steps: a module without weights can be made smaller before
    its weights are read.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        plan: str = "ep",
        tokens: str = "replicated",
        dispatch: str = "all_gather",
        capacity: int | float = 1.0,
        float32_sums: bool = False,
    ):
        """See `parallelize_`. OptionError for arguments that do not fit."""
        need_one_of("plan", plan, PLANS, where="parallelize_")
        need_one_of("tokens", tokens, TOKENS, where="parallelize_")
        need_one_of("dispatch", dispatch, DISPATCH, where="parallelize_")
        _check_dispatch(plan, tokens, dispatch, capacity, float32_sums)
        _check_mesh(mesh, plan, len(PLANS[plan]))
        self.mesh, self.plan, self.tokens, self.dispatch, self.capacity = (
            mesh,
            plan,
            tokens,
            dispatch,
            capacity,
        )
        self.float32_sums = float32_sums

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules to divide, by name. UnsupportedError unless all of them can be divided."""
        modules = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, Projections) or contract_of(module)
        }
        if not modules:
            raise UnsupportedError(
                f"no modules of experts in a {type(model).__name__}",
                expected="some",
                todo="quantize_(model), or import fusion_moe.transformers and set "
                'experts_implementation="fusion_moe"',
                where="parallelize_",
            )
        for name, module in modules.items():
            for dim, keep in enumerate(PLANS[self.plan]):
                if why := _undividable(module, keep, self.mesh.size(dim)):
                    raise UnsupportedError(
                        f"{name or type(module).__name__}: {why[0]}",
                        expected=why[1],
                        where="parallelize_",
                    )
        return modules

    def need_alike(self, modules: Mapping[str, nn.Module]) -> None:
        """ShapeError, on all ranks, unless they divide modules of the same names and sizes: the
        sums of others would be taken for these.
        """
        sizes = {
            name: f"{experts_of(m)} experts of {_features(m)} features in {type(m).__name__}"
            for name, m in modules.items()
        }
        _ = self._memory  # which forbids multicast before NCCL makes a communicator
        for dim in range(self.mesh.ndim):
            group = self.mesh.get_group(dim)
            of_ranks: list[Any] = [None] * self.mesh.size(dim)
            distributed.all_gather_object(of_ranks, sizes, group)
            for rank, theirs in enumerate(of_ranks):
                for name in dict.fromkeys((*of_ranks[0], *theirs)):
                    first, other = of_ranks[0].get(name, "none"), theirs.get(name, "none")
                    if first != other:
                        raise ShapeError(
                            f"{name or 'the module'}: {other} on rank {rank} of the mesh",
                            expected=f"{first}, as on rank 0",
                            todo="every rank calls it with the same model",
                            where="parallelize_",
                        )

    def keep(self, module: nn.Module) -> int:
        """Keeps a rank's share of the weights, or on the meta device of their shapes. -> E over all
        ranks
        """
        experts = experts_of(module)
        for dim, keep in reversed(tuple(enumerate(PLANS[self.plan]))):
            keep(module, self.mesh.get_local_rank(dim), self.mesh.size(dim))
        return experts

    def join(self, module: nn.Module, experts: int) -> None:
        """Makes a module with a rank's share act for all ranks: its forward, what trains, its state
        dicts. experts: E over all ranks.
        """
        if self.plan == "ep":
            shard_experts(module, self.mesh, experts)
        # tokens sent to experts are then gathered for their features
        for dim, keep in reversed(tuple(enumerate(PLANS[self.plan]))):
            group, ranks = self.mesh.get_group(dim).group_name, self.mesh.size(dim)
            dispatcher: Dispatcher = Everywhere(group, ranks, self.tokens == "sharded")
            if keep is keep_experts and self._sends_rows:
                dispatcher = AllToAll(group, ranks, experts, self.capacity)
                module.register_buffer(
                    "dropped",
                    torch.zeros((), dtype=torch.int64, device=self.mesh.device_type),
                    persistent=False,
                )
            features = _features(module)
            if (memory := self._memory) is None:
                divide_forward(module, dispatcher, features)
            elif _is_one_operation(module):
                layer = memory.layer(experts, features)
                layer.capacity = self.capacity if isinstance(self.capacity, int) else 0
                layer.float32_sums = self.float32_sums
                send_tokens(module, layer, dispatcher)
            else:
                say_collectives(f"a {type(module).__name__} is more than one operation")
                divide_forward(module, dispatcher, features)

    def allocate(self) -> None:
        """Allocates what the ranks share, if it is known for how many tokens."""
        if self._memory and isinstance(self.capacity, int):
            self._memory.allocate(self.capacity)

    @cached_property
    def _memory(self) -> GroupMemory | None:
        """What the ranks share, for dispatch = "symmetric"; None, which is said, if they cannot."""
        if self.dispatch != "symmetric":
            return None
        kind = self.mesh.device_type
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else None
        try:
            return GroupMemory.of_group(self.mesh.get_group(), device or torch.device(kind))
        except UnsupportedError as error:
            say_collectives(str(error))
            return None

    @property
    def _sends_rows(self) -> bool:
        """Whether collectives send tokens to the ranks of their experts alone."""
        return self.dispatch == "all_to_all" or (
            self.dispatch == "symmetric" and isinstance(self.capacity, int)
        )


def _features(module: nn.Module) -> int:
    """Of tokens."""
    if isinstance(module, Projections):
        return module.shape_of("down")[1]
    contract = contract_of(module)
    assert contract
    return contract.hidden


def _is_one_operation(module: nn.Module) -> bool:
    """Whether one operation computes the module's experts."""
    contract = contract_of(module)
    return isinstance(module, Experts) or bool(
        contract and not contract.post_expert_norm and activation_of(module, as_stored=True)
    )


def _check_dispatch(
    plan: str, tokens: str, dispatch: str, capacity: int | float, float32_sums: bool
) -> None:
    sent, named = dispatch != "all_gather", f"dispatch = {dispatch!r}"
    symmetric = dispatch == "symmetric"
    plans = {"all_to_all": ("ep", "ep_tp"), "symmetric": ("ep",)}.get(dispatch, PLANS)
    takes_capacity = ("all_to_all", "symmetric") if isinstance(capacity, int) else ("all_to_all",)
    a_part = capacity >= 1 if isinstance(capacity, int) else 0 < capacity <= 1
    for wrong, actual, expected in (
        (sent and tokens != "sharded", f"{named}, tokens = {tokens!r}", "tokens = 'sharded'"),
        (plan not in plans, f"{named}, plan = {plan!r}", f"plan = {_either(plans)}"),
        (
            float32_sums and not symmetric,
            f"{named}, float32_sums = True",
            "dispatch = 'symmetric'",
        ),
        (
            symmetric and not isinstance(capacity, int) and capacity != 1,
            f"{named}, capacity = {capacity}",
            "1.0 or a number of tokens: it drops none",
        ),
        (
            not sent and (isinstance(capacity, int) or capacity != 1),
            f"capacity = {capacity}, {named}",
            f"dispatch = {_either(takes_capacity)}",
        ),
        (
            not a_part,
            f"capacity = {capacity}",
            "a number of tokens, 1 or more, or a part of a rank's, above 0 and up to 1.0",
        ),
    ):
        if wrong:
            raise OptionError(actual, expected=expected, where="parallelize_")


def _either(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))


def _check_mesh(mesh: object, plan: str, ndim: int) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != ndim:
        raise OptionError(
            f"a mesh with ndim = {mesh.ndim}"
            if isinstance(mesh, DeviceMesh)
            else f"a {type(mesh).__name__}",
            expected=f"a DeviceMesh with ndim = {ndim} for plan = {plan!r}",
            todo="mesh['ep'] is one dimension of several",
            where="parallelize_",
        )


def _undividable(
    module: Any, keep: Callable[[Any, int, int], None], ranks: int
) -> tuple[str, str] | None:
    """Why a module cannot be divided in this way, and what was expected; None if it can be."""
    if hasattr(module, "is_divided"):
        return "it is divided already", "a model that is not"
    if why := getattr(module, "fixed", ""):
        return "shares of it", why
    if getattr(module, "wrappers", None):
        return "adapters of PEFT", "adapters of add_lora_, which are divided too"
    config = getattr(module, "config", None)
    ours = getattr(config, "_experts_implementation", None) == "fusion_moe"
    if not (ours or isinstance(module, Projections)):
        return "experts that transformers computes", 'experts_implementation="fusion_moe"'
    if keep is keep_experts:
        experts = experts_of(module)
        without = [rank for rank in range(ranks) if not whole_experts_of(experts, rank, ranks)]
        if not without:
            return None
        return (
            f"{experts} experts for {ranks} ranks",
            f"an expert for each rank; {without} would have none",
        )
    if not isinstance(module, Experts):
        return (
            f"a {type(module).__name__} whose features are divided",
            "Experts or NVFP4Experts, or plan = 'ep'",
        )
    if module.adapted:
        return "adapters, and features are divided", "plan = 'ep', or merge_lora_(model) first"
    intermediate, step = module.shape_of("down")[-1], columns(module)
    if intermediate % step or intermediate // step < ranks:
        return (
            f"{intermediate} intermediate features for {ranks} ranks",
            f"{step} for each rank, or a multiple of that",
        )
    return None
