"""Modules in sequence, where adjacent modules of this library become one program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from ...definitions.operations import restored
from ...errors import OptionError, ShapeError
from .. import checks
from . import main_grad, splits
from .activations import _ScaledGLU
from .delayed import Delayed
from .linear import GroupedLinear
from .stages import Call, Stage, call
from .tracked import Effects, tracked


class Sequential(nn.Sequential):
    """Modules one after another. Each run of GroupedLinear and scaled activations becomes one
    Fusion, forward and backward.

    The compiler decides how it is divided into kernels; results equal those of the modules called
    one by one, except that kernels may leave out roundings between them. Other modules run as they
    are, and so does one of ours whose call does more than its `forward`: with hooks (those of FSDP2
    and of `torch.nn.utils.spectral_norm` are such), with a `forward` of a subclass, or with one set
    on the instance.
    """

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        """x [..., K] -> [..., N]. extra: what each of our modules takes besides x, in order: for a
        GroupedLinear split_sizes int[G] and, with scale_bias, scales [...]; for a scaled activation
        its scales [...]. ShapeError for too many or too few, OptionError for a GroupedLinear with
        return_bias.
        """
        if any(isinstance(module, GroupedLinear) and module.return_bias for module in self):
            expected, todo = "modules that return only rows", "call it outside the Sequential"
            raise OptionError(
                "a GroupedLinear with return_bias", expected=expected, todo=todo, where="Sequential"
            )
        wanted = sum(_takes(module) for module in self)
        if len(extra) != wanted:
            raise ShapeError(
                f"{len(extra)} tensors beside x",
                expected=f"{wanted}: {_described(self)}",
                where="Sequential",
            )
        rest = iter(extra)
        for modules in _runs(list(self)):
            extras = [[next(rest) for _ in range(_takes(module))] for module in modules]
            x = modules[0](x, *extras[0]) if len(modules) == 1 else _fused(modules, x, extras)
        return x


def _takes(module: nn.Module) -> int:
    """How many tensors a module takes besides x."""
    if isinstance(module, GroupedLinear):
        return 1 + module.scale_bias
    return int(isinstance(module, _ScaledGLU))


def _described(modules: Iterable[nn.Module]) -> str:
    names: dict[int, list[str]] = {0: [], 1: ["split_sizes"], 2: ["split_sizes", "scales"]}
    return (
        ", ".join(
            n
            for m in modules
            for n in (["scales"] if isinstance(m, _ScaledGLU) else names[_takes(m)])
        )
        or "none"
    )


def _runs(modules: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Adjacent modules that become one program: modules of ours, at least one of them a layer."""
    run: list[nn.Module] = []
    for module in modules:
        if _is_plain(module):
            run.append(module)
            continue
        yield from _together(run)
        yield [module]
        run = []
    yield from _together(run)


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is one of ours and nothing else: no hooks, no other forward."""
    if not isinstance(module, (GroupedLinear, _ScaledGLU)) or hooks._has_any_global_hook():
        return False
    if (
        type(module).forward not in (GroupedLinear.forward, _ScaledGLU.forward)
        or "forward" in module.__dict__
    ):
        return False
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _together(run: list[nn.Module]) -> Iterator[list[nn.Module]]:
    if any(isinstance(module, GroupedLinear) for module in run):
        yield run
    else:
        yield from ([module] for module in run)


def _fused(modules: Sequence[nn.Module], x: Tensor, given: Sequence[Sequence[Tensor]]) -> Tensor:
    """x [..., K] through our modules, as one program."""
    width = _width(modules)
    checks.need_rows("x", x, width, "Sequential")
    stages: list[Stage] = []
    # each given tensor and the ends made from it: one tensor, one partition
    divided: list[tuple[Tensor, Tensor]] = []
    for module, tensors in zip(modules, given, strict=True):
        if isinstance(module, GroupedLinear):
            if module.in_features != width:
                raise ShapeError(
                    f"rows of {width}",
                    expected=f"{module.in_features}",
                    where=type(module).__name__,
                )
            ends = next((e for t, e in divided if t is tensors[0]), None)
            if ends is None:
                ends = splits.ends_of(tensors[0], None, module.num_groups, x, type(module).__name__)
                divided.append((tensors[0], ends))
            stages.append(module.stage(x, ends, tensors[1] if len(tensors) > 1 else None))
            width = module.out_features
        else:
            assert isinstance(module, _ScaledGLU)
            stages.append(module.stage(x, width, tensors[0]))
            width //= 2
    made = call(x.reshape(-1, stages[0].width), stages)
    effects = _effects(modules, made)
    y = made.run() if effects is None else tracked(made, effects, ends, where="Sequential")
    return restored(y, x.shape[:-1])


def _width(modules: Sequence[nn.Module]) -> int:
    """The columns that the first module takes: those of the first layer, doubled for each
    activation before it.
    """
    first = next(i for i, module in enumerate(modules) if isinstance(module, GroupedLinear))
    layer = modules[first]
    assert isinstance(layer, GroupedLinear)
    return layer.in_features * 2**first


def _effects(modules: Sequence[nn.Module], made: Call) -> Effects | None:
    """What the backward writes for all layers; None if nothing."""
    mains: dict[int, main_grad.Params] = {}
    delayed: dict[int, tuple[Delayed, main_grad.Params]] = {}
    for module in modules:
        effects = module.effects(made) if isinstance(module, GroupedLinear) else None
        if effects is not None:
            mains.update(effects.mains)
            delayed.update(effects.delayed)
    return Effects(mains, delayed) if mains or delayed else None
