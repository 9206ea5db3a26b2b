"""What `save_pretrained` needs: the names and shapes of tensors in files, and the configuration
that describes them.

What was quantized here is written as `checkpoints/written.py` says, NVFP4 always as ModelOpt writes
it. Experts keep the names that they had in files, or get those that transformers reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ...checkpoints import MODELOPT, MODELOPT_FUSED, PER_EXPERT, own_entries
from ...checkpoints.configurations import PRODUCER, modelopt_config
from ...checkpoints.written import GPT_OSS, Form, form_of
from ...encodings import MXFP4, NVFP4, Encoding
from ...errors import OptionError, UnsupportedError
from ...nn import QuantizedLinear, contract_of
from ...nn.frozen import PackedModule, Projections
from .names import parameter_of
from .sources import Row, Source
from .tensors import stored

Sources = Mapping[str, Source]


class SaveExperts(ConversionOps):
    """Reversed: a parameter of experts -> the tensors that it has in files. name: the module's."""

    def __init__(self, name: str, row: Row):
        self.name, self.row = name, row

    def convert(
        self, input_dict: dict[str, Any], *_: Any, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        """The tensors by their names, before transformers' own renamings: before 5.21, it has
        renamed `full_layer_name` already.
        """
        ((t,),) = input_dict.values()
        there = full_layer_name.removesuffix(f".{self.row.parameter}")
        return {
            there + name.removeprefix(self.name) if name.startswith(self.name) else name: one
            for name, one in stored(self.row, t)
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Itself: it is made to be reversed."""
        return self


def conversions_for_saving(model: Any, sources: Sources) -> list[Any]:
    """The conversions that transformers reverses. sources: where the experts were loaded from."""
    rows, below = list[tuple[str, SaveExperts]](), set[tuple[str, str]]()
    for name, source, module in _with_sources(model, sources):
        above, _, last = name.rpartition(".")
        for row in source.rows(module):
            rows.append((re.escape(f"{name}.{row.parameter}"), SaveExperts(name, row)))
            below.update(
                (above, f".{last}{one.removeprefix(name)}{row.part.suffix}".replace("*", "0"))
                for one in row.names
            )
    # transformers tries the last one first; before 5.21, a pattern also matches longer names
    rows.sort(key=lambda row: len(row[0]))
    ours = [WeightConverter([pattern], [pattern], [save]) for pattern, save in rows]
    return [*(c for c in _of_transformers(model) if not _renames(c, below)), *ours]


def makes_experts(conversion: Any, model: nn.Module) -> bool:
    """Whether transformers' conversion makes a parameter that modules of ours have."""
    ours = {
        (name.rpartition(".")[2], key)
        for name, module in model.named_modules()
        if isinstance(module, Projections)
        for key in module._parameters
    }
    return isinstance(conversion, WeightConverter) and any(
        parameter_of(target) in ours for target in conversion._original_target_patterns
    )


def linears_as_stored(
    model: Any, linears: Sources, state: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The state of a model whose linear layers in other encodings than NVFP4 are as they were in
    files; `state` if there are none.

    linears: where those that were loaded are. UnsupportedError for one in an encoding that is only
    read.
    """
    others = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, QuantizedLinear) and m.encoding != NVFP4
    }
    if not others:
        return state
    state = dict(model.state_dict() if state is None else state)
    for name, module in others.items():
        source = linears.get(name)
        if source is None or source.scheme.encoding != module.encoding:
            source = Source(name, _form(module, name).scheme, {"weight": ("",)})
        for row in source.rows(module):
            if (t := state.pop(f"{name}.{row.parameter}", None)) is not None:
                state |= dict(stored(row, t))
    return state


def _renames(conversion: Any, names: set[tuple[str, str]]) -> bool:
    """Whether transformers' conversion changes what ours call the tensors of experts: one for a
    shared expert's `down_proj`, say. names: of what is above experts, and from there on.
    """
    if not isinstance(conversion, WeightRenaming):
        return False
    reverse = conversion.reverse_transform()
    return not all(
        reverse.rename_source_key(above + name)[0].endswith(name) for above, name in names
    )


def _with_sources(model: Any, sources: Sources) -> Iterator[tuple[str, Source, Projections]]:
    for name, module in model.named_modules():
        if isinstance(module, Projections) and module.sharding is not None:
            raise UnsupportedError(
                "experts that are divided between ranks, to save",
                expected="all of them here",
                todo="torch.distributed.checkpoint saves what ranks have",
                where=name,
            )
        if isinstance(module, Projections):
            yield name, _source_for_saving(model, name, module, sources.get(name)), module
        elif isinstance(module, PackedModule) and not isinstance(module, QuantizedLinear):
            raise UnsupportedError(
                f"a {type(module).__name__} to save",
                expected="experts or linear layers",
                where=name,
            )


def _source_for_saving(model: Any, name: str, module: Projections, source: Source | None) -> Source:
    if source is not None and _as_loaded(module, source):
        return source
    if _is_gpt_oss(model):
        below = {weight: (f"{weight}_proj",) for weight in module.projections}
        return Source(name, GPT_OSS.scheme, below, interleaved=True)
    scheme = _form(module, name).scheme
    if source is not None:
        return replace(source, scheme=scheme, rounds=False)
    suffix = ".input_scale" if hasattr(module, "down_input_scale") else ""
    names = dict(zip(module.projections, _names(model, module), strict=True))
    return Source(name, scheme, names, input_scale=suffix)


def _as_loaded(module: Projections, source: Source) -> bool:
    """Whether experts are written as they were in files: all but NVFP4 of others than ModelOpt."""
    same = not source.rounds and module.encoding == source.scheme.encoding
    return same and (module.encoding != NVFP4 or source.scheme in (MODELOPT, MODELOPT_FUSED))


def _is_gpt_oss(model: Any) -> bool:
    """Whether the encoded weights are what gpt-oss has: MXFP4 of experts whose gate and up
    alternate.
    """
    encoded = [m for m in model.modules() if isinstance(m, PackedModule)]
    return all(m.encoding == MXFP4 and getattr(m, "interleaved", False) for m in encoded)


def _form(module: PackedModule, name: str) -> Form:
    """How a module is written. UnsupportedError for an encoding that is only read."""
    try:
        return form_of(module.encoding.name)
    except OptionError as error:
        raise UnsupportedError(
            f"weights in {module.encoding.name}",
            expected=f"{error.expected}, or weights as they were loaded",
            where=name,
        ) from None


def _names(model: Any, module: Projections) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names under which transformers reads experts of this model, else the usual names."""
    gated = module.projections[0] == "gate_up"
    for triple in PER_EXPERT:
        names = (triple[:2] if gated else triple[1:2]), triple[2:]
        wanted = f"experts.*.{names[1][0]}.weight"
        if any(
            wanted in pattern
            for c in _of_transformers(model)
            for pattern in c._original_source_patterns
        ):
            break
    else:
        gate, up, down = PER_EXPERT[0]
        names = ((gate, up) if gated else (up,)), (down,)
    return tuple(f"*.{n}" for n in names[0]), tuple(f"*.{n}" for n in names[1])


def _of_transformers(model: Any) -> list[Any]:
    """transformers' conversions: those that loading used, or all of them for a model that was not
    loaded.
    """
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return [c for c in used if not isinstance(getattr(c, "operations", [None])[0], SaveExperts)]
    return [
        c
        for c in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(c, PrefixChange)
    ]


def written_config(model: Any, encoding: Encoding) -> dict[str, Any]:
    """The `quantization_config` that describes the model in its current state, with weights in an
    encoding.
    """
    from ... import __version__

    reverse = [
        c.reverse_transform()
        for c in _of_transformers(model)[::-1]
        if isinstance(c, WeightRenaming)
    ]
    plain = [
        name
        for name, m in model.named_modules()
        if not isinstance(m, PackedModule)
        and (
            contract_of(m)
            or (isinstance(weight := getattr(m, "weight", None), Tensor) and weight.dim() == 2)
        )
    ]
    names = [rename_source_key(name, reverse, [])[0] for name in plain]
    if encoding != NVFP4:
        return (GPT_OSS if _is_gpt_oss(model) else form_of(encoding.name)).config(names)
    scaled = all(
        any(name.endswith("input_scale") for name, _ in m.named_buffers(recurse=False))
        for m in model.modules()
        if isinstance(m, Projections) or (isinstance(m, QuantizedLinear) and m.encoding == NVFP4)
    )
    # one for all
    written = modelopt_config({"": "NVFP4" if scaled else "W4A16_NVFP4"}, names)
    return written | {"producer": PRODUCER | {"version": __version__}}


def with_own_entries(config: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """`quantization_config` with the experts' activation_format and scales if these are not "bf16"
    and "max"; no scales if there are several. UnsupportedError for several activation_formats.
    """
    rest = {key: value for key, value in config.items() if key not in own_entries(config)}
    formats = sorted({m.activation_format for m in model.modules() if isinstance(m, Projections)})
    if len(formats) > 1:
        raise UnsupportedError(
            f"experts with activation_format {' and '.join(formats)} to save",
            expected="one for all of them",
        )
    rules = {m.scales for m in model.modules() if isinstance(m, PackedModule)}
    entries = {"activation_format": formats, "scales": [*rules] if len(rules) == 1 else []}
    return rest | {k: own[0] for k, own in entries.items() if own not in ([], ["bf16"], ["max"])}
