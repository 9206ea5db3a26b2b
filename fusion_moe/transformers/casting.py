"""`half` and `float` of a model with encoded weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .quantizer import FusionMoeQuantizer


def register_casting() -> None:
    """Makes `half` and `float` cast the floats of a model with encoded weights of ours, as
    `bfloat16` and `to` do. transformers refuses them for every quantized model.
    """
    for name in "half", "float":
        refuse, cast = getattr(PreTrainedModel, name), getattr(nn.Module, name)
        setattr(PreTrainedModel, name, _of_ours(refuse, cast))


def _of_ours(refuse: Callable[..., Any], cast: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(refuse)
    def called(self: Any, *args: Any) -> Any:
        ours = isinstance(getattr(self, "hf_quantizer", None), FusionMoeQuantizer)
        return (cast if ours else refuse)(self, *args)

    return called
