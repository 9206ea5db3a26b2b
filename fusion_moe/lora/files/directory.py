"""save_lora and load_lora_: write the adapters of a model's experts to a directory, and load
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.unfinished import sync
from ...checkpoints.writing import appearing, write_json
from ...encodings import is_dtensor
from ...errors import CheckpointError, NonFiniteError, UnsupportedError, in_one_line
from ...messages import destination
from ...nn.frozen import AdaptableModule
from ...nn.local import gathered
from ..adapter import adapt_, adaptable, adapted, adapters_of, need_float, need_unadapted
from .config import CONFIG, LoraConfig, read_config
from .factors import a_from_peft, b_from_peft, peft_shapes, to_peft

TENSORS = "adapter_model.safetensors"
_ROOT = "base_model.model"  # what PEFT calls the model that it wraps
_INNER = "base_layer"  # PEFT's name of the module, or of another adapter, inside an adapter


def save_lora(model: nn.Module, directory: str | Path) -> Path:
    """Writes the adapters of a model, and nothing else of it, as PEFT would. The directory appears
    whole or not at all.

    PEFT loads it into the model in floating point, by the names of its parameters:
    `PeftModel.from_pretrained(model, directory)`. If the model's experts are divided between ranks,
    all ranks must call it; the first of all ranks writes. UnsupportedError for a model without
    adapters, or with several LoRA ranks; CheckpointError if the directory exists and is not empty,
    or cannot be written.
    """
    dst = destination(directory)
    modules = adapted(model, "save_lora")
    kinds = sorted({(a.rank, a.alpha) for m in modules.values() for _, a in adapters_of(m)})
    if len(kinds) > 1:
        raise UnsupportedError(
            " and ".join(f"rank {rank} with alpha {alpha}" for rank, alpha in kinds),
            expected="adapters of one rank and one alpha",
            where="save_lora",
        )
    targets = tuple(
        _parameter(name, module, projection)
        for name, module in modules.items()
        for projection, _ in adapters_of(module)
    )
    config = LoraConfig(*kinds[0], targets).written(getattr(model, "name_or_path", None) or None)
    tensors = {key: t for name, module in modules.items() for key, t in _stored(name, module)}
    divided = any(is_dtensor(a.A) for m in modules.values() for _, a in adapters_of(m))
    if not divided or torch.distributed.get_rank() == 0:
        _write(dst, tensors, config)
    return dst


def load_lora_(
    model: nn.Module, directory: str | Path, *, dtype: torch.dtype = torch.float32
) -> list[str]:
    """Adds the adapters of a directory, written by `save_lora` or PEFT, to the experts of a model,
    in place, and freezes everything else, as `add_lora_` does.

    Returns the names of what it adapted. dtype: of A and B. Every tensor of the file must find its
    place, and every target its tensors: CheckpointError names one that does not; NonFiniteError one
    with NaN or infinity in dtype. DtypeError for an integer dtype; UnsupportedError for other
    features of PEFT than adapters of experts (DoRA, other modules, ...), for a model without
    experts, and for one that has adapters already. Fails before it changes anything.
    """
    path, modules = Path(directory), adaptable(model, "load_lora_")
    need_unadapted(modules, "load_lora_")
    need_float(dtype, "load_lora_")
    config, tensors = read_config(path), _read(path / TENSORS, dtype)
    # what has no place is refused first
    names = [*sorted(_named(tensors) - modules.keys()), *modules]
    planned = {name: _planned(name, modules, config, tensors) for name in names}
    if lost := tensors.keys() - {key for name, of in planned.items() for key in _keys(name, of)}:
        raise CheckpointError(
            f"{min(lost)} has no place",
            expected="adapters of experts alone",
            where=str(path / TENSORS),
        )
    places = [(name, projection) for name, of in planned.items() for projection in of]
    factors = [
        pair for name, of in planned.items() for pair in _factors(name, modules[name], of, tensors)
    ]
    adapters = adapt_(model, places, config.rank, config.alpha, dtype)
    for adapter, (a, b) in zip(adapters, factors, strict=True):
        adapter.fill_(a, b)
    return [f"{name}.{projection}" if name else projection for name, projection in places]


# Names --------------------------------------------------------------------------------------------


def _parameter(name: str, module: AdaptableModule, projection: str) -> str:
    """The name of a projection's weight in the model that PEFT adapts."""
    parameter = module.part_names[projection][0]
    return f"{name}.{parameter}" if name else parameter


def _keys(name: str, adapters: Collection[str]) -> list[str]:
    """The names of lora_A and lora_B for each projection of a module. Each adapter is wrapped
    around the previous one.
    """
    depths = range(len(adapters) - 1, -1, -1)
    return [
        ".".join(filter(None, (_ROOT, name, *[_INNER] * depth, f"lora_{f}.weight")))
        for depth in depths
        for f in "AB"
    ]


def _named(keys: Iterable[str]) -> set[str]:
    """The modules for which a file has adapters."""
    paths = (key.partition(".lora_")[0].removeprefix(_ROOT).split(".") for key in keys)
    return {".".join(p for p in path if p and p != _INNER) for path in paths}


# Saving -------------------------------------------------------------------------------------------


def _stored(name: str, module: AdaptableModule) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's adapters, under PEFT's names; rows of B in the order that the
    weight had before the experts were converted.
    """
    adapters, factors = dict(adapters_of(module)), list[Tensor]()
    for projection, adapter in adapters.items():
        a, b = gathered(adapter.A.detach()), gathered(adapter.B.detach())
        factors += to_peft(a, module.view_of(projection).interleave(b), module.turned)
    return zip(_keys(name, adapters), factors, strict=True)


def _write(dst: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Writes the two files, under another name until they are synced to disk."""
    from safetensors.torch import save_file

    with appearing(dst) as unfinished:
        files = unfinished.files
        save_file({key: t.cpu() for key, t in tensors.items()}, files / TENSORS, {"format": "pt"})
        sync(files / TENSORS)
        write_json(files / CONFIG, config)


# Loading ------------------------------------------------------------------------------------------


def _planned(
    name: str,
    modules: Mapping[str, AdaptableModule],
    config: LoraConfig,
    tensors: Mapping[str, Tensor],
) -> list[str]:
    """The projections of a module that get adapters, for each of which the file must have tensors
    of the right shapes.
    """
    if name not in modules:
        raise CheckpointError(
            f"adapters of {name or 'the whole model'}",
            expected=f"modules with experts: {', '.join(modules)}",
            where="load_lora_",
        )
    module = modules[name]
    projections = [p for p in module.projections if config.targeted(_parameter(name, module, p))]
    wanted = [
        shape
        for p in projections
        for shape in peft_shapes(
            _experts(module), *module.shape_of(p)[1:], config.rank, module.turned
        )
    ]
    for key, shape in zip(_keys(name, projections), wanted, strict=True):
        t = tensors.get(key)
        if t is None or t.shape != shape or not t.is_floating_point():
            raise CheckpointError(
                f"no {key}" if t is None else f"{key}, {t.dtype} {list(t.shape)}",
                expected=f"{key} of floats {list(shape)}",
                where="load_lora_",
            )
    return projections


def _experts(module: AdaptableModule) -> int:
    """E, over all ranks."""
    return (
        module.shape_of(module.projections[0])[0]
        if module.sharding is None
        else module.sharding.experts
    )


def _read(file: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.exists() and file.with_name("adapter_model.bin").exists():
        raise UnsupportedError(
            "adapter_model.bin: pickled tensors, which can run code when they are read",
            expected=TENSORS,
            todo="save it with safe_serialization=True",
            where=str(file.parent),
        )
    try:
        tensors = load_file(file)
    except (OSError, MemoryError, SafetensorError) as error:
        raise CheckpointError(
            in_one_line(error), expected="a file of safetensors", where=str(file)
        ) from None
    if not tensors:
        raise CheckpointError("no tensors", expected="those of adapters", where=str(file))
    for key, t in tensors.items():
        if bad := int((~t.to(dtype).isfinite()).sum()):
            raise NonFiniteError(
                f"{bad} NaN or infinite among the {t.numel()} elements of {key}",
                expected=f"numbers that are finite in {dtype}",
                todo="the file is damaged, training diverged, or this dtype has too small a range",
                where=str(file),
            )
    return tensors


def _factors(
    name: str, module: AdaptableModule, projections: Sequence[str], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """A and B for each adapter of a module, from the file."""
    keys = _keys(name, projections)
    for projection, key_a, key_b in zip(projections, keys[::2], keys[1::2], strict=True):
        of_peft = tensors[key_a], tensors[key_b], _experts(module), module.turned
        a = a_from_peft(*of_peft)
        b = module.view_of(projection).deinterleave(b_from_peft(*of_peft))
        if module.sharding is not None:
            a, b = module.sharding.share("A", a), module.sharding.share("B", b)
        yield a, b
