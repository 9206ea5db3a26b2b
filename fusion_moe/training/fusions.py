"""A user's own fusions: functions that a Sequential calls in place of adjacent modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.nn.modules import module as hooks

from ..errors import OptionError
from .channels import AddExtraInput, MakeExtraOutput

F = TypeVar("F", bound=Callable[..., Any])


class Replacement(NamedTuple):
    """The classes of adjacent modules, and the function that is called in their place."""

    kinds: tuple[type[nn.Module], ...]
    function: Callable[..., Any]


_registered: list[Replacement] = []


def register_fusion(*kinds: type[nn.Module]) -> Callable[[F], F]:
    """A decorator: a Sequential calls the function in place of adjacent modules of these classes.

        @fusion_moe.nn.register_fusion(nn.RMSNorm, fusion_moe.nn.Bias)
        def norm_and_bias(norm, bias, x):
            return torch.ops.mylib.norm_and_bias(x, norm.weight, bias.bias, norm.eps)

    function(*modules, x, *extra) -> what the modules return, called one after another. extra: what
    each of them takes beside x, in order, an AddExtraInput what its channel has; between a
    MakeExtraOutput and its AddExtraInput the function itself passes the tensor on. Its derivative
    is what torch.autograd makes of it. NotImplemented as the result: it was not for these tensors,
    and the modules run as they would without it.

    Fusions are tried in the order in which they were registered, before the library makes programs
    of its own modules. Modules are left out if they have hooks, another `forward` or a class that
    is only derived from one of `kinds`, and so are windows with a MakeExtraOutput that somebody
    outside reads. OptionError unless `kinds` are two or more classes of modules.
    `fusion_moe.nn.unregister_fusion(function)` removes it.
    """
    if len(kinds) < 2 or not all(isinstance(k, type) and issubclass(k, nn.Module) for k in kinds):
        raise OptionError(
            f"a fusion of {', '.join(map(str, kinds)) or 'nothing'}",
            expected="two or more classes that derive from torch.nn.Module",
            where="register_fusion",
        )

    def register(function: F) -> F:
        _registered.append(Replacement(kinds, function))
        return function

    return register


def unregister_fusion(function: Callable[..., Any]) -> None:
    """Removes what `register_fusion` registered; does nothing for another function."""
    _registered[:] = [fusion for fusion in _registered if fusion.function is not function]


def fitting(modules: Sequence[nn.Module], at: int) -> Iterator[Replacement]:
    """The registered fusions whose modules are those from `at` on."""
    for fusion in _registered:
        end = at + len(fusion.kinds)
        if (
            fusion.kinds == tuple(type(m) for m in modules[at:end])
            and all(map(runs_forward_alone, modules[at:end]))
            and not _filled(modules[at:end]) & _read([*modules[:at], *modules[end:]])
        ):
            yield fusion


def _filled(modules: Sequence[nn.Module]) -> set[str | None]:
    """The channels that modules fill; None stands for results that a Sequential returns."""
    return {m.channel for m in modules if type(m) is MakeExtraOutput}


def _read(modules: Sequence[nn.Module]) -> set[str | None]:
    """The channels that modules read, and None."""
    return {None, *(m.channel for m in modules if isinstance(m, AddExtraInput))}


def runs_forward_alone(module: nn.Module) -> bool:
    """Whether a call of the module is its class's `forward` and nothing else."""
    return (
        "forward" not in module.__dict__
        and not hooks._has_any_global_hook()
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )
