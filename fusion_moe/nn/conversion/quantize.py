"""quantize_: converts a model from floating point to a format of few bits, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ... import plugins
from ...encodings import Encoding
from ...errors import Error, ShapeError, UnsupportedError
from ...messages import check_skip, fits, log, skipping, some
from ...messages.progress import progress
from ..config import NVFP4Config, QuantizationConfig, config_of
from ..frozen import NVFP4GroupedLinear, PackedModule, Projections, prepare_
from .converters import (
    DECORATED,
    check,
    converted,
    converter_of,
    how_to_register,
    qualified,
    why_refused,
)

Filter = Callable[[nn.Module, str], bool]
# linear layers that stay: small ones that decide much, output embeddings, and what reads images
KEPT = ("*gate", "*router*", "*lm_head", "*vision*", "*visual*")


def quantize_(
    model: nn.Module,
    config: str | QuantizationConfig | None = None,
    filter_fn: Filter | None = None,
    *,
    skip: Sequence[str] = (),
    linear: bool = False,
) -> None:
    """Replaces the expert modules of a model by those of fusion_moe.nn, in place. Everything else
    stays as it is.

    A layer that is known as a whole is replaced as a whole, and its submodules are not looked at.
    Each module is replaced as soon as its weights are quantized, so that only one is in memory in
    both forms. After an interruption, another call completes the work. A model whose experts are
    all replaced already stays as it is, with a warning. Experts that `qat_` trains keep their
    format, which config may name, and their scales.

    Args:
        model: the model, in floating point.
        config: a format, "nvfp4", "mxfp4", "int4" or "fp8"; or how weights are quantized and
            computed: `NVFP4Config()`, `MXFP4Config()`, `INT4Config()`, `FP8Config()`. None: NVFP4.
        filter_fn: filter_fn(module, name) chooses modules; None: all are replaced.
        skip: names of modules that stay as they are, beside those that config names, with all that
            is in them; in a name `*` stands for any text: "*.layers.0.*".
        linear: whether linear layers outside of experts are replaced too, by `QuantizedLinear`:
            attention, dense layers, shared experts. Output embeddings, routers and what reads
            images stay, by their names; those whose K is not whole blocks stay, with a warning,
            if anything else is replaced.

    Raises:
        UnsupportedError: if the model has no experts that it knows, or some that cannot have this
            format.
        NonFiniteError: for NaN or infinite weights.
        ShapeError: for sizes that are not whole blocks of the format, of 16 in NVFP4, of 32 in
            MXFP4 and INT4.
        OptionError: for an invalid config, or a name to skip that fits no module.

    An error names the module, and comes before anything changes.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"a {type(model).__name__}",
            expected="a torch.nn.Module with experts",
            todo="quantize_ changes a model in place and returns nothing" if model is None else "",
            where="quantize_",
        )
    how = None if config is None else config_of(config, "quantize_")
    if how is not None:
        skip, linear = (*how.skip, *skip), how.linear or linear
    names = chosen(model, _unless_skipped(model, filter_fn, skip), linear)
    names = _without_odd_layers(model, names, (how or NVFP4Config()).encoding)
    modules = [model.get_submodule(name) for name, *_ in names]
    sizes = [sum(p.nbytes for p in module.parameters()) for module in modules]
    del modules  # each is freed once it is replaced
    for name, *_ in progress(names, "checking weights", len(names), sizes):
        try:
            check(model.get_submodule(name), how, name)
        except Error as error:
            raise error.advise(skipping(name)) from None
    for name, *others in progress(names, "quantizing weights", len(names), sizes):
        replacement = converted(model.get_submodule(name), how, name)
        for each in (name, *others):
            model.set_submodule(each, replacement)
        for module in replacement.modules():
            if isinstance(module, PackedModule):
                module.order()
    if how is not None and how.weights != "packed":
        prepare_(model, weights=how.weights)  # type: ignore[arg-type]  # checked by the config
    for tell in plugins.quantized:
        tell(model)


def _unless_skipped(model: nn.Module, filter_fn: Filter | None, skip: Sequence[str]) -> Filter:
    """filter_fn, for what is not skipped."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    check_skip(skip, names, "quantize_")

    def wanted(module: nn.Module, name: str) -> bool:
        return not fits(name, skip) and (filter_fn is None or filter_fn(module, name))

    return wanted


def _without_odd_layers(
    model: nn.Module, names: list[list[str]], encoding: Encoding
) -> list[list[str]]:
    """Without linear layers whose K is no whole blocks of an encoding, if there is anything else to
    replace: `linear=True` asks for many layers, of which a few small ones may stay.
    """
    odd: dict[str, int] = {}
    for name, *_ in names:
        layer = model.get_submodule(name)
        if type(layer) is nn.Linear:
            try:
                encoding.packed(layer.in_features)
            except ShapeError:
                odd[name] = layer.in_features
    if not odd or len(odd) == len(names):
        return names
    log.warning(
        "linear layers stay as they are, whose K is no whole blocks of %s: %s",
        encoding.name,
        some([f"{name} (K = {k})" for name, k in odd.items()]),
    )
    return [each for each in names if each[0] not in odd]


def chosen(
    model: nn.Module, filter_fn: Filter | None, linear: bool = False, trained: bool = False
) -> list[list[str]]:
    """The names of each module to convert, none inside of another: the outer one may depend on what
    the inner one is. UnsupportedError if there are none and the model is not quantized already, or
    is to be trained.
    """
    known: list[str] = []
    names = dict[int, list[str]]()
    embeds: Any = getattr(model, "get_output_embeddings", None)
    head = embeds() if embeds else None
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear and (not linear or module is head or fits(name, KEPT)):
            continue
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
        _check_why_none(model, bool(known), trained)
    return list(names.values())


def quantized_experts(model: nn.Module) -> dict[str, Projections | NVFP4GroupedLinear]:
    """The experts of a model that are quantized already, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (Projections, NVFP4GroupedLinear))
    }


def _check_why_none(model: nn.Module, filtered: bool, trained: bool) -> None:
    """If nothing is to be converted: a warning for a model that is quantized already, otherwise an
    error that says why.
    """
    where, modules = type(model).__name__, dict(model.named_modules())
    there = quantized_experts(model).values()
    if there and trained and not filtered:
        kinds = dict.fromkeys(f"{type(m).__name__} in {m.encoding.name}" for m in there)
        raise UnsupportedError(
            f"no experts but {', '.join(kinds)}",
            expected="experts in floating point, which train",
            todo="load the model in floating point; or train adapters: fusion_moe.nn.add_lora_",
            where=where,
        )
    if there and not trained:
        log.warning(
            "quantize_ changes nothing: experts of this %s are in %s already%s; for another format "
            "load the model in floating point",
            where,
            ", ".join(dict.fromkeys(m.encoding.name for m in there)),
            ", and filter_fn or skip leaves the others out" if filtered else "",
        )
        return
    if filtered:
        raise UnsupportedError(
            "filter_fn or skip leaves all experts out",
            expected="at least one to quantize",
            where=where,
        )
    others = {
        f"{name} ({qualified(m)}{f': {why}' if (why := why_refused(m)) else ''})": m
        for name, m in modules.items()
        if why_refused(m)
        or any(
            t.dim() == 3 for t in (*m._parameters.values(), *m._buffers.values()) if t is not None
        )
    }
    unknown = next((m for m in others.values() if not why_refused(m)), None)
    raise UnsupportedError(
        "no experts that can be quantized; modules with 3-D weights: "
        f"{', '.join(sorted(others)) or 'none'}",
        expected=DECORATED if others or trained else "experts, or linear=True for linear layers",
        todo=how_to_register(unknown)
        if others or trained
        else "fusion_moe.register_converter adds other experts",
        where=where,
    )
