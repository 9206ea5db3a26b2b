"""A model's layers of experts, in the order of its modules, and the router of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn

from ...errors import UnsupportedError
from ...nn import contract_of
from ...nn.frozen import Projections

# where PEFT keeps the module that it stands around
_WRAPPED = "base_layer", "original_module"


@dataclass(frozen=True)
class ExpertsLayer:
    """A module of experts, called with (tokens [T, H], ids int[T, k], weights [T, k]).

    choosers: the modules whose forward chooses its experts by topk; several if PEFT has copies of
    one. fixed: a table chooses by tokens, and no topk. count: experts to choose from.
    """

    name: str
    experts: Any
    choosers: tuple[Any, ...]
    fixed: bool
    count: int


def layers_of(model: nn.Module) -> tuple[ExpertsLayer, ...]:
    """UnsupportedError for a model without experts that are called so, and for experts that get
    other ids than their router chose.
    """
    modules = dict(model.named_modules())
    layers = tuple(
        _layer(modules, name, m)
        for name, m in modules.items()
        if isinstance(m, Projections) or contract_of(m) is not None
    )
    if not layers:
        raise UnsupportedError(
            f"no layer of experts in a {type(model).__name__}",
            expected="modules that are called with tokens, ids and weights: transformers' experts, "
            "or those of fusion_moe.nn",
        )
    return layers


def _layer(modules: dict[str, Any], name: str, experts: Any) -> ExpertsLayer:
    if getattr(experts, "_is_expert_parallel", False):
        raise UnsupportedError(
            "experts that a parallel plan divides between devices: their ids are a rank's own",
            expected="all experts on one device, or fusion_moe.distributed.parallelize_",
            where=name,
        )
    routers = list[Any]()
    for ancestor in _ancestors(modules, name):
        beside = [m for m in ancestor.children() if experts not in m.modules()]
        routers = [m for child in (ancestor, *beside) for m in _choosers(child)]
        if beside:
            break
    fixed = not routers and any(hasattr(m, "tid2eid") for m in beside)
    contract = contract_of(experts)
    count = contract.experts if contract else experts.shape_of("down")[0]
    return ExpertsLayer(
        name,
        experts,
        tuple(routers),
        fixed,
        next((int(m.num_experts) for m in routers if hasattr(m, "num_experts")), count),
    )


def _ancestors(modules: dict[str, Any], name: str) -> Iterator[Any]:
    """The modules around one, from the inside, but those that only stand around it."""
    while name:
        name = name.rpartition(".")[0]
        if not any(hasattr(modules[name], inner) for inner in _WRAPPED):
            yield modules[name]


def _choosers(module: Any) -> Iterator[Any]:
    """The module if its forward chooses by topk, or what PEFT has in its place."""
    if any(hasattr(module, inner) for inner in _WRAPPED):
        yield from (m for m in module.modules() if _chooses(type(m)))
    elif _chooses(type(module)):
        yield module


def _chooses(of: type) -> bool:
    code = getattr(inspect.unwrap(of.forward), "__code__", None)  # type: ignore[attr-defined]
    return code is not None and "topk" in code.co_names


class Own:
    """What a copy of a patched module has in place of a `State`: its own forward, bound to it."""

    def __init__(self, inner: Any):
        self.inner = inner


class State:
    """What calls of a patched module are given. inner: the module's own forward."""

    inner: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return Own, (self.inner,)


def patching(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward to put on a module by `Patched`: it calls forward(module, state, *args, **kwargs)
    with the state that the module was patched with. A copy of a patched module, as copy.deepcopy
    makes it, computes as before the patch.
    """
    key = _key(forward)

    @wraps(forward)
    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(module, key)
        if isinstance(state, Own):
            return state.inner(*args, **kwargs)
        return forward(module, state, *args, **kwargs)

    return called


def _key(forward: Callable[..., Any]) -> str:
    """The attribute that has the state."""
    return f"fusion_moe{forward.__name__}"


class Patched:
    """Calls of a module go to `forward(module, *args, **kwargs)` instead, which has the
    module's own as `state.inner`; compiled code sees it. An inner one of the same kind takes the
    place of an outer one. `undo` is called in reverse order. In a copy of the module the state is
    `Own`.
    """

    def __init__(self, module: Any, forward: Callable[..., Any], state: State):
        self.module, self.key = module, _key(forward)
        attributes = vars(module)
        self.before = {key: attributes.get(key) for key in ("forward", self.key)}
        outer = self.before[self.key]
        state.inner = module.forward if outer is None else outer.inner
        attributes |= {self.key: state, "forward": MethodType(forward, module)}

    def undo(self) -> None:
        """Gives the module back the attributes that it had before it was patched."""
        for key, value in self.before.items():
            if value is None:
                del vars(self.module)[key]
            else:
                vars(self.module)[key] = value


_ARGUMENTS = "hidden_states", "top_k_index", "top_k_weights"


def positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call of experts, tokens, ids and weights first, whose names are taken out
    of kwargs.
    """
    return (*args, *(kwargs.pop(name) for name in _ARGUMENTS[len(args) :]))
