"""quantize_: converts the experts of a model from floating point to NVFP4, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from ... import plugins
from ...errors import OptionError, UnsupportedError
from ...messages.progress import progress
from ..config import NVFP4Config
from ..frozen.grouped import NVFP4GroupedLinear
from ..frozen.packed import PackedModule
from ..frozen.prepare import prepare_
from ..frozen.projections import Projections
from .converters import DECORATED, check, converted, converter_of, known_names, why_refused

log = logging.getLogger("fusion_moe")
Filter = Callable[[nn.Module, str], bool]


def quantize_(
    model: nn.Module, config: NVFP4Config | None = None, filter_fn: Filter | None = None
) -> None:
    """Replaces the expert modules of a model by those of fusion_moe.nn, in place. Everything else
    stays as it is.

    A layer that is known as a whole is replaced as a whole, and its submodules are not looked at.
    Each module is replaced as soon as its weights are quantized, so that only one is in memory in
    both forms. After an interruption, another call completes the work. A model whose experts are
    all replaced already stays as it is, with a warning.

    Args:
        model: the model, in floating point.
        config: how experts are quantized and computed; None: `NVFP4Config()`.
        filter_fn: filter_fn(module, name) chooses modules; None: all are replaced.

    Raises:
        UnsupportedError: if the model has no experts that it knows.
        NonFiniteError: for NaN or infinite weights.
        ShapeError: for sizes that are not multiples of 16.
        OptionError: for an invalid config.

    An error names the module, and comes before anything changes.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"a {type(model).__name__}",
            expected="a torch.nn.Module with experts",
            where="quantize_",
        )
    if config is not None and not isinstance(config, NVFP4Config):
        raise OptionError(
            f"config = {config!r}", expected="fusion_moe.NVFP4Config(), or none", where="quantize_"
        )
    names = chosen(model, filter_fn)
    modules = [model.get_submodule(name) for name, *_ in names]
    sizes = [sum(p.nbytes for p in module.parameters()) for module in modules]
    del modules  # each is freed once it is replaced
    for name, *_ in progress(names, "checking experts", len(names), sizes):
        check(model.get_submodule(name), config, name)
    for name, *others in progress(names, "quantizing experts", len(names), sizes):
        replacement = converted(model.get_submodule(name), config, name)
        for each in (name, *others):
            model.set_submodule(each, replacement)
        for module in replacement.modules():
            if isinstance(module, PackedModule):
                module.order()
    if config is not None and config.weights != "packed":
        prepare_(model, weights=config.weights)  # type: ignore[arg-type]  # checked by NVFP4Config
    for tell in plugins.quantized:
        tell(model)


def chosen(model: nn.Module, filter_fn: Filter | None) -> list[list[str]]:
    """The names of each module to convert, none inside of another: the outer one may depend on what
    the inner one is. UnsupportedError if there are none and the model is not quantized already.
    """
    known: list[str] = []
    names = dict[int, list[str]]()
    for name, module in model.named_modules(remove_duplicate=False):
        if converter_of(module) and not any(name.startswith(f"{outer}.") for outer in known):
            known.append(name)
            if filter_fn is None or filter_fn(module, name):
                names.setdefault(id(module), []).append(name)
    if "" in known:
        raise UnsupportedError(
            f"{type(model).__name__}, which is not part of a model",
            expected="a model with such modules inside",
            todo="fusion_moe.nn.convert(module) returns its replacement",
        )
    if not names:
        _check_why_none(model, bool(known))
    return list(names.values())


def _check_why_none(model: nn.Module, filtered: bool) -> None:
    """If nothing is to be converted: a warning for a model that is quantized already, otherwise an
    error that says why.
    """
    where, modules = type(model).__name__, dict(model.named_modules())
    there = [m for m in modules.values() if isinstance(m, (Projections, NVFP4GroupedLinear))]
    if there:
        log.warning(
            "quantize_ changes nothing: experts of this %s are in %s already%s",
            where,
            ", ".join(dict.fromkeys(m.encoding.name for m in there)),
            ", and filter_fn rejects the others" if filtered else "",
        )
        return
    if filtered:
        raise UnsupportedError(
            "filter_fn rejected all experts", expected="True for at least one", where=where
        )
    others = [
        f"{name} ({type(m).__name__}{f': {why}' if (why := why_refused(m)) else ''})"
        for name, m in modules.items()
        if why_refused(m) or any(p.dim() == 3 for p in m.parameters(recurse=False))
    ]
    raise UnsupportedError(
        "no experts that can be quantized; modules with 3-D weights: "
        f"{', '.join(sorted(others)) or 'none'}",
        expected=f"{DECORATED}, or {known_names()}",
        todo="fusion_moe.register_converter adds a class; NVFP4Experts.from_float makes the "
        "module of [E, 2I, H] and [E, H, I] weights",
        where=where,
    )
