"""Checks that files have a tensor for every parameter: transformers fills gaps with random numbers
and prints a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.core_model_loading import WeightConverter, rename_source_key

from ...checkpoints import KNOWN
from ...errors import CheckpointError
from ...messages import some
from .names import any_of
from .replacements import Replacements


def check_complete(
    replaced: Replacements, model: Any, conversions: list[Any], unexpected: Iterable[str] | None
) -> None:
    """CheckpointError for parameters of which the files have nothing, but for encoded ones and new
    heads; and for tensors below a module with encoded weights that it does not have, such as
    biases. Checks names only: conversions change them. unexpected: patterns of tensors that the
    class ignores.
    """
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    others = replaced.entries.keys() - replaced.taken
    made = {name: _made_of(name, converters) for name in others}
    provided = {result for results in made.values() for result in results} | new_heads(model)
    tied, ignored = model.all_tied_weights_keys, any_of(model._keys_to_ignore_on_load_missing)
    known = model.state_dict()
    missing = [
        name
        for name in known
        if name not in provided and tied.get(name) not in provided and not ignored.search(name)
    ]
    if missing:
        raise CheckpointError(
            f"nothing for {some(missing)}",
            expected=f"all {len(known)} parameters",
            where=type(model).__name__,
        )
    places, left_out = {*known} | {*tied}, any_of(unexpected)
    left = [
        name
        for name in sorted(others)
        if replaced.below(name) and places.isdisjoint(made[name])
        if not name.endswith(KNOWN) and not left_out.search(name)
    ]
    if left:
        raise CheckpointError(
            f"{some(left)}, which no module has",
            expected="tensors that are used",
            todo="config.json says whether layers have biases",
            where=type(model).__name__,
        )


def new_heads(model: Any) -> set[str]:
    """The parameters beside the base model that transformers may make anew, with a warning: those
    of a classifier, say, of a directory that was saved by another class. The output embedding is
    none of them: without it, a model generates noise.
    """
    if model.base_model is model or type(model).__name__ in (model.config.architectures or ()):
        return set()
    output, base = model.get_output_embeddings(), f"{model.base_model_prefix}."
    known = {id(p) for p in output.parameters()} if output is not None else set()
    return {
        name
        for name, p in model.named_parameters()
        if not name.startswith(base) and id(p) not in known
    }


def _made_of(name: str, converters: list[WeightConverter]) -> list[str]:
    """The parameters that a tensor is a part of."""
    parameter, pattern = rename_source_key(name, [], converters)
    if pattern is None:
        return [parameter]
    first, *others = next(c.target_patterns for c in converters if pattern in c.source_patterns)
    return [parameter, *(parameter.replace(first, other) for other in others)]
