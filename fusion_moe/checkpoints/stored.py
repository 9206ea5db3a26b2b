"""Weights in files: which tensors are the parts of which weight, by their own names and dtypes.
Headers show that every part exists and fits, and no scale is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..encodings import NIBBLES, Encoding, Quantized, real_tensors
from ..errors import CheckpointError, Error, ShapeError, UnsupportedError
from .directory import Directory
from .fp8 import encoding_of, refusal
from .headers import Entry, Read
from .integers import USUAL, Packing, scheme_of
from .methods import method_of, packing_of
from .schemes import KNOWN, SCHEMES, Scheme, StoredPart, of_encoding


@dataclass(frozen=True)
class StoredWeight:
    """A weight in files. entries: the tensor of each part, by the part's name, and of what is fixed
    beside it, by its suffix; shape: the logical one, [N, K], or [E, N, K] if fused.
    """

    name: str
    scheme: Scheme
    entries: Mapping[str, Entry] = field(hash=False)
    shape: tuple[int, ...]

    @property
    def elements(self) -> Entry:
        """The tensor of its first part."""
        return self.entries[self.scheme.parts[0].part]

    @property
    def nbytes(self) -> int:
        """Bytes of its parts in files."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def of_matrix(self) -> bool:
        """Whether 8-bit floats have one scale for the whole matrix, as ModelOpt stores it."""
        scale = self.entries.get("decode_scale")
        return scale is not None and self.scheme.eight_bits and scale.shape in ((), (1,))

    def parts(self, read: Read) -> list[Tensor]:
        """The weight's parts, each as the encoding has it. read: returns a tensor by name, as
        `Directory.read`. UnsupportedError for scales that would be rounded.
        """
        parts = []
        for part in self.scheme.parts:
            entry, t = self.entries[part.part], read(self.entries[part.part].name)
            if part.cast not in (None, t.dtype, torch.float32) and not torch.equal(
                t.to(part.cast).to(t.dtype), t
            ):
                cast = str(part.cast).removeprefix("torch.")
                raise UnsupportedError(
                    f"{entry}, which {cast} does not hold",
                    expected=f"numbers that {cast} holds",
                    where=str(entry.file),
                )
            parts.append(part.to_part(t, n=self.shape[-2]))
        if self.scheme.fused:  # one scale for all experts
            parts = [t.expand(self.shape[0]) if t.dim() == 0 else t for t in parts]
        return parts

    @real_tensors()
    def check_fixed(self, read: Read, columns: bool = True) -> None:
        """Raises unless the tensors beside the weight say what they have to. columns: whether those
        of a group must lie side by side, as in an encoding.
        """
        for fixed in self.scheme.fixed:
            entry, (n, k) = self.entries[fixed.suffix], self.shape
            result, wanted = read(entry.name), fixed.made(n, k, self.scheme.own_encoding)
            if not torch.equal(result.to(wanted.dtype), wanted):
                error = fixed.refused(result, wanted)
                if fixed.of_columns and not columns and isinstance(error, UnsupportedError):
                    continue
                raise type(error)(
                    f"{entry.name}: {error.found}",
                    expected=error.expected,
                    todo=error.todo,
                    where=str(entry.file),
                )

    def quantized(self, read: Read) -> Quantized:
        """The weight in its encoding, [N, K] or [E, N, K]. Only for a scheme with an encoding."""
        return self.scheme.quantized(self.parts(read))

    def floats(self, read: Read) -> Tensor:
        """f32 [N, K] or [E, N, K]: elements times their scales, in whatever order groups have
        columns.
        """
        codes, *scales = self.parts(read)
        of_columns = [fixed for fixed in self.scheme.fixed if fixed.of_columns]
        if not of_columns:
            return self.scheme.floats([codes, *scales])
        order = read(self.entries[of_columns[0].suffix].name).argsort(stable=True)
        packed = codes.shape[1] < len(order)
        codes = (NIBBLES.unpacked(codes) if packed else codes)[:, order]
        sorted_floats = self.scheme.floats([NIBBLES.packed(codes) if packed else codes, *scales])
        return torch.empty_like(sorted_floats).index_copy_(1, order, sorted_floats)


def all_eight_bits(weights: Mapping[str, StoredWeight]) -> bool:
    """Whether all weights are 8-bit floats. Linear layers in such stay so when a model is loaded;
    beside weights of 4 bits they become floats, with which all of them can be saved again.
    """
    return all(weight.scheme.eight_bits for weight in weights.values())


def weights_in(directory: Directory) -> dict[str, StoredWeight]:
    """`stored_weights` of a directory, with what its configuration says."""
    config = directory.quantization
    method = method_of(config, str(directory.path))
    return stored_weights(directory.tensors, method, packing_of(config))


def stored_weights(
    tensors: Mapping[str, Entry], method: str, packing: Packing = USUAL
) -> dict[str, StoredWeight]:
    """The weights among tensors that are not plain floats, by name. method: `quant_method` of the
    configuration, "" if it has none; packing: what it says of integers (`packing_of`).

    CheckpointError, with file, tensor, found and expected, if a part is missing or has a shape that
    does not fit its weight, and for any part of a weight without a method. UnsupportedError for
    tensors that are parts of a weight in no known scheme.
    """
    candidates = [(scheme, _candidates(scheme, tensors)) for scheme in SCHEMES if method]
    weights: dict[str, StoredWeight] = {}
    for scheme, by_name in candidates:
        for name, entries in by_name.items():
            other = scheme.without and name + scheme.without in tensors
            if len(entries) < len(scheme.parts) or other:
                continue
            if name in weights and {*entries.values()} <= {*weights[name].entries.values()}:
                continue  # without zero points, which are there
            if name in weights:
                raise CheckpointError(
                    f"{name} in {weights[name].scheme.name} and in {scheme.name}",
                    expected="one of the two",
                    where=str(entries[scheme.parts[0].part].file),
                )
            resolved, result = _encoded(scheme, entries, packing)
            fixed = tuple(f for f in resolved.fixed if name + f.suffix in tensors)
            resolved, shape = replace(resolved, fixed=fixed), _shape(resolved, result)
            beside = {f.suffix: tensors[name + f.suffix] for f in fixed}
            weights[name] = StoredWeight(name, resolved, {**result, **beside}, shape)
    used = {entry.name for weight in weights.values() for entry in weight.entries.values()}
    for name, entry in tensors.items():
        if (
            name not in used
            and not name.endswith(KNOWN)
            and (name.endswith(_SUFFIXES) or (entry.dtype in _BYTES and entry.shape))
        ):
            raise _left(entry, tensors, candidates)
    return weights


Candidates = dict[str, dict[str, Entry]]  # tensors by a weight's name, then by the part's


def _candidates(scheme: Scheme, tensors: Mapping[str, Entry]) -> Candidates:
    """The tensors that may be parts of weights in a scheme, by their names and dtypes."""
    by_name: Candidates = {}
    for entry in tensors.values():
        for part in scheme.parts:
            if (
                entry.dtype in part.dtypes
                and entry.name.endswith(part.suffix)
                and (part.suffix or len(entry.shape) == 3)
            ):
                name = entry.name.removesuffix(part.suffix)
                by_name.setdefault(name, {})[part.part] = entry
    return by_name


_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
# parts of other formats
_UNKNOWN = (".weight_g_idx", ".pre_quant_scale", ".g_idx")
_PARTS = tuple(
    dict.fromkeys((*(part.suffix for scheme in SCHEMES for part in scheme.parts), *_UNKNOWN))
)
# of nothing but parts
_SUFFIXES = tuple(
    suffix for suffix in _PARTS if suffix not in ("", ".weight", ".scale", ".scales", "_scales")
)


def _left(
    entry: Entry, tensors: Mapping[str, Entry], candidates: list[tuple[Scheme, Candidates]]
) -> Error:
    """The error for a tensor that is part of no weight: a CheckpointError if the rest of a known
    scheme is missing.
    """
    where = str(entry.file)
    if not candidates:
        return CheckpointError(
            f"{entry}, which belongs to no weight",
            expected="plain floats",
            todo="config.json has no quantization_config, and hf_quant_config.json is not there",
            where=where,
        )

    def of_weight(name: str) -> list[Entry]:  # parts of whatever format
        return [tensors[name + suffix] for suffix in _PARTS if name + suffix in tensors]

    incomplete = [
        (scheme, [name + part.suffix for part in scheme.parts if part.part not in entries])
        for scheme, by_name in candidates
        for name, entries in by_name.items()
        if entry in entries.values() and all(e in entries.values() for e in of_weight(name))
    ]
    if incomplete:
        scheme, (missing, *_) = min(incomplete, key=lambda each: len(each[1]))
        return CheckpointError(
            f"{entry} without {missing}", expected=f"all parts of {scheme.name}", where=where
        )
    suffix = max((suffix for suffix in _PARTS if entry.name.endswith(suffix)), key=len)
    others = ", ".join(str(e) for e in of_weight(entry.name.removesuffix(suffix)) if e is not entry)
    return UnsupportedError(
        f"{entry} beside {others}" if others else f"{entry}",
        expected="names and dtypes of a known format",
        todo="docs/checkpoints.md lists them; quantize the model in floats",
        where=where,
    )


def _encoded(
    scheme: Scheme, entries: dict[str, Entry], packing: Packing
) -> tuple[Scheme, dict[str, Entry]]:
    """The scheme of a weight, and its entries by the names of parts: for 8-bit floats and integers
    those of the encoding that the shapes say.
    """
    if scheme.integers:
        resolved = scheme_of(scheme, entries, packing)
        return resolved, {part.part: entries[part.part] for part in resolved.parts}
    if scheme.encoding is not None:
        return scheme, entries
    values, scale = (entries[part.part] for part in scheme.parts)
    e8m0 = scale.dtype == torch.float8_e8m0fnu
    if (encoding := encoding_of(values.shape, scale.shape, e8m0)) is None:
        return scheme, entries
    resolved = of_encoding(scheme, encoding, scale.dtype, scale.shape)
    return resolved, dict(zip((part.part for part in resolved.parts), (values, scale), strict=True))


def _shape(scheme: Scheme, entries: Mapping[str, Entry]) -> tuple[int, ...]:
    """The logical shape of a weight; CheckpointError for a part of another shape."""
    elements = entries[scheme.parts[0].part]
    codes = _on_meta(scheme.parts[0], elements, scheme, None)
    n = codes.shape[-2] if codes.dim() > 1 else None
    scales = (_on_meta(part, entries[part.part], scheme, n) for part in scheme.parts[1:])
    parts = [codes, *scales]
    try:
        if scheme.encoding is None:
            raise refusal(*parts)
        return _encoded_shape(scheme, scheme.encoding, entries, parts)
    except ShapeError as error:
        raise CheckpointError(
            f"{elements}: {error.found}", expected=error.expected, where=str(elements.file)
        ) from None
    except UnsupportedError as error:
        raise error.at(f"{elements.file}: {elements}") from None


def _on_meta(part: StoredPart, entry: Entry, scheme: Scheme, n: int | None) -> Tensor:
    """A part on the meta device, without values, of a weight [..., n, K]."""
    try:
        empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return part.to_part(empty, n=n)
    except (RuntimeError, IndexError):
        raise CheckpointError(
            f"{entry}",
            expected="[] or [1], the scale of a matrix"
            if part.direction
            else f"the {part.part} of {scheme.name}",
            where=str(entry.file),
        ) from None


def _encoded_shape(
    scheme: Scheme, encoding: Encoding, entries: Mapping[str, Entry], parts: list[Tensor]
) -> tuple[int, ...]:
    codes, *scales = parts
    elements = entries[scheme.parts[0].part]
    if codes.dim() != (3 if scheme.fused else 2) or 0 in codes.shape:
        raise CheckpointError(
            f"{elements}", expected=f"the codes of {scheme.name}", where=str(elements.file)
        )
    *lead, n, items = codes.shape
    k = encoding.elements(items)
    encoding.packed(k)  # ShapeError unless K is whole blocks
    for part, stored, scale in zip(encoding.parts[1:], scheme.parts[1:], scales, strict=True):
        want = encoding.part_shape(part, lead, n, k) if part.of_blocks else ()
        if scale.shape != want:
            shape = [*want[:-2], *want[:-3:-1]] if stored.transposed else [*want]
            entry = entries[stored.part]
            raise CheckpointError(
                f"{entry}", expected=f"{shape} for {elements}", where=str(entry.file)
            )
    return (*lead, n, k)
