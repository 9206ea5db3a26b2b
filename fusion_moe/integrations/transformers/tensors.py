"""The way of a tensor from a file into a module, and back.

`Source.rows` says for each parameter which tensors of which names it is made of, and `StoredPart`
how each of them is converted. Letters: E experts, N out-features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from ...checkpoints import Entry, Read, StoredWeight, Unread, check_scale, check_weight
from ...encodings.encoded import plain
from ...errors import CheckpointError, NonFiniteError, UnsupportedError
from ...nn.frozen import PackedModule, Projections, rounded
from ...runtime.host_memory import pages
from .on_load import layout_of
from .sources import Row, Source, Weights


def load_(module: nn.Module, source: Source, weights: Weights, read: Read, device: Any) -> None:
    """Gives a module on the meta device the weights that it has in files: encoded ones as they are,
    or rounded to fewer bits; any other module than ours gets its weight in floats.

    weights: those in files; read: a tensor by the name that it has in the model. CheckpointError
    for scales that no quantizer writes, and for those that are the wrong way round.
    """
    if not isinstance(module, PackedModule) and "weight" not in source.names:
        _load_floats(module, source, weights, read, device)
        return
    if not isinstance(module, PackedModule):
        floats, like = _floats(weights[source.name], read), module.get_parameter("weight")
        _set(module, "weight", floats.to(device, like.dtype))
        return
    for projection, keys in module.part_names.items() if source.rounds else ():
        parts = _rounded(cast(Projections, module), projection, source, weights, read)
        for key, t in zip(keys, parts, strict=True):
            _set(module, key, pages.on_large_pages(t.to(device)))
    for row in source.rows(module):
        t = _loaded(row, module, read, device)
        if row.part in source.scheme.parts[1:]:
            try:
                check_scale(source.scheme, row.part, t, f"{source.name}.{row.parameter}")
            except (CheckpointError, NonFiniteError):
                for name, weight in weights.items():
                    if name == source.name or name.startswith(f"{source.name}."):
                        check_weight(read, weight)  # which names the file and the tensor
                raise
        _set(module, row.parameter, t)


def _load_floats(
    module: nn.Module, source: Source, weights: Weights, read: Read, device: Any
) -> None:
    """Gives a module of experts weights and biases in floats, in the layout that it has."""
    contract = layout_of(module)
    assert contract is not None, source.name
    for key, projection in zip(contract.names, source.names, strict=False):
        view, first = contract.view_of(key), getattr(module, "first_expert", None) or 0
        like, of = module.get_parameter(key), source.weights(projection, contract.experts, first)
        whole = torch.empty(like.shape, dtype=like.dtype)
        for e, expert in enumerate(zip(*of, strict=True)):
            rows = torch.cat([_floats(weights[name], read) for name in expert])
            whole[e].copy_(view.pack(rows[None])[0][0])
        _set(module, key, whole.to(device))
        if contract.has_bias:
            each = (
                torch.cat([read(f"{name}.bias") for name in one]) for one in zip(*of, strict=True)
            )
            (bias,) = view.pack(torch.stack([*each]))
            _set(module, f"{key}_bias", bias.to(device, like.dtype))


def load_converted_(
    model: Any, weights: Iterable[StoredWeight], conversions: list[Any], read: Read, device_map: Any
) -> None:
    """Has transformers make parameters of several weights each, which it gets in floats."""
    floats = {}
    for weight in weights:
        file = next(iter(weight.entries.values())).file
        entry = Entry(f"{weight.name}.weight", torch.float32, weight.shape, file)
        floats[entry.name] = Unread(entry, partial(_floats, weight, read))
    convert_and_load_state_dict_in_model(
        model=model,
        state_dict=floats,
        load_config=LoadStateDictConfig(
            device_map=device_map,
            dtype=model.dtype,
            weight_mapping=[c for c in conversions if isinstance(c, WeightConverter)],
        ),
        disk_offload_index=None,
    )


def _set(module: nn.Module, key: str, t: Tensor) -> None:
    """Gives a module a parameter, or a buffer, which its family then does not initialize."""
    t = t if key in module._buffers else nn.Parameter(t, requires_grad=False)
    t._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, key, t)


def _loaded(row: Row, module: PackedModule, read: Read, device: Any) -> Tensor:
    """A parameter, on large pages if it is on the CPU, with the experts and features that the
    module has.
    """
    like = getattr(module, row.parameter)
    whole = (
        pages.empty(like.shape, like.dtype)
        if torch.device(device).type == "cpu"
        else torch.empty(like.shape, dtype=like.dtype, device=device)
    )
    first = getattr(module, "first_expert", None) or 0
    if "*" in row.names[0]:
        for e, runs in enumerate(whole.view(len(whole), len(row.names), -1), first):
            for name, run in zip(row.names, runs, strict=True):
                stored = read(name.replace("*", str(e)) + row.part.suffix)
                t = row.part.to_part(stored, n=_rows(row, module))
                run.copy_(_share(t, row, module, 0).reshape(-1))
        return whole
    t = row.part.to_part(read(row.names[0] + row.part.suffix), n=len(like) if like.dim() else None)
    if isinstance(module, Projections) and t.dim():
        t = t[first : first + len(whole)]
        t = _share(row.view.deinterleave(t), row, module, 1)
    return whole.copy_(t)


def _rows(row: Row, module: PackedModule) -> int | None:
    """N of each matrix in files that a parameter of experts is made of."""
    shards: Any = module.sharding
    if getattr(shards, "features", None) is not None and not row.parameter.startswith("down"):
        return int(shards.intermediate)
    like = getattr(module, row.parameter)
    return like.shape[1] // len(row.names) if like.dim() > 2 else None


def _share(t: Tensor, row: Row, module: PackedModule, dim: int) -> Tensor:
    """What a rank's features need of a tensor with rows along `dim`: rows of gate and up, columns
    of down; down's bias on one rank; scales of matrices whole.
    """
    shards: Any = module.sharding
    divides = getattr(shards, "features", None) is not None and row.part.direction is None
    return shards.cut(row.parameter, t, dim) if divides else t


def _rounded(
    module: Projections, projection: str, source: Source, weights: Weights, read: Read
) -> Iterator[Tensor]:
    """The parts of a projection that is rounded, as by `quantize_`, one expert after the other.
    8-bit floats are rounded to bfloat16 first.
    """
    names = source.weights(projection, len(module.down_proj), module.first_expert or 0)
    parts = []
    for of_expert in zip(*names, strict=True):
        runs = [_in_encoding(module, weights[name], read) for name in of_expert]
        parts.append(
            torch.cat(of, 1) if not part.of_matrix else torch.stack(of, 1) if len(of) > 1 else of[0]
            for part, of in zip(module.encoding.parts, zip(*runs, strict=True), strict=True)
        )
    return map(torch.cat, zip(*parts, strict=True))


def _in_encoding(module: Projections, weight: StoredWeight, read: Read) -> list[Tensor]:
    """The parts [1, ...] of a weight as they are, or rounded."""
    if weight.scheme.encoding == module.encoding:
        check_weight(read, weight)
        return [part[None] for part in weight.parts(read)]
    floats = _floats(weight, read)
    floats = (floats.bfloat16() if weight.scheme.eight_bits else floats)[None]
    return [*rounded(floats, module.encoding, scales=module.scales)]


def _floats(weight: StoredWeight, read: Read) -> Tensor:
    check_weight(read, weight)
    return weight.scheme.floats(weight.parts(read))


def stored(row: Row, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The inverse: a parameter as tensors in files, each with its name there; no copies, but for
    rows that alternate. UnsupportedError if one scale for all matrices is to be saved but they have
    several.
    """
    t = plain(t)
    if "*" in row.names[0]:
        # [E, names, ...]
        runs = t[:, None] if t.dim() == 1 else t.unflatten(1, (len(row.names), -1))
        for e, run in enumerate(runs):
            for name, one in zip(row.names, run, strict=True):
                yield from _with_fixed(row, name.replace("*", str(e)), one)
        return
    if row.part.direction is not None and (t != t.flatten()[0]).any():
        raise UnsupportedError(
            "matrices with scales of their own",
            expected="one scale for all experts",
            where=row.names[0],
        )
    rows = t if row.part.direction else row.view.interleave(t)  # a matrix has one scale in files
    yield from _with_fixed(row, row.names[0], rows)


def _with_fixed(row: Row, name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A part as it is stored, and what is fixed beside elements."""
    yield name + row.part.suffix, row.part.from_part(t)
    if row.scheme is not None and (encoding := row.scheme.encoding) is not None:
        for fixed in row.scheme.fixed:
            yield name + fixed.suffix, fixed.made(len(t), encoding.elements(t.shape[-1]), encoding)
