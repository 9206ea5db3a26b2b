"""What files call the layers that vLLM calls otherwise: those of a draft model, and the output
layers of models for multi-token prediction (MTP).
"""

from __future__ import annotations

import re
from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

_DRAFT = "draft_model."


def name_in_files(prefix: str, layer: Any = None) -> str:
    """The name that files have, and their configuration, for a layer that vLLM calls `prefix`."""
    name = prefix.removeprefix(_DRAFT)
    if not isinstance(layer, ParallelLMHead):
        return name
    # some models give theirs no name: it is that of the model
    return re.sub(r"(\.layers\.\d+)\.head$", r"\1.shared_head.head", name) or "lm_head"
