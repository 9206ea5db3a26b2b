"""Encoded weights that accelerate brings for each call, from a folder on a disk, into which
transformers writes only what its own conversions make.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ...encodings.encoded import plain
from ...errors import OptionError
from ...nn.frozen import AdaptableModule
from ...runtime import store


def is_brought(module: nn.Module) -> bool:
    """Whether accelerate brings the parameters of a module when that is called."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def keep_buffers(module: nn.Module) -> None:
    """Gives memory to buffers, which accelerate moves at once, until they are loaded."""
    for key, t in module.named_buffers(recurse=False):
        module._buffers[key] = torch.empty_like(t, device="cpu")


def put_on_disk(module: nn.Module, name: str) -> None:
    """Writes the parameters of a module into the folder from which accelerate brings those of its
    model, and frees their memory. OptionError without a folder.

    accelerate opens the file by its name in each call: the name has a hash of what is in it, so
    that other models with the same folder have other files.
    """
    hook: Any = module._hf_hook
    if isinstance(module, AdaptableModule):
        module.fixed = "encoded weights in memory"
    stored = hook.weights_map.dataset
    if stored.save_folder is None:
        raise OptionError(
            f"no offload_folder, for {name} on disk",
            expected="a folder for what is encoded",
            where="device_map",
        )
    parameters = dict(module.named_parameters(recurse=False))
    tensors = {key: plain(p).contiguous() for key, p in parameters.items()}
    contents = store.key_of(
        *(f"{key} {t.dtype} {[*t.shape]}" for key, t in tensors.items()),
        *(t.reshape(-1).view(torch.uint8).numpy().data for t in tensors.values()),
    )
    file = Path(stored.save_folder, f"{name}-{contents}.safetensors")
    with store.whole(file) as unfinished:
        save_file(tensors, unfinished)
    for key, p in parameters.items():
        stored.index[f"{name}.{key}"] = {"safetensors_file": str(file), "weight_name": key}
        setattr(module, key, nn.Parameter(plain(p).to("meta"), requires_grad=False))
    for key, t in module.named_buffers(recurse=False):
        module._buffers[key] = t.to(hook.execution_device)
