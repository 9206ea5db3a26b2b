"""Modules in sequence, where adjacent modules of this library become one program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from ...definitions.operations import restored
from ...errors import OptionError, ShapeError
from .. import checks
from . import splits
from .activations import _ScaledGLU
from .linear import GroupedLinear
from .stages import Stage, call
from .tracked import Effect, tracked


class Sequential(nn.Sequential):
    """Modules one after another. Each run of GroupedLinear and scaled activations becomes one
    Fusion, forward and backward.

    The compiler decides how it is divided into kernels; results equal those of the modules called
    one by one, except that kernels may leave out roundings between them. Other modules run as they
    are, and so does one of ours whose call does more than its `forward`: with hooks (those of FSDP2
    and of `torch.nn.utils.spectral_norm` are such), with a `forward` of a subclass, or with one set
    on the instance.
    """

    def forward(self, x: Tensor, *extra: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """x [..., K] -> [..., N]. extra: what each of our modules takes besides x, in order: for a
        GroupedLinear split_sizes int[G] and, with scale_bias, scales [...]; for a scaled activation
        its scales [...]. is_first_microbatch: as each GroupedLinear takes it. ShapeError for too
        many or too few, OptionError for a GroupedLinear with return_bias.
        """
        if any(isinstance(module, GroupedLinear) and module.return_bias for module in self):
            raise OptionError(
                "a GroupedLinear with return_bias",
                expected="modules that return only rows",
                todo="call it outside the Sequential",
                where="Sequential",
            )
        wanted = [name for module in self for name in _takes(module)]
        if len(extra) != len(wanted):
            raise ShapeError(
                f"{len(extra)} tensors beside x",
                expected=f"{len(wanted)}: {', '.join(wanted) or 'none'}",
                where="Sequential",
            )
        rest = iter(extra)
        for modules in _runs(self):
            extras = [[next(rest) for _ in _takes(module)] for module in modules]
            if len(modules) > 1:
                x = _fused(modules, x, extras, is_first_microbatch)
            elif isinstance(modules[0], GroupedLinear) and is_first_microbatch is not None:
                x = modules[0](x, *extras[0], is_first_microbatch=is_first_microbatch)
            else:
                x = modules[0](x, *extras[0])
        return x


def _takes(module: nn.Module) -> tuple[str, ...]:
    """What a module takes besides x."""
    if isinstance(module, GroupedLinear):
        return ("split_sizes", "scales")[: 1 + module.scale_bias]
    return ("scales",) if isinstance(module, _ScaledGLU) else ()


def _runs(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Adjacent modules that become one program: modules of ours, at least one of them a layer."""
    runs: list[list[nn.Module]] = []
    joining = False
    for module in modules:
        plain = _is_plain(module)
        if plain and joining:
            runs[-1].append(module)
        else:
            runs.append([module])
        joining = plain
    for run in runs:
        layers = any(isinstance(module, GroupedLinear) for module in run)
        yield from [run] if layers else [[module] for module in run]


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is one of ours and nothing else: no hooks, no other forward."""
    return (
        isinstance(module, (GroupedLinear, _ScaledGLU))
        and type(module).forward in (GroupedLinear.forward, _ScaledGLU.forward)
        and "forward" not in module.__dict__
        and not hooks._has_any_global_hook()
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


def _fused(
    modules: Sequence[nn.Module],
    x: Tensor,
    given: Sequence[Sequence[Tensor]],
    is_first_microbatch: bool | None,
) -> Tensor:
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
            scales = tensors[1] if len(tensors) > 1 else None
            stages.append(module.stage(x, ends, scales, is_first_microbatch))
            width = module.out_features
        else:
            assert isinstance(module, _ScaledGLU)
            stages.append(module.stage(x, width, tensors[0]))
            width //= 2
    made = call(x.reshape(-1, stages[0].width), stages)
    effects: dict[int, Effect] = {}
    for module in modules:
        if isinstance(module, GroupedLinear):
            effects |= module.effects(made)
    y = tracked(made, effects, ends, where="Sequential") if effects else made.run()
    return restored(y, x.shape[:-1])


def _width(modules: Sequence[nn.Module]) -> int:
    """The columns that the first module takes: those of the first layer, doubled for each
    activation before it.
    """
    first = next(i for i, module in enumerate(modules) if isinstance(module, GroupedLinear))
    layer = modules[first]
    assert isinstance(layer, GroupedLinear)
    return layer.in_features * 2**first
