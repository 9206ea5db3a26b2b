"""Checkpoints that transformers' Trainer loads.

It gives their tensors to `load_state_dict` under the names of the files, and looks for adapters
only in a `PeftModel`. Its two methods that load one are wrapped here, so that they read ours as
`from_pretrained` does.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ...plugins import wrap
from .adapters import described
from .loading import from_pretrained
from .quantizer import FusionMoeQuantizer


def register_loading() -> None:
    """Makes Trainer load checkpoints of our models by `load_checkpoint_`, if it is in use. FSDP and
    DeepSpeed have their own files.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None:
        _wrap(trainer)


@functools.cache
def _wrap(trainer: Any) -> None:
    wrap(trainer, "_load_from_checkpoint", _resume)
    wrap(trainer, "_load_best_model", _load_best)


def _resume(theirs: Any, self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
    model = self.model if model is None else model
    if _is_ours(model) and not self.is_fsdp_enabled:
        load_checkpoint_(model, Path(resume_from_checkpoint))
    else:
        theirs(self, resume_from_checkpoint, model)


def _load_best(theirs: Any, self: Any) -> None:
    directory = Path(self.state.best_model_checkpoint)
    if (
        _is_ours(self.model)
        and directory.is_dir()
        and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
    ):
        load_checkpoint_(self.model, directory)
    else:
        theirs(self)


def load_checkpoint_(model: PreTrainedModel, directory: Path) -> None:
    """Loads what `save_pretrained` wrote into a model with the same modules and adapters, in place,
    by way of a second one on the CPU.

    CheckpointError for other adapters than the model has.
    """
    # float32 holds the numbers of all other dtypes, and encoded weights are not cast
    stored = from_pretrained(directory, auto_class=type(model), dtype=torch.float32)
    have, want = described(stored), described(model)
    if have != want:
        name = next(name for name in {**want, **have} if have.get(name) != want.get(name))
        actual, expected = (
            f"{some[name]} for {name}" if name in some else f"no adapter of {name}"
            for some in (have, want)
        )
        raise CheckpointError(
            actual,
            expected=f"{expected}, as the model has",
            todo="give the model the adapters that it was trained with: add_lora_ with the same "
            "arguments, or load_lora_",
            where=str(directory),
        )
    model.load_state_dict(stored.state_dict())


def _is_ours(model: Any) -> bool:
    return isinstance(model, PreTrainedModel) and isinstance(
        getattr(model, "hf_quantizer", None), FusionMoeQuantizer
    )
