"""What a report advises to do next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .. import plugins
from ..frontends.float_experts import experts_outside
from ..nn.conversion.converters import converter_of, why_refused
from .build import Seen


def advice_on(owner: Any, seen: Seen) -> Iterator[str]:
    """What to do next, in the order of what it gains."""
    for result in seen.breaks:
        where = result.source or "an unknown line"
        yield f"mend the graph break at {where} ({result.why.partition(': ')[0]})"
    if not isinstance(owner, torch.nn.Module):
        return
    if seen.float_experts:
        yield from _unknown_experts(owner, set(experts_outside(owner)))
    if any(graph.regions for graph in seen.graphs):
        for ask in plugins.advice:
            yield from ask(owner)


def _unknown_experts(model: torch.nn.Module, names: set[str]) -> Iterator[str]:
    """Classes with such weights that `quantize_` does not know, each once."""
    message = set[type]()
    for name, module in model.named_modules():
        mine = {f"{name}.{p}".lstrip(".") for p, _ in module.named_parameters(recurse=False)}
        of = type(module)
        if of in message or not mine & names or converter_of(module):
            continue
        message.add(of)
        why = f" ({refused})" if (refused := why_refused(module)) else ""
        yield (
            f"write a converter of {of.__name__}, which nothing here knows{why}: "
            f"fusion_moe.register_converter (docs/extend/converters.md); {name or 'the model'} "
            "has 3-D weights in floats"
        )
