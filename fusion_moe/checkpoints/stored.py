"""Weights in files: which tensors are the parts of which weight, by their own names and dtypes.
Headers show that every part exists and fits, and no scale is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..encodings import Quantized
from ..errors import CheckpointError, Error, ShapeError, UnsupportedError
from .fp8 import check_fp8, dequantize_fp8
from .headers import Entry
from .schemes import KNOWN, SCHEMES, Scheme, StoredPart

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class StoredWeight:
    """A weight in files. entries: the tensor of each part, by the part's name; shape: the logical
    one, [N, K], or [E, N, K] if fused.
    """

    name: str
    scheme: Scheme
    entries: Mapping[str, Entry] = field(hash=False)
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its parts in files."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def of_matrix(self) -> bool:
        """Whether 8-bit floats have one scale for the whole matrix."""
        return self.scheme.encoding is None and self.entries["scale"].shape in ((), (1,))

    def parts(self, read: Read) -> list[Tensor]:
        """The weight's parts, each as the encoding has it. read: returns a tensor by name, as
        `Directory.read`. UnsupportedError for scales that would be rounded.
        """
        made = [self._part(part, read(self.entries[part.part].name)) for part in self.scheme.parts]
        if self.scheme.fused:  # one scale for all experts
            made = [t.expand(self.shape[0]) if t.dim() == 0 else t for t in made]
        return made

    def _part(self, part: StoredPart, t: Tensor) -> Tensor:
        if part.cast not in (None, t.dtype) and not torch.equal(t.to(part.cast).to(t.dtype), t):
            entry, cast = self.entries[part.part], str(part.cast).removeprefix("torch.")
            raise UnsupportedError(
                f"{entry}, which {cast} does not hold",
                expected=f"numbers that {cast} holds",
                where=str(entry.file),
            )
        return part.to_part(t)

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
    """The weights among tensors that are not plain floats, by name. method: `quant_method` of the
    configuration, "" if it has none.

    CheckpointError, with file, tensor, found and expected, if a part is missing or has a shape that
    does not fit its weight, and for any part of a weight without a method. UnsupportedError for
    tensors that are parts of a weight in no known scheme.
    """
    found: dict[str, StoredWeight] = {}
    used: set[str] = set()
    for entry in tensors.values() if method else ():
        for scheme in (scheme for scheme in SCHEMES if _may_be(entry, scheme.parts[0])):
            name = entry.name.removesuffix(scheme.parts[0].suffix)
            if (entries := _entries(scheme, name, tensors)) is None:
                continue
            if name in found:
                both = f"{name} in {found[name].scheme.name} and in {scheme.name}"
                raise CheckpointError(both, expected="one of the two", where=str(entry.file))
            found[name] = StoredWeight(name, scheme, entries, _checked_shape(scheme, entries))
            used.update(e.name for e in entries.values())
    for name, entry in tensors.items():
        if (
            name not in used
            and not name.endswith(KNOWN)
            and (name.endswith(_SUFFIXES) or (entry.dtype in _BYTES and entry.shape))
        ):
            raise _left(entry, tensors, method)
    return found


def _may_be(entry: Entry, part: StoredPart) -> bool:
    return (
        entry.dtype in part.dtypes
        and entry.name.endswith(part.suffix)
        and (part.suffix != "" or len(entry.shape) == 3)
    )


def _entries(scheme: Scheme, name: str, tensors: Mapping[str, Entry]) -> dict[str, Entry] | None:
    """The tensors of a weight by the names of its parts; None unless all of them are there, with
    dtypes of the scheme.
    """
    entries = {
        part.part: entry
        for part in scheme.parts
        if (entry := tensors.get(name + part.suffix)) and entry.dtype in part.dtypes
    }
    return entries if len(entries) == len(scheme.parts) else None


_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
# parts of other formats
_UNKNOWN = (
    ".weight_zero_point",
    ".weight_g_idx",
    ".pre_quant_scale",
    ".qweight",
    ".qzeros",
    ".g_idx",
)
_PARTS = tuple(
    dict.fromkeys((*(part.suffix for scheme in SCHEMES for part in scheme.parts), *_UNKNOWN))
)
# of nothing but parts
_SUFFIXES = tuple(suffix for suffix in _PARTS if suffix not in ("", ".weight", ".scale", "_scales"))


def _left(entry: Entry, tensors: Mapping[str, Entry], method: str) -> Error:
    """The error for a tensor that is part of no weight: a CheckpointError if the rest of a known
    scheme is missing.
    """
    where = str(entry.file)
    if not method:
        todo = "config.json has no quantization_config, and hf_quant_config.json is not there"
        return CheckpointError(
            f"{entry}, which belongs to no weight", expected="plain floats", todo=todo, where=where
        )
    incomplete: list[tuple[Scheme, list[str]]] = []
    for scheme in SCHEMES:
        for name in (
            entry.name.removesuffix(part.suffix) for part in scheme.parts if _may_be(entry, part)
        ):
            known = {name + part.suffix: part for part in scheme.parts}
            if all(n in known and _may_be(tensors[n], known[n]) for n in _present(name, tensors)):
                incomplete.append((scheme, [n for n in known if n not in tensors]))
    if incomplete:
        scheme, missing = min(incomplete, key=lambda each: len(each[1]))
        return CheckpointError(
            f"{entry} without {missing[0]}", expected=f"all parts of {scheme.name}", where=where
        )
    name = entry.name.removesuffix(
        max((suffix for suffix in _PARTS if entry.name.endswith(suffix)), key=len)
    )
    beside = ", ".join(str(tensors[n]) for n in _present(name, tensors) if n != entry.name)
    expected, todo = (
        "names and dtypes of a known format",
        "docs/checkpoints.md lists them; quantize the model in floats",
    )
    return UnsupportedError(
        f"{entry}{f' beside {beside}' if beside else ''}", expected=expected, todo=todo, where=where
    )


def _present(name: str, tensors: Mapping[str, Entry]) -> list[str]:
    """The names of the parts that a weight has in files, of whatever format."""
    return [name + suffix for suffix in _PARTS if name + suffix in tensors]


# Shapes -------------------------------------------------------------------------------------------


def _checked_shape(scheme: Scheme, entries: Mapping[str, Entry]) -> tuple[int, ...]:
    """The logical shape of a weight; CheckpointError for a part of another shape."""
    parts = {part.part: _on_meta(part, entries[part.part], scheme) for part in scheme.parts}
    elements = entries[scheme.parts[0].part]
    try:
        if scheme.encoding is None:
            return check_fp8(parts["values"], parts["scale"])
        return _encoded_shape(scheme, entries, parts)
    except ShapeError as error:
        raise CheckpointError(
            f"{elements}: {error.found}", expected=error.expected, where=str(elements.file)
        ) from None
    except UnsupportedError as error:
        raise error.at(f"{elements.file}: {elements}") from None


def _on_meta(part: StoredPart, entry: Entry, scheme: Scheme) -> Tensor:
    """A part on the meta device, without values."""
    try:
        return part.to_part(torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    except (RuntimeError, IndexError):
        expected = (
            "[] or [1], the scale of a matrix"
            if part.direction
            else (f"the {part.part} of {scheme.name}")
        )
        raise CheckpointError(f"{entry}", expected=expected, where=str(entry.file)) from None


def _encoded_shape(
    scheme: Scheme, entries: Mapping[str, Entry], parts: Mapping[str, Tensor]
) -> tuple[int, ...]:
    encoding = scheme.encoding
    assert encoding is not None
    first, *others = encoding.parts
    codes, elements = parts[first.name], entries[first.name]
    if codes.dim() != (3 if scheme.fused else 2) or 0 in codes.shape:
        raise CheckpointError(
            f"{elements}", expected=f"the codes of {scheme.name}", where=str(elements.file)
        )
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
