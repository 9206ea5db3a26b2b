"""Modules in sequence, where adjacent modules of this library become one program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from torch import Tensor, nn

from ..definitions.operations import restored
from ..errors import OptionError, ShapeError
from ..nn import checks
from . import fusions, splits
from .activations import Activation
from .channels import AddExtraInput, MakeExtraOutput
from .linear import GroupedLinear
from .stages import Stage, call
from .tracked import Effect, tracked


class Sequential(nn.Sequential):
    """Modules one after another. Each run of GroupedLinear and activations of ours becomes one
    Fusion, forward and backward.

    The compiler decides how it is divided into kernels; results equal those of the modules called
    one by one, except that kernels may leave out roundings between them. Other modules run as they
    are, and so does one of ours whose call does more than its `forward`: with hooks (those of FSDP2
    and of `torch.nn.utils.spectral_norm` are such), with a `forward` of a subclass, or with one set
    on the instance. `register_fusion` adds fusions of your own.
    """

    def forward(
        self, x: Tensor, *extra: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """x [..., K] -> [..., N], and behind it what each MakeExtraOutput without a channel makes.
        extra: what each of our modules takes besides x, in order: for a GroupedLinear split_sizes
        int[G] and, with scale_bias, scales [...]; for a scaled activation its scales [...]; for an
        AddExtraInput without a channel what it adds. is_first_microbatch: as each GroupedLinear
        takes it. ShapeError for too many or too few, OptionError for a GroupedLinear with
        return_bias, or a channel that nothing fills before.
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
        _check_channels(self)
        rest, modules = iter(extra), list(self)
        inputs = [[next(rest) for _ in _takes(m)] for m in modules]
        channels: dict[str, Tensor] = {}
        outputs: list[Tensor] = []
        at = 0
        while at < len(modules):
            x, count = _theirs(modules, at, x, inputs, channels)
            if not count:
                count = _run(modules, at)
                own, extras = modules[at : at + count], inputs[at : at + count]
                if count > 1:
                    x = _fused(own, x, extras, is_first_microbatch)
                elif isinstance(own[0], GroupedLinear) and is_first_microbatch is not None:
                    x = own[0](x, *extras[0], is_first_microbatch=is_first_microbatch)
                else:
                    x = own[0](x, *_beside(own, extras, channels))
                if type(own[0]) is MakeExtraOutput and own[0].channel is not None:
                    channels[own[0].channel] = x
                elif type(own[0]) is MakeExtraOutput:
                    outputs.append(x)
            at += count
        return (x, *outputs) if outputs else x

    def __add__(self, other: nn.Sequential) -> Sequential:
        """The modules of both; torch's would be a Sequential of torch."""
        return Sequential(*self, *other)

    def __mul__(self, other: int) -> Sequential:
        """The same modules, `other` times."""
        return Sequential(*list(self) * other)


def _theirs(
    modules: Sequence[nn.Module],
    at: int,
    x: Tensor,
    tensors: Sequence[Sequence[Tensor]],
    channels: Mapping[str, Tensor],
) -> tuple[Tensor, int]:
    """The result of a registered fusion, and of how many modules; x and 0 if none was for them."""
    for fusion in fusions.fitting(modules, at):
        end = at + len(fusion.kinds)
        extras = _beside(modules[at:end], tensors[at:end], channels)
        function = fusion.function(*modules[at:end], x, *extras)
        if function is not NotImplemented:
            return function, len(fusion.kinds)
    return x, 0


def _beside(
    modules: Sequence[nn.Module],
    inputs: Sequence[Sequence[Tensor]],
    channels: Mapping[str, Tensor],
) -> list[Tensor]:
    """What modules take besides x: what is given, and what others before put into channels."""
    results: list[Tensor] = []
    inside: list[str | None] = []
    for module, tensors in zip(modules, inputs, strict=True):
        results += tensors
        if not isinstance(module, MakeExtraOutput):
            continue
        if not isinstance(module, AddExtraInput):
            inside.append(module.channel)
        elif module.channel is not None and module.channel not in inside:
            results.append(channels[module.channel])
    return results


def _takes(module: nn.Module) -> tuple[str, ...]:
    """What a module takes besides x."""
    if isinstance(module, GroupedLinear):
        return ("split_sizes", "scales")[: 1 + module.scale_bias]
    if isinstance(module, AddExtraInput):
        return ("what it adds",) if module.channel is None else ()
    return ("scales",) if isinstance(module, Activation) and module.scaled else ()


def _check_channels(modules: Iterable[nn.Module]) -> None:
    """OptionError for a channel that is read before it is filled."""
    filled: list[str] = []
    for module in modules:
        if isinstance(module, AddExtraInput) and module.channel not in (*filled, None):
            raise OptionError(
                f"AddExtraInput({module.channel!r})",
                expected="a MakeExtraOutput of this channel before it",
                where="Sequential",
            )
        if isinstance(module, MakeExtraOutput) and module.channel is not None:
            filled.append(module.channel)


def _run(modules: Sequence[nn.Module], at: int) -> int:
    """How many modules from `at` on become one program: modules of ours, at least one of them a
    layer, before one where a registered fusion may begin.
    """
    end = at
    while end < len(modules) and _is_plain(modules[end]):
        if end > at and any(fusions.fitting(modules, end)):
            break
        end += 1
    return end - at if any(isinstance(m, GroupedLinear) for m in modules[at:end]) else 1


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is one of ours and nothing else: no hooks, no other forward."""
    return (
        isinstance(module, (GroupedLinear, Activation))
        and type(module).forward in (GroupedLinear.forward, Activation.forward)
        and fusions.runs_forward_alone(module)
    )


def _fused(
    modules: Sequence[nn.Module],
    x: Tensor,
    inputs: Sequence[Sequence[Tensor]],
    is_first_microbatch: bool | None,
) -> Tensor:
    """x [..., K] through our modules, as one program."""
    width = _width(modules)
    checks.need_rows("x", x, width, "Sequential")
    stages: list[Stage] = []
    # each given tensor and the ends made from it: one tensor, one partition
    divided: list[tuple[Tensor, Tensor]] = []
    for module, tensors in zip(modules, inputs, strict=True):
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
            assert isinstance(module, Activation)
            stages.append(module.stage(x, width, *tensors))
            width //= module.parts
    result = call(x.reshape(-1, stages[0].width), stages)
    effects: dict[int, Effect] = {}
    for module in modules:
        if isinstance(module, GroupedLinear):
            effects |= module.effects(result)
    y = tracked(result, effects, divided[-1][1], where="Sequential") if effects else result.run()
    return restored(y, x.shape[:-1])


def _width(modules: Sequence[nn.Module]) -> int:
    """The columns that the first module takes: those of the first layer, times the parts of each
    activation before it.
    """
    first = next(i for i, module in enumerate(modules) if isinstance(module, GroupedLinear))
    layer = modules[first]
    assert isinstance(layer, GroupedLinear)
    before = [module.parts for module in modules[:first] if isinstance(module, Activation)]
    return layer.in_features * prod(before)
