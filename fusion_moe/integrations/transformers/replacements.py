"""How loading a checkpoint changes a model: which modules are replaced, and whether the files have
all tensors that these need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from ...checkpoints import (
    KNOWN,
    Entry,
    Packing,
    Read,
    StoredWeight,
    all_eight_bits,
    expert_of,
    predicts_further_tokens,
    stored_weights,
)
from ...checkpoints.integers import USUAL
from ...encodings import NVFP4, Encoding, Quantized
from ...encodings.encoding import FLOATS as PLAIN
from ...errors import CheckpointError, ShapeError, UnsupportedError
from ...messages import log, some
from ...nn import (
    ExpertsContract,
    Llama4MoE,
    NVFP4Config,
    QuantizationConfig,
    QuantizedLinear,
    contract_of,
    convert,
)
from ...nn.conversion.converters import by_contract
from ...nn.frozen import PackedModule, Projections
from .names import any_of, live_names, of_heads
from .on_load import layout_of
from .sources import FLOATS, INPUT_SCALES, Source, Weights, find_experts, weights_of


@dataclass
class Replacements:
    """What is stored encoded, and where.

    entries: tensors by their names in the model; in_files: the names in files of these; weights: by
    their names in the model; experts: modules of ours, by name; floats: modules of experts that get
    theirs in floats; linears: other modules with one weight; converted: the names of weights in
    floats that transformers makes parameters of, and of these; taken: the tensors that belong to
    any of them.
    """

    entries: Mapping[str, Entry]
    in_files: Mapping[str, str]
    weights: Mapping[str, StoredWeight]
    experts: dict[str, Source] = field(default_factory=dict)
    floats: dict[str, Source] = field(default_factory=dict)
    linears: dict[str, Source] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def below(self, name: str) -> bool:
        """Whether a tensor is below a module that has encoded weights."""
        while name and not any(name in of for of in (self.experts, self.floats, self.linears)):
            name = name.rpartition(".")[0]
        return bool(name)

    def check_fixed(self, read: Read) -> None:
        """CheckpointError for parts of these weights that must have certain values and have others
        (`StoredWeight.check_fixed`). read: gets a tensor by its name in the files.
        """
        for weight in self.weights.values():
            weight.check_fixed(lambda name: read(self.in_files[name]))

    def take(self, source: Source, weights: Iterable[StoredWeight]) -> Source:
        """Marks the tensors of weights as belonging to a module, and the scales of activations if
        each weight has one. Returns the source with these.
        """
        names = [weight.name for weight in weights]
        for name in names:
            self.taken.update(entry.name for entry in self.weights[name].entries.values())
        # those of 8-bit floats mean something else in NVFP4
        for suffix in () if source.rounds else INPUT_SCALES:
            if all(name + suffix in self.entries for name in names):
                self.taken.update(name + suffix for name in names)
                return replace(source, input_scale=suffix)
        return source


def replace_modules(
    model: Any,
    tensors: Mapping[str, Entry],
    method: str,
    config: QuantizationConfig,
    quantizes: bool = False,
    packing: Packing = USUAL,
) -> Replacements:
    """Puts modules of fusion_moe.nn, on the meta device, in the place of modules whose tensors in
    the files are encoded weights.

    method: `quant_method` of the configuration; packing: what it says of integers. quantizes:
    whether experts in 8-bit floats, and those in floats beside them, may be rounded to the format
    of config. CheckpointError for an incomplete weight or one that no module takes,
    UnsupportedError for one of a module that cannot have it.
    """
    names = live_names(model, tensors)
    _check_names(names)
    entries = {live: replace(tensors[name], name=live) for name, live in names.items()}
    stored = stored_weights(entries, method, packing)
    in_files = {live: name for name, live in names.items()}
    replaced = Replacements(entries, in_files, {**_floats(entries), **stored})
    keeps_fp8 = not quantizes and all_eight_bits(stored)
    # experts in floats are rounded with those in 8-bit floats of other layers
    together = quantizes and any(map(_is_fp8_expert, stored.values()))
    encoded = replaced.weights if together else stored
    for name, module in dict(model.named_modules()).items():
        if (experts := _experts_at(name, module, replaced.weights, encoded)) is not None:
            _replace_experts(replaced, model, name, module, *experts, config, quantizes)
        elif (
            name in stored
            and isinstance(module._parameters.get("weight"), nn.Parameter)
            and not isinstance(module, nn.Embedding)
        ):
            _replace_linear(replaced, model, name, module, stored[name], keeps_fp8)
    _check_none_left(model, replaced, names, stored)
    _check_beside(model, replaced)
    _warn_of_rounding(stored)
    _warn_of_floats(model, replaced)
    return replaced


def _check_names(names: Mapping[str, str]) -> None:
    """CheckpointError for two tensors of files that are one of the model, with and without the
    prefix of its base model, say.
    """
    first: dict[str, str] = {}
    for name, live in names.items():
        if first.setdefault(live, name) != name and not name.endswith(KNOWN):
            raise CheckpointError(
                f"{first[live]} and {name}", expected="one of the two", where=f"{live} of the model"
            )


def _check_none_left(
    model: Any, replaced: Replacements, names: Mapping[str, str], stored: Weights
) -> None:
    """UnsupportedError for an encoded weight of a module that cannot have one, CheckpointError for
    one of no module.
    """
    # transformers ignores others, or reads them by itself
    ignored = any_of(model._keys_to_ignore_on_load_unexpected)
    others = replaced.taken | of_heads(model, names)
    config = model.config.to_dict()
    left = [
        w
        for w in stored.values()
        if w.name not in replaced.linears
        and not predicts_further_tokens(f"{w.name}.", config)
        and any(e.name not in others and not ignored.search(e.name) for e in w.entries.values())
    ]
    for weight in left:
        expert_of(weight.name)  # raises for experts by unusual numbers
    left = [weight for weight in left if not _converted(model, replaced, weight)]
    if not left:
        return
    owner, modules = left[0].name, dict(model.named_modules())
    while owner not in modules:
        owner = owner.rpartition(".")[0]
    where = type(model).__name__
    if modules[owner]._parameters and owner not in replaced.experts:
        raise UnsupportedError(
            f"{left[0].name} in {left[0].scheme.name}, of a {type(modules[owner]).__name__}",
            expected="experts of a known class, or a linear layer",
            where=where,
        )
    tensors = [entry.name for weight in left for entry in weight.entries.values()]
    raise CheckpointError(
        f"{some(tensors)}, of no module",
        expected="a module for each weight",
        todo="check the names of modules, and the numbers of layers and experts in config.json, or "
        "give fusion_moe.transformers.from_pretrained a key_mapping",
        where=where,
    )


def _converted(model: Any, replaced: Replacements, weight: StoredWeight) -> bool:
    """Whether transformers makes a parameter of several weights, one of which this is."""
    mapping = get_model_conversion_mapping(model)
    converters = [c for c in mapping if isinstance(c, WeightConverter)]
    name = f"{weight.name}.weight"
    parameter, pattern = rename_source_key(name, [], converters, model.base_model_prefix)
    of_ours = parameter.rpartition(".")[0] in replaced.experts | replaced.floats
    if pattern is None or of_ours or parameter not in model.state_dict():
        return False
    replaced.converted[weight.name] = parameter
    replaced.taken.update(entry.name for entry in weight.entries.values())
    return True


def _warn_of_floats(model: Any, replaced: Replacements) -> None:
    """Warns of layers whose experts take the memory of floats."""
    if replaced.floats:
        log.warning(
            "%s: experts in several formats become %s, without loss in float32; "
            "quantization_config=NVFP4Config() encodes all of them",
            some([*replaced.floats]),
            str(model.dtype).removeprefix("torch."),
        )


def _warn_of_rounding(stored: Weights) -> None:
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


def _is_fp8_expert(weight: StoredWeight) -> bool:
    return weight.scheme.eight_bits and expert_of(weight.name) is not None


def _floats(entries: Mapping[str, Entry]) -> dict[str, StoredWeight]:
    """The weights of experts in floats."""
    return {
        weight: StoredWeight(weight, FLOATS, {"values": entry}, entry.shape)
        for name, entry in entries.items()
        if entry.dtype in PLAIN and expert_of(weight := name.removesuffix(".weight")) is not None
    }


def _experts_at(
    name: str, module: nn.Module, weights: Weights, encoded: Weights
) -> tuple[Source, ExpertsContract] | None:
    """Where a module of experts is stored, if some of them are encoded, and their layout."""
    of_llama4 = type(module).__name__ == "Llama4TextMoe"
    contract = layout_of(module.experts) if of_llama4 else contract_of(module)
    if contract is None:
        return None
    source = find_experts(
        f"{name}.experts" if of_llama4 else name,
        contract.has_gate,
        contract.has_gate and not contract.concatenated,
        contract.experts,
        weights,
        encoded,
    )
    return (source, contract) if source else None


def _replace_experts(
    replaced: Replacements,
    model: Any,
    name: str,
    module: nn.Module,
    source: Source,
    contract: ExpertsContract,
    config: QuantizationConfig,
    quantizes: bool,
) -> None:
    shapes = {"gate_up" if contract.has_gate else "up": contract.up_shape}
    weights = weights_of(source, {**shapes, "down": contract.down_shape}, replaced.weights)
    several = len({weight.scheme for weight in weights}) > 1
    plain = source.scheme.encoding is not None and source.scheme.encoding.plain
    source = replace(source, rounds=quantizes and (several or plain or source.scheme.eight_bits))
    if several and not source.rounds:
        # the numbers of all of them, in the module's own parameters
        replaced.floats[source.name] = replaced.take(replace(source, rounds=True), weights)
        return
    encoding = config.encoding if source.rounds else source.scheme.encoding
    assert encoding is not None, "FP8 whose scales fit is in one"
    # NVFP4's configuration is also that of how others are computed
    if config.encoding != NVFP4 and config.encoding.name not in encoding.name:
        raise UnsupportedError(
            f"experts in {encoding.name}",
            expected=f"{config.encoding.name}, or floats to be rounded, by quantization_config",
            todo='without it they stay as they are; convert them to="dense" to round that again',
            where=name,
        )
    with torch.device("meta"):
        try:
            replacement = _on_meta(module, encoding, config, name, source)
        except ShapeError as error:
            raise error.at(name) from None
        experts = replacement.experts if isinstance(replacement, Llama4MoE) else replacement
        assert isinstance(experts, Projections)
        model.set_submodule(name, replacement)
        source = replaced.take(source, weights)
        for projection in experts.projections if source.input_scale else ():
            # nothing here reads the scales of activations, but saving writes them again
            count = experts.shape_of(projection)[0]
            shape = (count, 2) if projection == "gate_up" else (count,)
            scales = torch.empty(shape, dtype=torch.float32)
            experts.register_buffer(f"{projection}_input_scale", scales)
    experts.scales = config.scales
    replaced.experts[source.name] = source


def _on_meta(
    module: nn.Module, encoding: Encoding, config: QuantizationConfig, name: str, source: Source
) -> nn.Module:
    """The replacement for a module of experts, without weights."""
    if encoding == NVFP4:
        return convert(module, NVFP4Config(config.activation_format, config.weights), name)
    contract = contract_of(module)
    if contract is None:
        raise UnsupportedError(
            f"experts in {encoding.name}",
            expected="experts in NVFP4",
            where=f"{name} ({type(module).__name__})",
        )
    shapes = contract.up_shape, contract.down_shape
    runs = (len(names) if len(names) > 1 else 0 for names in source.names.values())
    weights = [_weight(encoding, shape, r) for shape, r in zip(shapes, runs, strict=True)]
    return by_contract(module, config, weights)


def _weight(encoding: Encoding, shape: tuple[int, ...], runs: int = 0) -> Quantized:
    """A weight without values, on the default device. runs: of rows, with a scale each."""
    *lead, n, k = shape
    shapes = ((encoding.part_shape(p, lead, n, k, runs), p.dtype) for p in encoding.parts)
    return Quantized(
        *(torch.empty(shape, dtype=dtype) for shape, dtype in shapes),
        encoding=encoding,
    )


def _replace_linear(
    replaced: Replacements,
    model: Any,
    name: str,
    module: nn.Module,
    weight: StoredWeight,
    keeps_fp8: bool,
) -> None:
    """A QuantizedLinear for a linear layer in an encoding; any other module gets its weight in
    floats, and stays, and so does one in 8-bit floats unless keeps_fp8.
    """
    shape = tuple(module.get_parameter("weight").shape)
    if weight.shape != shape:
        raise CheckpointError(
            f"{name} is {list(weight.shape)}",
            expected=f"{list(shape)}, as the model",
            where=weight.scheme.name,
        )
    source = replaced.take(Source(name, weight.scheme, {"weight": ("",)}), [weight])
    encoding = source.scheme.encoding if keeps_fp8 or not source.scheme.eight_bits else None
    if encoding is not None and type(module) is nn.Linear:
        with torch.device("meta"):
            linear = QuantizedLinear(_weight(encoding, shape), module._parameters["bias"])
            if source.input_scale:
                linear.register_buffer("input_scale", torch.empty((), dtype=torch.float32))
        model.set_submodule(name, linear)
    replaced.linears[name] = source


def _check_beside(model: nn.Module, replaced: Replacements) -> None:
    """Takes biases and scales of activations. CheckpointError for those that files do not have for
    each matrix, or not as many numbers of them.
    """
    for name, source in (replaced.experts | replaced.floats | replaced.linears).items():
        for tensor, size in _beside(model.get_submodule(name), source):
            entry = replaced.entries.get(tensor)
            if entry is None or prod(entry.shape) != size:
                raise CheckpointError(
                    f"{entry}" if entry else f"no {tensor}", expected=f"[{size}]", where=name
                )
            replaced.taken.add(tensor)


def _beside(module: nn.Module, source: Source) -> Iterator[tuple[str, int]]:
    """The tensors of a module that are no part of a weight, with how many numbers each has."""
    if isinstance(module, PackedModule):
        for row in source.rows(module):
            if row.part not in source.scheme.parts:
                like, of_expert = getattr(module, row.parameter), "*" in row.names[0]
                experts = range(len(like) if of_expert else 1)
                size = 1 if row.part.direction else like.numel() // len(experts) // len(row.names)
                for e in experts:
                    yield from ((n.replace("*", str(e)) + row.part.suffix, size) for n in row.names)
    elif (contract := layout_of(module)) is not None and contract.has_bias:
        rows = contract.up_shape[1], contract.down_shape[1]
        for (projection, names), n in zip(source.names.items(), rows, strict=True):
            for each in source.weights(projection, contract.experts):
                yield from ((f"{one}.bias", n // len(names)) for one in each)
