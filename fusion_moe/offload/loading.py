"""from_pretrained for models that are larger than the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import Directory
from ..errors import OptionError, UnsupportedError
from ..messages import bytes_of, log
from ..runtime.host_memory import pages
from . import folder as folders, plan as plans
from .offload import PRETENDED, device_and_bytes, device_of, offload_, workspace

_WHERE, _ON_LOAD = "from_pretrained", "quantization_config"


def offloaded(
    load: Callable[..., Any],
    directory: Directory | None,
    mesh: Any,
    experts_device: str | None,
    kv_tokens: int | None,
    kwargs: Mapping[str, Any],
) -> Any:
    """What `load(**kwargs)` returns, on the CPU, then `offload_`. Whether it fits is checked
    before, by the headers of a directory in few bits; None for any other.

    None for a model that cannot be offloaded, if only `max_memory` asked for it: accelerate places
    that. UnsupportedError for a GPU where there is none.
    """
    left = dict(kwargs)
    memory, device_map = left.pop("max_memory", None), left.pop("device_map", "auto")
    folder = left.pop("offload_folder", None)
    if device_map != "auto" or mesh is not None or device_of(memory) is None:
        raise OptionError(
            f"device_map = {device_map!r}, max_memory = {memory!r}"
            + (", with a mesh" if mesh is not None else ""),
            expected="device_map='auto', and max_memory of one device and perhaps 'cpu'",
            where=_WHERE,
        )
    asked = experts_device is not None or kv_tokens is not None
    kv_tokens = plans.KV_TOKENS if kv_tokens is None else kv_tokens
    where = experts_device or "auto"
    reading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not torch.accelerator.is_available():
        device_and_bytes(memory)  # accelerate has no GPU either
    try:
        device, size = device_and_bytes(memory)
        if directory is not None and not left.get(_ON_LOAD):
            ram = memory.get("cpu")
            plan = _plan(directory, device, size, ram, where, kv_tokens, folder)
            if plan.whole and device != PRETENDED:
                return load(device_map=device, **left)  # never in the host's memory
            if plan.in_files:
                memory = {**memory, "cpu": plan.ram}
                in_memory = sum(layer.whole for layer in plan.in_memory)
                reading = pages.in_files(folder, after=in_memory)  # experts are read first
        with reading:
            result = load(**left)
        model = result[0] if isinstance(result, tuple) else result
        offload_(model, memory, experts_device=where, kv_tokens=kv_tokens, offload_folder=folder)
    except UnsupportedError as error:
        if asked:
            raise
        log.warning("nothing is offloaded: %s", error)
        return None
    return result


def _plan(
    directory: Directory,
    device: str,
    size: int,
    ram: int | str | None,
    experts_device: str,
    kv_tokens: int,
    folder: str | Path | None,
) -> plans.Plan:
    """What goes where. OptionError for too little room."""
    model, free = plans.Model.of_directory(directory), _available()
    held = [] if ram is None else [bytes_of(ram)]
    if free is not None:  # all but experts is read into memory first
        held.append(max(0, free - model.rest))
    return plans.make(
        model,
        size,
        min(held, default=None),
        disk=None if folder is None else folders.free(folder, _WHERE),
        workspace=workspace(device),
        kv_tokens=kv_tokens,
        experts_device=experts_device,
        where=_WHERE,
    )


def _available() -> int | None:
    """Bytes of the host's memory that are free or hold files; None where the system is silent."""
    with contextlib.suppress(OSError), Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
