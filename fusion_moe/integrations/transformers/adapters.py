"""Adapters of a model that `save_pretrained` writes: a folder beside it with PEFT's two files."""

from __future__ import annotations

import os
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...checkpoints.writing import ADAPTERS
from ...errors import CheckpointError, UnsupportedError
from ...lora.adapter import adapters_of
from ...lora.files import load_lora_, save_lora
from ...lora.files.config import CONFIG, read_config
from ...lora.files.directory import TENSORS
from ...messages import warn_once
from ...nn.frozen import AdaptableModule, PackedModule
from ...options import during

_saving_to: ContextVar[Path | None] = ContextVar("fusion_moe_saving_to", default=None)
# what `save_pretrained` is given; None for the model's own
state_to_save: ContextVar[dict[str, Any] | None] = ContextVar("fusion_moe_state", default=None)


def save_pretrained(
    theirs: Any,
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Tells quantizers, which `save_pretrained` asks for tensors, the directory and the state dict:
    without, transformers writes the model's own. UnsupportedError for encoded weights under the
    names of parameters, which nothing reads: with save_original_format=False, or of a model without
    a quantizer, a part of the one that has it.
    """
    encoded = any(isinstance(module, PackedModule) for module in self.modules())
    if encoded and not kwargs.get("save_original_format", True):
        raise UnsupportedError(
            "save_original_format=False, of a model with encoded weights",
            expected="the names that files have, by which they load again",
            where="save_pretrained",
        )
    if encoded and getattr(self, "hf_quantizer", None) is None:
        raise UnsupportedError(
            f"a {type(self).__name__} whose encoded weights another module has quantized",
            expected="the model that quantize_ or from_pretrained was called for",
            where="save_pretrained",
        )
    to = Path(save_directory) if is_main_process else None
    with during(_saving_to, to), during(state_to_save, state_dict):
        return theirs(self, save_directory, is_main_process, state_dict, *args, **kwargs)


def write_adapters(model: PreTrainedModel) -> None:
    """Writes the adapters of a model that is being saved; removes those of an earlier one from its
    directory.
    """
    if (directory := _saving_to.get()) is None:
        return
    with suppress(CheckpointError, UnsupportedError):  # none there, or others, which stay
        read_config(directory / ADAPTERS)
        for file in (CONFIG, TENSORS):
            (directory / ADAPTERS / file).unlink(missing_ok=True)
        with suppress(OSError):
            (directory / ADAPTERS).rmdir()
    if described(model):
        save_lora(_with_head(model), directory / ADAPTERS)


def read_adapters_(model: PreTrainedModel, directory: Path) -> None:
    """Adds the adapters that a saved model has beside it, if any. Others, such as PEFT's of other
    layers, are left out, with a warning.
    """
    if (directory / ADAPTERS / CONFIG).exists():
        try:
            load_lora_(_with_head(model), directory / ADAPTERS)
        except UnsupportedError as error:
            warn_once(f"adapters are left out: {error}")


def _with_head(model: Any) -> nn.Module:
    """A module in which parts have the names that they have beside a head: base models read what
    was saved with one, and the reverse.
    """
    if model.base_model is not model or not model.base_model_prefix:
        return model
    whole = nn.Module()
    whole.add_module(model.base_model_prefix, model)
    whole.name_or_path = model.name_or_path
    return whole


def described(model: nn.Module) -> dict[str, str]:
    """The rank and alpha of each adapter."""
    return {
        f"{name}.{p}": f"rank {a.rank}, alpha {a.alpha}"
        for name, module in model.named_modules()
        if isinstance(module, AdaptableModule)
        for p, a in adapters_of(module)
    }
