"""Shares of encoded weights in state dicts, so that torch.distributed.checkpoint knows which part
of the whole each rank has.

Whole experts are DTensors there, with the placement Shard(0). No placement describes a rank's
features: the same rows of gate and up, in whole blocks, one more on some ranks. These are `Pieces`.
In memory both are plain tensors, since kernels reorder and pad them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...errors import UnsupportedError
from ...layouts import as_bytes


def expert_shard(t: Tensor, mesh: DeviceMesh, experts: int) -> DTensor:
    """[E of a rank, ...] -> [E, ...] over all ranks of a mesh, in the same memory."""
    shape = Size((experts, *t.shape[1:]))
    return DTensor.from_local(
        t,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


class ExpertShards:
    """For a module with whole experts. See `nn.local.Sharding`."""

    adaptable = True

    def __init__(self, mesh: DeviceMesh, kept: range, experts: int):
        """mesh: one-dimensional. kept: the experts of this rank, out of `experts` in all."""
        self.mesh, self.kept, self.experts = mesh, kept, experts

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShards:
        return self  # process groups cannot be copied

    def has(self, name: str) -> bool:
        """All ranks have some experts of each."""
        return True

    def whole(self, name: str, t: Tensor) -> Tensor:
        """A DTensor [E, ...]."""
        return expert_shard(t, self.mesh, self.experts)

    def share(self, name: str, t: Tensor) -> Tensor:
        """This rank's share of a DTensor in any placement, of a tensor of all experts, or of this
        rank's experts.
        """
        if isinstance(t, DTensor):
            return t.redistribute(self.mesh, [Shard(0)]).to_local()
        return t[self.kept.start : self.kept.stop] if len(t) == self.experts else t


class FeatureShards:
    """For `Experts` with some of the features, of all experts or of some. See
    `nn.local.Sharding`.
    """

    adaptable = False

    def __init__(
        self,
        first: str,
        experts: int,
        intermediate: int,
        features: range,
        rows: Tensor,
        biased: bool,
    ):
        """first: the projection whose rows are features, gate above up or up; rows: those on this
        rank. biased: whether down's bias is on this rank; other ranks have zeros.
        """
        self.experts, self.kept = experts, range(experts)
        self.first, self.intermediate, self.features = first, intermediate, features
        self.rows, self.biased = rows, biased
        self.all_rows = intermediate * (2 if first == "gate_up" else 1)
        self.scales = dict[str, Tensor]()  # [E, S] of whole matrices that differ for these rows

    def has(self, name: str) -> bool:
        """All ranks have some features, one of them down's bias."""
        return self.biased or name != "down_proj_bias"

    def keep(self, kept: range) -> None:
        """Drops the scales of all experts but those in `kept`, ids of the whole layer, all of which
        are kept now.
        """
        self.scales = {
            name: t[kept.start - self.kept.start : kept.stop - self.kept.start].clone()
            for name, t in self.scales.items()
        }
        self.kept = kept

    def whole(self, name: str, t: Tensor) -> Tensor:
        """Pieces of [E, ...]."""
        first, t = self.kept.start, self.scales.get(name, t)
        shape, pieces = (self.experts, *t.shape[1:]), [((first, *[0] * (t.dim() - 1)), t)]
        if self._has_rows(name):
            shape = (self.experts, self.all_rows, *t.shape[2:])
            pieces = [
                ((first, row, *[0] * (t.dim() - 2)), t[:, here]) for row, here in runs(self.rows)
            ]
        elif self._has_columns(name, t, len(self.features)):
            shape = (*shape[:2], t.shape[2] * self.intermediate // len(self.features))
            pieces = [((first, 0, t.shape[2] * self.features.start // len(self.features)), t)]
        elif not self.has(name):
            pieces = []
        return Pieces(Size(shape), t, pieces)

    def _has_rows(self, name: str) -> bool:
        return name.startswith(f"{self.first}_proj")

    def _has_columns(self, name: str, t: Tensor, features: int) -> bool:
        """Whether a tensor has columns for so many features: down's, or activations' of each."""
        of_down = name.startswith("down_proj") and name != "down_proj_bias"
        return of_down or (name == "activation_parameters" and t.shape[2] == features)

    def cut(self, name: str, t: Tensor, dim: int = 1) -> Tensor:
        """A tensor for all features, of the module or of one of its matrices, whose rows lie along
        `dim` -> what these features need of it.
        """
        if self._has_rows(name) and t.shape[dim] == self.all_rows:
            return as_bytes(t).index_select(dim, self.rows.to(t.device)).view(t.dtype)
        if self._has_rows(name):
            return t.narrow(dim, self.features.start, len(self.features))
        if self._has_columns(name, t, self.intermediate):
            ends = self.features.start, self.features.stop
            return t[..., slice(*(t.shape[-1] * n // self.intermediate for n in ends))].contiguous()
        if name.startswith(self.first) and t.dim() > 1:  # scales of matrices
            which = torch.arange(t.shape[1], device="cpu")[None]
            if runs_of(which, self.all_rows, self.rows).tolist() != which.tolist():
                self.scales[name] = t
            return runs_of(t, self.all_rows, self.rows)
        return t.clone() if self.has(name) else torch.zeros_like(t)

    def share(self, name: str, t: Tensor) -> Tensor:
        """This rank's share of `Pieces` as `whole` made them; any other tensor is this rank's
        already.
        """
        t = t.of_rank if isinstance(t, Pieces) else t
        if name not in self.scales:
            return t
        self.scales[name].copy_(t)
        return runs_of(self.scales[name], self.all_rows, self.rows)


def runs(rows: Tensor) -> list[tuple[int, slice]]:
    """Runs of consecutive numbers: the first number, and where they are.

    >>> runs(torch.tensor([4, 5, 6, 12, 13]))
    [(4, slice(0, 3, None)), (12, slice(3, 5, None))]
    """
    starts = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
    return [(int(rows[start]), slice(start, end)) for start, end in pairwise(starts)]


def runs_of(scale: Tensor, n: int, rows: Tensor) -> Tensor:
    """scale [E], or [E, S] for S runs of n rows -> the scale for only these rows."""
    if scale.dim() == 1:
        return scale.clone()
    run = rows // (n // scale.shape[1])
    if len(rows) % scale.shape[1] == 0:
        new = run.view(scale.shape[1], -1)
        if bool((new == new[:, :1]).all()):
            run = new[:, 0]
    return scale[:, run]


class Pieces(Tensor):
    """Rectangles of a tensor that are on this rank; other ranks have the rest. Only for
    torch.distributed.checkpoint.
    """

    of_rank: Tensor
    pieces: Sequence[tuple[Sequence[int], Tensor]]

    def __new__(
        cls, shape: Size, of_rank: Tensor, pieces: Sequence[tuple[Sequence[int], Tensor]]
    ) -> Pieces:
        """shape: of the whole tensor. pieces: where each piece begins in the whole, and the pieces
        as views of of_rank.
        """
        result = Tensor._make_wrapper_subclass(
            cls, shape, dtype=of_rank.dtype, device=of_rank.device
        )
        result.of_rank, result.pieces = of_rank, pieces
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise UnsupportedError(
            f"{func} of features that are divided between ranks",
            expected="a tensor in a state dict",
            todo="save and load it with torch.distributed.checkpoint",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        where = ", ".join(f"{list(t.shape)} at {list(offset)}" for offset, t in self.pieces)
        return f"Pieces({list(self.shape)}, {self.dtype}: {where or 'none'})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.of_rank)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(Size(offset), t.shape) for offset, t in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(t for offset, t in self.pieces if Size(offset) == index.offset)
