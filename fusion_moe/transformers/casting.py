"""`half` and `float` of a model with encoded weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..plugins import wrap
from .quantizer import FusionMoeQuantizer


def register_casting() -> None:
    """Makes `half` and `float` cast the floats of a model with encoded weights of ours, as
    `bfloat16` and `to` do. transformers refuses them for every quantized model.
    """
    for name in "half", "float":
        wrap(PreTrainedModel, name, partial(_called, getattr(nn.Module, name)))


def _called(cast: Callable[..., Any], refuse: Callable[..., Any], self: Any, *args: Any) -> Any:
    ours = isinstance(getattr(self, "hf_quantizer", None), FusionMoeQuantizer)
    return (cast if ours else refuse)(self, *args)
