"""Weights in files: which tensors are the parts of which weight. Headers show that every part exists and fits, and no scale is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..encodings import Quantized
from ..errors import CheckpointError, ShapeError
from .fp8 import check_fp8, dequantize_fp8
from .headers import Entry
from .schemes import KNOWN, SCHEMES, Scheme, StoredPart

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class StoredWeight:
    """A weight in files. entries: the tensor of each part, by the part's name; shape: the logical one, [N, K], or [E, N, K] if fused."""

    name: str
    scheme: Scheme
    entries: Mapping[str, Entry] = field(hash=False)
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its parts in files."""
        return sum(entry.nbytes for entry in self.entries.values())

    def parts(self, read: Read) -> list[Tensor]:
        """The weight's parts, each as the encoding has it. read: returns a tensor by name, as `Directory.read`."""
        made = [part.to_part(read(self.entries[part.part].name)) for part in self.scheme.parts]
        if self.scheme.fused:  # one scale for all experts
            made = [t.expand(self.shape[0]) if t.dim() == 0 else t for t in made]
        return made

    def quantized(self, read: Read) -> Quantized:
        """The weight in its encoding, [N, K] or [E, N, K]. Only for a scheme with an encoding."""
        assert self.scheme.encoding is not None, self.name
        return Quantized(*self.parts(read), encoding=self.scheme.encoding)

    def floats(self, read: Read) -> Tensor:
        """f32 [N, K], for a scheme without an encoding: 8-bit floats times their scales."""
        assert self.scheme.encoding is None, self.name
        values, scale = self.parts(read)
        return dequantize_fp8(values, scale)


def stored_weights(tensors: Mapping[str, Entry], method: str) -> dict[str, StoredWeight]:
    """The weights among tensors that are not plain floats, by name. method: `quant_method` of the configuration.

    CheckpointError, with file, tensor, found and expected, if a part is missing or has a dtype or shape that does not fit its weight, or if
    a scale or packed tensor belongs to no weight.
    """
    schemes = [scheme for scheme in SCHEMES if method in scheme.methods]
    found: dict[str, StoredWeight] = {}
    used: set[str] = set()
    for entry in tensors.values():
        if entry.name not in used and (candidates := _candidates(entry, schemes)):
            weight = _weight(entry, candidates, tensors)
            found[weight.name] = weight
            used.update(e.name for e in weight.entries.values())
    _check_none_left(tensors, used, method)
    return found


def _candidates(entry: Entry, schemes: Iterable[Scheme]) -> list[Scheme]:
    """The schemes whose elements a tensor may be, by the suffix of its name and its dtype."""
    return [s for s in schemes if _may_be(entry, s.parts[0]) and (s.parts[0].suffix or len(entry.shape) == 3)]


def _may_be(entry: Entry, part: StoredPart) -> bool:
    return entry.dtype in part.dtypes and entry.name.endswith(part.suffix)


def _weight(elements: Entry, candidates: list[Scheme], tensors: Mapping[str, Entry]) -> StoredWeight:
    """The weight with these elements, in the scheme of which most parts are present."""

    def missing(scheme: Scheme) -> list[str]:
        name = elements.name.removesuffix(scheme.parts[0].suffix)
        return [name + part.suffix for part in scheme.parts if name + part.suffix not in tensors]

    scheme = min(candidates, key=lambda scheme: len(missing(scheme)))
    if lacks := missing(scheme):
        raise CheckpointError(f"{elements} without {lacks[0]}", expected=f"all parts of {scheme.name}", where=str(elements.file))
    name = elements.name.removesuffix(scheme.parts[0].suffix)
    entries = {part.part: tensors[name + part.suffix] for part in scheme.parts}
    return StoredWeight(name, scheme, entries, _checked_shape(scheme, entries))


# Shapes ------------------------------------------------------------------------------------------------------------------


def _checked_shape(scheme: Scheme, entries: Mapping[str, Entry]) -> tuple[int, ...]:
    """The logical shape of a weight; CheckpointError for a part of another dtype or shape."""
    parts = {part.part: _on_meta(part, entries[part.part], scheme) for part in scheme.parts}
    elements = entries[scheme.parts[0].part]
    try:
        if scheme.encoding is None:
            return check_fp8(parts["values"], parts["scale"])
        return _encoded_shape(scheme, entries, parts)
    except ShapeError as error:
        raise CheckpointError(f"{elements}: {error.found}", expected=error.expected, where=str(elements.file)) from None


def _on_meta(part: StoredPart, entry: Entry, scheme: Scheme) -> Tensor:
    """A part on the meta device, without values."""
    if entry.dtype not in part.dtypes:
        expected = f"{' or '.join(str(d).removeprefix('torch.') for d in part.dtypes)}, the {part.part} of {scheme.name}"
        raise CheckpointError(f"{entry}", expected=expected, where=str(entry.file))
    try:
        return part.to_part(torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    except (RuntimeError, IndexError):
        expected = "[] or [1], the scale of a matrix" if part.direction else f"the {part.part} of {scheme.name}"
        raise CheckpointError(f"{entry}", expected=expected, where=str(entry.file)) from None


def _encoded_shape(scheme: Scheme, entries: Mapping[str, Entry], parts: Mapping[str, Tensor]) -> tuple[int, ...]:
    encoding = scheme.encoding
    assert encoding is not None
    first, *others = encoding.parts
    codes, elements = parts[first.name], entries[first.name]
    if codes.dim() != (3 if scheme.fused else 2) or 0 in codes.shape:
        raise CheckpointError(f"{elements}", expected=f"the codes of {scheme.name}", where=str(elements.file))
    *lead, n, items = codes.shape
    k = encoding.elements(items)
    encoding.packed(k)  # ShapeError unless K is whole blocks
    for part, stored in zip(others, scheme.parts[1:], strict=True):
        want = encoding.part_shape(part, lead, n, k) if part.of_blocks else ()
        if tuple(parts[part.name].shape) != want:
            entry = entries[part.name]
            *outer, a, b = want
            expected = f"{[*outer, b, a] if stored.transposed else [*want]} for {elements}"
            raise CheckpointError(f"{entry}", expected=expected, where=str(entry.file))
    return (*lead, n, k)


# What is left ------------------------------------------------------------------------------------------------------------

_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
_PARTS = {part.suffix for scheme in SCHEMES for part in scheme.parts} - {"", ".weight", ".scale", "_scales"}
_OTHERS = {".weight_packed", ".weight_zero_point", ".weight_g_idx", ".pre_quant_scale", ".qweight", ".qzeros", ".g_idx"}
_SUFFIXES = tuple(_PARTS | _OTHERS)


def _check_none_left(tensors: Mapping[str, Entry], used: set[str], method: str) -> None:
    """CheckpointError for a tensor that means something only as part of a weight, but belongs to none."""
    for name, entry in tensors.items():
        if name in used or name.endswith(KNOWN):
            continue
        if name.endswith(_SUFFIXES) or (entry.dtype in _BYTES and entry.shape):
            todo = "" if method else "config.json has no quantization_config, and hf_quant_config.json is not there"
            expected = f"tensors that are parts of a weight by {method}" if method else "plain floats"
            raise CheckpointError(f"{entry}, which belongs to no weight", expected=expected, todo=todo, where=str(entry.file))
