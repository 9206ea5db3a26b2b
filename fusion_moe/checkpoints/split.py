"""Experts that files have in one tensor with scales for each of them, as single matrices: under the
names, and in the form, that other directories have them in.

    …experts.gate_up_proj               [E, 2I, K/2]: codes, or numbers, of all experts
    …experts.gate_up_proj_weight_scale  [E, 2I, K/16], of blocks; [E, 2I] or [E, 2I, 1], of rows;
                                        [E, 2] or [E, 1], of matrices; [E], of an expert; [] or
                                        [1], of all
    -> …experts.3.gate_proj.weight, .weight_scale, and so on

With one scale for all experts, ModelOpt's and gpt-oss' own forms stay as they are (schemes.py),
unless another projection of the layer has another form.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..encodings import FLOATS
from ..errors import CheckpointError, UnsupportedError
from .fp8 import BLOCK
from .fused import FusedOrder, family_order, matrices_of
from .headers import Entry, Read, Reads

_FUSED = re.compile(
    r"(?P<layer>.*\bexperts)\.(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj)"
    r"(?:[._](?P<part>\w+))?"
)
_ELEMENTS = ("", "weight", "packed", "weight_packed", "blocks", "qweight")
_SUFFIXES = {
    "": ".weight",
    "blocks": ".weight_packed",
    "packed": ".weight_packed",
    "scale_inv": ".weight_scale_inv",
    "scale_2": ".weight_scale_2",
    "global_scale": ".weight_global_scale",
    "zero_point": ".weight_zero_point",
    **{
        part: f".{part}"
        for part in (
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_scale_2",
            "weight_scale_inv",
            "weight_global_scale",
            "weight_zero_point",
            "qweight",
            "qzeros",
            "g_idx",
            "bias",
            "input_scale",
            "input_global_scale",
            "activation_scale",
        )
    },
}
_SHAPES = ("shape", "weight_shape")  # that tensors have anyway
_COLUMNS = ("qweight", "qzeros", "scales")  # N is the last dimension
_PACKED = {torch.uint8: 2, torch.int8: 2, torch.int32: 8}  # elements in one


@dataclass(frozen=True)
class _Projection:
    """One of a layer's. parts: its tensors, by what follows its name."""

    name: str
    matrices: tuple[str, ...]
    parts: Mapping[str, Entry]

    @property
    def elements(self) -> Entry | None:
        """Codes or floats, if they are of all experts."""
        match = next((self.parts[part] for part in _ELEMENTS if part in self.parts), None)
        if match is None or len(match.shape) != 3 + ("blocks" in self.parts) or 0 in match.shape:
            return None
        return match

    @property
    def coded(self) -> bool:
        """Whether its elements are codes."""
        return self.elements is not None and self.elements.dtype not in FLOATS

    @property
    def kept(self) -> bool:
        """Whether a scheme reads it as it is: with one scale for all experts, if any."""
        parts = [self.parts.get(part) for part in ("", "weight_scale", "weight_scale_2")]
        codes, blocks, scale = parts
        return "blocks" in self.parts or (
            codes is not None
            and blocks is not None
            and scale is not None
            and codes.dtype == torch.uint8
            and prod(scale.shape) == 1
            and codes.shape[-1:] == blocks.shape[-1:]
        )

    def sizes(self, transposed: bool) -> tuple[int, int]:
        """N and K."""
        assert self.elements is not None
        _, *shape = self.elements.shape
        if "qweight" in self.parts:
            n = self.parts["scales"].shape[-1] if "scales" in self.parts else shape[-1]
            return n, 0
        if "blocks" in self.parts:
            return shape[0], 2 * prod(shape[1:])
        n, k = shape[::-1] if transposed else shape
        return n, k * _PACKED.get(self.elements.dtype, 1)


def split(
    tensors: Mapping[str, Entry], read: Read, config: Mapping[str, Any]
) -> tuple[dict[str, Entry], Reads]:
    """The tensors with single matrices in the place of those of all experts, and what reads these.
    config: config.json.

    UnsupportedError for rows of gate and up that share a scale, and for weights whose shapes do not
    tell N from K; CheckpointError for a matrix that is there twice.
    """
    layers = defaultdict[str, dict[str, dict[str, Entry]]](lambda: defaultdict(dict))
    for name, entry in tensors.items():
        if match := _FUSED.fullmatch(name):
            layers[match["layer"]][match["projection"]][match["part"] or ""] = entry
    entries, reads = dict(tensors), Reads()
    for layer, projections in layers.items():
        results = [
            _Projection(f"{layer}.{name}", matrices_of(name), parts)
            for name, parts in projections.items()
        ]
        coded = [p for p in results if p.coded and len(p.parts) > 1]
        floats = [p for p in results if p.elements is not None and not p.coded]
        forms = {"blocks" in p.parts for p in coded}
        if not coded or (all(p.kept for p in coded) and len(forms) == 1 and not floats):
            continue
        order = _order(results, family_order(config, layer))
        for projection in (p for p in results if p.elements is not None):
            for part in projection.parts.values():
                del entries[part.name]
            for entry, piece in _pieces(layer, projection, order, read):
                if entry.name in entries:
                    raise CheckpointError(
                        f"{projection.name} and {entry.name}",
                        expected="one of the two",
                        where=str(entry.file),
                    )
                entries[entry.name], reads[entry.name] = entry, piece
    return entries, reads


def _order(entries: list[_Projection], family: FusedOrder) -> FusedOrder:
    """How the tensors of a layer lie: as their shapes say, and where these leave it open, as the
    family has them.
    """
    by = {p.name.rpartition(".")[2]: p for p in entries if p.elements is not None}
    up, down = by.get("gate_up_proj") or by.get("up_proj"), by.get("down_proj")
    if up is None or down is None or "qweight" in up.parts:
        return replace(family, transposed=False)
    fitting = []
    for transposed in (False, True):
        (n, hidden), (out, k) = up.sizes(transposed), down.sizes(transposed)
        if (n, hidden) == (k * len(up.matrices), out):
            fitting.append(transposed)
    if len(fitting) == 1:
        return replace(family, transposed=fitting[0])
    if fitting:
        return family
    raise UnsupportedError(
        f"{up.elements} and {down.elements}",
        expected="[E, 2I, H] or [E, I, H], and [E, H, I], or all of them transposed",
        where=str(up.elements and up.elements.file),
    )


_Piece = tuple[Entry, Callable[[], Tensor]]


def _pieces(layer: str, projection: _Projection, order: FusedOrder, read: Read) -> Iterator[_Piece]:
    """The tensors of all matrices, and what reads them."""
    assert projection.elements is not None
    experts, n = projection.elements.shape[0], projection.sizes(order.transposed)[0]
    for part, entry in projection.parts.items():
        if part in _SHAPES:
            continue
        suffix, count = _suffix(part, projection), len(projection.matrices)
        for at, matrix in enumerate(projection.matrices):
            cut = partial(_cut, part, order, experts, n, at, count, projection.elements.dtype)
            try:
                like = cut(torch.empty(entry.shape, dtype=entry.dtype, device="meta"), 0)
            except UnsupportedError as error:
                raise error.at(f"{entry.file}: {entry}") from None
            for e in range(experts):
                name = f"{layer}.{e}.{matrix}{suffix}"
                yield (
                    Entry(name, like.dtype, (*like.shape,), entry.file),
                    partial(_read, read, entry.name, cut, e),
                )


def _read(read: Read, name: str, cut: Callable[[Tensor, int], Tensor], expert: int) -> Tensor:
    return cut(read(name), expert).contiguous()


def _suffix(part: str, projection: _Projection) -> str:
    """What follows the name of a single matrix."""
    if part == "scales":
        return ".weight_scale" if "blocks" in projection.parts else ".scales"
    if part == "scale":  # as DeepSeek-V4 has it, unless codes are ModelOpt's
        elements = projection.elements
        return ".weight_scale" if elements and elements.dtype == torch.uint8 else ".scale"
    return _SUFFIXES.get(part, f".{part}")


def _cut(
    part: str,
    order: FusedOrder,
    experts: int,
    n: int,
    at: int,
    count: int,
    dtype: torch.dtype,
    t: Tensor,
    expert: int,
) -> Tensor:
    """What one matrix has of a part t: matrix number `at` of the `count` matrices, of n rows
    together, that an expert has.
    """
    if t.numel() == 1:
        return t.reshape(())
    if len(t) == experts:
        t = t[expert]
    if t.numel() == 1:
        return t.reshape(())
    if t.numel() == count < n:
        return t.flatten()[at]
    if part == "g_idx":
        return t
    if part == "blocks":
        t = t.flatten(-2)
    columns = part in _COLUMNS and t.dim() == 2 and dtype == torch.int32
    if t.dim() == 2 and (columns or (order.transposed and part != "blocks")):
        t = t.mT
    rows = _rows(t, order, n, at, count, dtype)
    return rows.mT if columns else rows


def _rows(t: Tensor, order: FusedOrder, n: int, at: int, count: int, dtype: torch.dtype) -> Tensor:
    """The rows of a matrix among those of all `count`, which may be fewer than n: of blocks, or
    words.
    """
    blocks = BLOCK[0] if dtype == torch.float8_e4m3fn and len(t) != n else max(1, n // len(t))
    if count > 1 and (
        (n // count) % blocks or len(t) % count or (order.interleaved and blocks > 1)
    ):
        raise UnsupportedError(
            f"{len(t)} for {n} rows, of which gate and up share some",
            expected="matrices of whole blocks",
            todo="quantize the model in floats",
        )
    return order.rows(t, at, count)
