"""How loading a checkpoint changes a model: which modules are replaced, and whether the files have
all tensors that these need.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..checkpoints import Entry, Scheme, StoredWeight, stored_weights
from ..checkpoints.experts import expert_of, hidden_layers_of, predicts_further_tokens
from ..encodings import NVFP4, Encoding, Quantized
from ..encodings.encoding import FLOATS
from ..errors import CheckpointError, UnsupportedError
from ..nn import Llama4MoE
from ..nn.config import NVFP4Config
from ..nn.conversion.contract import contract_of, experts_from
from ..nn.conversion.converters import convert
from ..nn.frozen.projections import Projections
from .names import any_of, live_names, of_heads
from .sources import INPUT_SCALES, ExpertsSource, Stored, find_experts, some, weights_of
from .stored_module import StoredModule

log = logging.getLogger("fusion_moe")


@dataclass
class Replacements:
    """The replaced modules by name, and where each is stored.

    entries: tensors by their names in the model; taken: those that belong to experts; linears: the
    schemes of other modules.
    """

    entries: Mapping[str, Entry]
    experts: dict[str, ExpertsSource] = field(default_factory=dict)
    linears: dict[str, Scheme] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def take(self, weight: StoredWeight) -> None:
        """Marks a weight's tensors as belonging to a module."""
        self.taken.update(entry.name for entry in weight.entries.values())


def replace_modules(
    model: Any,
    tensors: Mapping[str, Entry],
    method: str,
    config: NVFP4Config,
    quantizes: bool = False,
) -> Replacements:
    """Puts modules of fusion_moe.nn, on the meta device, in the place of modules whose tensors in
    the files are encoded weights.

    method: `quant_method` of the configuration. quantizes: whether experts in 8-bit floats, and
    those in floats beside them, may be rounded to NVFP4. CheckpointError for an incomplete weight
    or one that no module takes, UnsupportedError for one of a module that cannot have it, and for
    experts in several encodings whose tensors have the same names.
    """
    names = live_names(model, tensors)
    replaced = Replacements(
        {live: replace(tensors[name], name=live) for name, live in names.items()}
    )
    stored = stored_weights(replaced.entries, method)
    modules = dict(model.named_modules())
    sources = _sources(modules, stored)
    _check_schemes(sources.values())
    floats = _floats(replaced.entries, sources.values()) if quantizes else {}
    sources |= _sources(
        {name: module for name, module in modules.items() if name not in sources}, floats
    )
    of_experts = {**floats, **stored}
    for name, module in modules.items():
        if name in sources:
            _replace_experts(
                replaced, model, name, module, sources[name], of_experts, config, quantizes
            )
        elif (
            name in stored
            and isinstance(module._parameters.get("weight"), nn.Parameter)
            and not isinstance(module, nn.Embedding)
        ):
            _replace_linear(replaced, model, name, module, stored[name])
    _check_none_left(model, replaced, names, stored)
    _warn_of_rounding(stored)
    return replaced


def _check_none_left(
    model: Any, replaced: Replacements, names: Mapping[str, str], stored: Stored
) -> None:
    """UnsupportedError for an encoded weight of a module that cannot have one, CheckpointError for
    one of no module.
    """
    # transformers ignores others, or reads them by itself
    ignored = any_of(model._keys_to_ignore_on_load_unexpected)
    others = replaced.taken | of_heads(model, names)
    layers = hidden_layers_of(model.config.to_dict())
    left = [
        w
        for w in stored.values()
        if w.name not in replaced.linears
        and not predicts_further_tokens(f"{w.name}.", layers)
        and any(e.name not in others and not ignored.search(e.name) for e in w.entries.values())
    ]
    if not left:
        return
    for weight in left:
        expert_of(weight.name)  # raises for experts by unusual numbers
    owner, modules = left[0].name, dict(model.named_modules())
    while owner not in modules:
        owner = owner.rpartition(".")[0]
    where = type(model).__name__
    if modules[owner]._parameters and owner not in replaced.experts:
        of = type(modules[owner]).__name__
        raise UnsupportedError(
            f"{left[0].name} in {left[0].scheme.name}, of a {of}",
            expected="experts of a known class, or a linear layer",
            where=where,
        )
    tensors = [entry.name for weight in left for entry in weight.entries.values()]
    raise CheckpointError(
        f"{some(tensors)}, of no module",
        expected="a module for each weight",
        todo="check the names of modules, and the numbers of layers and experts in config.json",
        where=where,
    )


def _warn_of_rounding(stored: Stored) -> None:
    """Warns of scales that are rounded to the dtype that our kernels read, as transformers does
    when it loads a model in that dtype.
    """
    for weight in stored.values():
        for part in weight.scheme.parts:
            entry = weight.entries[part.part]
            if part.cast == torch.bfloat16 and entry.dtype != part.cast:
                log.warning(
                    "%s, and other scales of %s, are rounded to bfloat16", entry, weight.scheme.name
                )
                return


def _sources(modules: Mapping[str, nn.Module], stored: Stored) -> dict[str, ExpertsSource]:
    """Where modules of experts are stored, by name; only those of encoded ones."""
    return {
        name: source
        for name, module in modules.items()
        if (source := _experts_at(name, module, stored)) is not None
    }


def _check_schemes(sources: Iterable[ExpertsSource]) -> None:
    """UnsupportedError for layers with different schemes: a conversion is for all layers, and would
    take the tensors of both.
    """
    first: dict[tuple[str, bool], ExpertsSource] = {}
    for source in sources:
        other = first.setdefault((source.tail, source.joined), source)
        if source.scheme != other.scheme:
            call = "convert(src, dst, to='dense') makes floats"
            if None in (source.scheme.encoding, other.scheme.encoding):
                call = "quantize(src, dst) makes NVFP4"
            raise UnsupportedError(
                f"experts in {source.scheme.name}, and those of {other.name} in "
                f"{other.scheme.name}",
                expected="one format in all layers",
                todo=f"fusion_moe.checkpoints.{call} of all of them; load that",
                where=source.name,
            )


def _floats(
    entries: Mapping[str, Entry], sources: Iterable[ExpertsSource]
) -> dict[str, StoredWeight]:
    """Weights in floats, as weights without scales in the scheme of the experts in 8-bit floats; {}
    if there are none.
    """
    scheme = next((source.scheme for source in sources if source.scheme.encoding is None), None)
    if scheme is None:
        return {}
    floats, elements = replace(scheme, name="floats"), scheme.parts[0]
    return {
        weight: StoredWeight(weight, floats, {elements.part: entry}, entry.shape)
        for name, entry in entries.items()
        if entry.dtype in FLOATS and (weight := name.removesuffix(elements.suffix)) != name
    }


def _experts_at(name: str, module: nn.Module, stored: Stored) -> ExpertsSource | None:
    if type(module).__name__ == "Llama4TextMoe":
        return find_experts(f"{name}.experts", True, False, stored)
    if (contract := contract_of(module)) is None:
        return None
    return find_experts(name, contract.has_gate, not contract.concatenated, stored)


def _replace_experts(
    replaced: Replacements,
    model: Any,
    name: str,
    module: nn.Module,
    source: ExpertsSource,
    stored: Stored,
    config: NVFP4Config,
    quantizes: bool,
) -> None:
    if source.scheme.encoding is None and not quantizes:
        todo = (
            "quantization_config=fusion_moe.transformers.NVFP4Config() for "
            "fusion_moe.transformers.from_pretrained rounds them to NVFP4"
        )
        raise UnsupportedError(
            f"experts in {source.scheme.name}", expected="experts in 4 bits", todo=todo, where=name
        )
    with torch.device("meta"):
        replacement = _on_meta(module, source.scheme.encoding or NVFP4, config, name)
        experts = replacement.experts if isinstance(replacement, Llama4MoE) else replacement
        assert isinstance(experts, Projections)
        model.set_submodule(name, replacement)
        weights = weights_of(source, experts, stored)
        suffix = _input_scales(replaced, [weight.name for weight in weights])
        for projection in experts.projections if suffix else ():
            # nothing here reads the scales of activations, but saving writes them again
            count = experts.shape_of(projection)[0]
            shape = (count, 2) if projection == "gate_up" else (count,)
            scales = torch.empty(shape, dtype=torch.float32)
            experts.register_buffer(f"{projection}_input_scale", scales)
    replaced.experts[source.name] = replace(source, input_scale=suffix)
    for weight in weights:
        replaced.take(weight)


def _on_meta(module: nn.Module, encoding: Encoding, config: NVFP4Config, name: str) -> nn.Module:
    """The replacement for a module of experts, without weights."""
    if encoding == NVFP4:
        return convert(module, config, name)
    contract = contract_of(module)
    if contract is None:
        raise UnsupportedError(
            f"experts in {encoding.name}",
            expected="experts in NVFP4",
            where=f"{name} ({type(module).__name__})",
        )
    dtype = module.get_parameter("down_proj").dtype
    shapes = contract.up_shape, contract.down_shape
    up, down = (_weight(encoding, shape) for shape in shapes)
    up_bias, down_bias = (
        torch.empty(shape[:2], dtype=dtype) if contract.has_bias else None for shape in shapes
    )
    return experts_from(module, up, down, up_bias, down_bias, config)


def _weight(encoding: Encoding, shape: tuple[int, ...]) -> Quantized:
    """A weight without values, on the default device."""
    *lead, n, k = shape
    return Quantized(
        *(torch.empty(encoding.part_shape(p, lead, n, k), dtype=p.dtype) for p in encoding.parts),
        encoding=encoding,
    )


def _input_scales(replaced: Replacements, weights: list[str]) -> str:
    """The suffix of the scales of activations; "" unless each weight has one. They are then marked
    as taken.
    """
    for suffix in INPUT_SCALES:
        names = [weight + suffix for weight in weights]
        if all(name in replaced.entries for name in names):
            replaced.taken.update(names)
            return suffix
    return ""


def _replace_linear(
    replaced: Replacements, model: Any, name: str, module: nn.Module, weight: StoredWeight
) -> None:
    shape = tuple(module.get_parameter("weight").shape)
    if weight.shape != shape:
        raise CheckpointError(
            f"{name} is {list(weight.shape)}",
            expected=f"{list(shape)}, as the model",
            where=weight.scheme.name,
        )
    keep_input_scale = (
        weight.scheme.encoding == NVFP4 and f"{name}{INPUT_SCALES[0]}" in replaced.entries
    )
    model.set_submodule(name, StoredModule(module, weight, keep_input_scale))
    replaced.linears[name] = weight.scheme
