"""quantize_: the experts of a model, in place, from floating point to NVFP4."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..errors import UnsupportedError
from ..progress import progress
from .converters import NVFP4Config, convert, converter_of, known_names
from .experts import NVFP4Experts
from .grouped import GroupedLinear

Filter = Callable[[nn.Module, str], bool]


def quantize_(model: nn.Module, config: NVFP4Config | None = None, filter_fn: Filter | None = None) -> None:
    """Replaces the modules of a model that hold experts by those of fusion_moe.nn, in place. Everything else stays as it is.

    A layer that is known as a whole is replaced as a whole, and what is inside of it is not looked at. filter_fn(module, name) says
    which ones; all without it. Fails before it changes anything: UnsupportedError if the model has no experts it knows,
    NonFiniteError for NaN or infinite weights, ShapeError for sizes that are no multiple of 16, each with the module's name. While it
    runs, the weights stand in memory in both forms.
    """
    known = _known(model)
    found = {name: m for name, m in known.items() if filter_fn is None or filter_fn(m, name)}
    if not found:
        _check_why_none(model, bool(known))
    made = {name: convert(m, config, name) for name, m in progress(found.items(), "quantizing experts", len(found))}
    for name, module in made.items():
        model.set_submodule(name, module)


def _known(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are converted, none inside of another: what calls it may count on what the other is."""
    if converter_of(model):
        raise UnsupportedError(
            f"{type(model).__name__}, which is not part of a model", expected="a model with such modules inside",
            todo="fusion_moe.nn.convert(module) returns its replacement",
        )  # fmt: skip
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if converter_of(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _check_why_none(model: nn.Module, filtered: bool) -> None:
    """Nothing to do is right for a model that is quantized already, and an error that says why for any other."""
    if any(isinstance(m, (NVFP4Experts, GroupedLinear)) for m in model.modules()):
        return
    others = {f"{name} ({type(m).__name__})" for name, m in model.named_modules() if any(p.dim() == 3 for p in m.parameters(recurse=False))}
    if filtered:
        raise UnsupportedError("filter_fn rejected all experts", expected="True for at least one", where=type(model).__name__)
    raise UnsupportedError(
        f"no experts that can be quantized; modules with 3-D weights: {', '.join(sorted(others)) or 'none'}",
        expected=f"one of {', '.join(known_names())}",
        todo="other architectures are not supported yet; NVFP4Experts.from_float builds the module from [E, 2I, H] and [E, H, I] weights",
        where=type(model).__name__,
    )
