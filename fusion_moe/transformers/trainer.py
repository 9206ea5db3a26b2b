"""Checkpoints of a model with adapters: the model as `save_pretrained` writes it, and beside it a
folder with PEFT's two files.

transformers' Trainer gives a checkpoint's tensors to `load_state_dict` under the names of the
files, and looks for adapters only in a `PeftModel`. Its two methods that load one are wrapped here,
so that they read ours as `from_pretrained` does.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError, UnsupportedError
from ..messages.warn import warn_once
from ..nn.frozen.adaptable import AdaptableModule
from ..nn.lora.adapter import adapters_of
from ..nn.lora.files import load_lora_, save_lora
from ..nn.lora.files.config import CONFIG, read_config
from ..nn.lora.files.directory import TENSORS

FOLDER = "adapters"
_saving_to: ContextVar[Path | None] = ContextVar("fusion_moe_saving_to", default=None)


def register_saving() -> None:
    """Makes `save_pretrained` tell quantizers, which it asks for tensors, the directory."""
    save = PreTrainedModel.save_pretrained

    @functools.wraps(save)
    def save_pretrained(
        self: Any,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        token = _saving_to.set(Path(save_directory) if is_main_process else None)
        try:
            return save(self, save_directory, is_main_process, *args, **kwargs)
        finally:
            _saving_to.reset(token)

    PreTrainedModel.save_pretrained = save_pretrained


def write_adapters(model: PreTrainedModel) -> None:
    """Writes the adapters of a model that is being saved; removes those of an earlier one from its
    directory.
    """
    if (directory := _saving_to.get()) is None:
        return
    with suppress(CheckpointError, UnsupportedError):  # none there, or others, which stay
        read_config(directory / FOLDER)
        for file in (CONFIG, TENSORS):
            (directory / FOLDER / file).unlink(missing_ok=True)
        with suppress(OSError):
            (directory / FOLDER).rmdir()
    if _adapters(model):
        save_lora(_with_head(model), directory / FOLDER)


def read_adapters_(model: PreTrainedModel, directory: Path) -> None:
    """Adds the adapters that a saved model has beside it, if any. Others, such as PEFT's of other
    layers, are left out, with a warning.
    """
    if (directory / FOLDER / CONFIG).exists():
        try:
            load_lora_(_with_head(model), directory / FOLDER)
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


def register_loading(is_ours: Callable[[Any], bool]) -> None:
    """Makes Trainer load checkpoints of our models by `load_checkpoint_`, if it is in use. FSDP and
    DeepSpeed have their own files.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None:
        _wrap(trainer, is_ours)


@functools.cache
def _wrap(trainer: Any, is_ours: Callable[[Any], bool]) -> None:
    resume, load_best = trainer._load_from_checkpoint, trainer._load_best_model

    @functools.wraps(resume)
    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        if is_ours(model) and not self.is_fsdp_enabled:
            load_checkpoint_(model, Path(resume_from_checkpoint))
        else:
            resume(self, resume_from_checkpoint, model)

    @functools.wraps(load_best)
    def _load_best_model(self: Any) -> None:
        directory = Path(self.state.best_model_checkpoint)
        if (
            is_ours(self.model)
            and directory.is_dir()
            and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        ):
            load_checkpoint_(self.model, directory)
        else:
            load_best(self)

    trainer._load_from_checkpoint, trainer._load_best_model = (
        _load_from_checkpoint,
        _load_best_model,
    )


def load_checkpoint_(model: PreTrainedModel, directory: Path) -> None:
    """Loads what `save_pretrained` wrote into a model with the same modules and adapters, in place,
    by way of a second one on the CPU.

    CheckpointError for other adapters than the model has.
    """
    from .loading import from_pretrained

    # which holds all others; ours are not cast
    stored = from_pretrained(directory, auto_class=type(model), dtype=torch.float32)
    have, want = _adapters(stored), _adapters(model)
    if have != want:
        name = next(name for name in {**want, **have} if have.get(name) != want.get(name))
        found, expected = (
            f"{some[name]} for {name}" if name in some else f"no adapter of {name}"
            for some in (have, want)
        )
        todo = (
            "give the model the adapters that it was trained with: add_lora_ with the same "
            "arguments, or load_lora_"
        )
        raise CheckpointError(
            found, expected=f"{expected}, as the model has", todo=todo, where=str(directory)
        )
    model.load_state_dict(stored.state_dict())


def _adapters(model: nn.Module) -> dict[str, str]:
    """The rank and alpha of each adapter."""
    modules = (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, AdaptableModule)
    )
    return {
        f"{name}.{p}": f"rank {a.rank}, alpha {a.alpha}"
        for name, module in modules
        for p, a in adapters_of(module)
    }
