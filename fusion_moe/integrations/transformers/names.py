"""Names of tensors in files as names of a model's parameters: transformers renames some tensors
before it looks for a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

# what `from_pretrained` is told beside transformers' own: patterns of names, and what replaces them
key_mapping: ContextVar[dict[str, str] | None] = ContextVar("fusion_moe_key_mapping", default=None)


def live_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The name in the model of each name in files. A part of a weight is named by the weight's name
    and the part's suffix.
    """
    renamings = [
        c
        for c in get_model_conversion_mapping(model, key_mapping.get())
        # without the name boundaries of 5.21, it also renames `.weight_global_scale`
        if isinstance(c, WeightRenaming) and ".weight_g" not in c._original_source_patterns
    ]
    known = model.state_dict()
    modules = {name for name, _ in model.named_modules()}
    live = {}
    # transformers' order: a renaming may depend on earlier names
    for name in sorted(names, key=dot_natural_key):
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, known)
        if renamed not in known:
            renamed, kept = (_with_prefix(model, n) for n in (renamed, name))
            # as transformers does it for parameters
            if kept in known or (_owner(renamed) not in modules and _owner(kept) in modules):
                renamed = kept
        live[name] = renamed
    return live


def of_heads(model: Any, names: Mapping[str, str]) -> set[str]:
    """Which names from `live_names` belong to heads of other classes: what files have beside the
    base model and this model has no place for.
    """
    prefix = f"{model.base_model_prefix}."
    if not any(name.startswith(prefix) for name in names):
        return set()
    own = () if model.base_model is model else model._modules
    return {
        live
        for name, live in names.items()
        if not name.startswith(prefix) and live.partition(".")[0] not in own
    }


def _with_prefix(model: Any, name: str) -> str:
    """Adds or removes the prefix of the base model, as transformers does for parameters, of which
    parts of weights are none.
    """
    (first, _, rest), prefix, base = name.partition("."), model.base_model_prefix, model.base_model
    if base is model:
        return rest if first == prefix else name
    return f"{prefix}.{name}" if first not in model._modules and first in base._modules else name


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def any_of(patterns: Iterable[str] | None) -> re.Pattern[str]:
    """One pattern for several; without any, a pattern that never matches."""
    return re.compile("|".join(f"(?:{p})" for p in patterns or ()) or "(?!)")


def parameter_of(target: str) -> tuple[str, ...]:
    """The last two parts of the name that a pattern stands for: the module's and the
    parameter's.
    """
    return tuple(target.replace("\\.", ".").split(".")[-2:])
