"""Which tensors may stand for memory that the ranks of a group share: those that `issue` made.

    handle = issue(ranks + 4, group, device)
    tell(handle, [rank, layer, tokens, row, *addresses])    # for kernels
    use = use_of(operation, program)
    table = use.table(handle, sizes)        # for a call of the program, in place of the handle

Kernels store to the addresses in a table, so nobody else holds one. What a program gets is a
handle, whose elements nothing reads: a call finds the table by where the handle lies, and refuses
every other tensor. native.cpp has the same register.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....errors import Error, FusionError, OptionError, ShapeError
from ....ir import AnySize, Fusion, Op, value
from ....runtime import native
from .faults import rank_error
from .kinds import PEERS, peers_of, sent_of


@dataclass
class _Issued:
    """A handle, which lives as long as its entry: no other tensor lies there meanwhile. room: for
    tokens of a rank, and bytes of each.
    """

    handle: Tensor
    table: Tensor
    group: str
    room: tuple[int, int] = (0, 0)


_issued: dict[int, _Issued] = {}
_groups: dict[str, int] = {}  # their numbers, for C++


def issue(entries: int, group: str, device: torch.device) -> Tensor:
    """A handle for operations of this process group, until `revoke`. Its memory has no room yet."""
    table = torch.zeros(entries, dtype=torch.int64, device=device)
    handle = torch.full_like(table, -1)  # a copy is not taken for "no memory"
    # CUDA graphs of torch.compile copy inputs that move
    torch._dynamo.mark_static_address(handle)
    address = handle.data_ptr()
    _issued[address] = _Issued(handle.detach(), table, group)
    native.share(address, table.data_ptr(), entries, _number(group))
    return handle


def tell(handle: Tensor, numbers: Sequence[int]) -> None:
    """Writes the table of a handle: the rank, the layer's number, for how many tokens of a rank and
    bytes of each there is room, where the memory of each rank is.
    """
    issued = _issued[handle.data_ptr()]
    issued.table.copy_(torch.tensor(numbers))
    issued.room = numbers[2], numbers[3]


def revoke(address: int) -> None:
    """Refuses the handle that lies there from now on: the memory is freed."""
    native.share(address, 0, 0, 0)
    del _issued[address]


@dataclass(frozen=True)
class Use:
    """An operation's use of an input: memory of a group, with room for rows of each rank, and bytes
    of each. It is a handle (runtime/handles.py).
    """

    input: int
    group: str
    rows: AnySize
    row: AnySize
    operation: str

    @property
    def owner(self) -> int:
        """The group's number."""
        return _number(self.group)

    def table(self, tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """The table of a handle. OptionError for anything else, unless it lies on the CPU and is
        zeros: then ranks share no memory. ShapeError without room.
        """
        issued = _issued.get(tensor.data_ptr())
        if issued is None and tensor.device.type == "cpu" and not tensor.any():
            return tensor
        if issued is None or issued.table.numel() != tensor.numel() or issued.group != self.group:
            raise _refused(tensor, issued, self.group)
        need = value(self.rows, sizes), value(self.row, sizes)
        if issued.room[0] and (need[0] > issued.room[0] or need[1] > issued.room[1]):
            raise ShapeError(
                f"{need[0]} tokens of a rank, of {need[1]} bytes each",
                expected=f"at most {issued.room[0]}, of at most {issued.room[1]}: the memory that "
                "ranks share",
                where="peers",
            )
        return issued.table

    def check(self, table: Tensor) -> None:
        """RankError, which names the lost rank, if a call on a CPU waited for another rank in vain.
        table: the call's sizes and addresses of shared memory. Nothing is checked for ranks without
        shared memory, whose process group raises.
        """
        rank, _, room, _, *addresses = table.tolist()
        if not room:
            return
        _, limit, broken = (ctypes.c_ulonglong * 3).from_address(addresses[rank])
        if broken:
            raise rank_error(broken >> 32, broken % 2**32 - 1, limit / 1e9, self.operation)


def use_of(op: Op, fusion: Fusion) -> Use:
    """What an operation does with memory of ranks. FusionError if the program computes where that
    is.
    """
    peers = peers_of(op)
    if peers not in fusion.inputs:
        raise FusionError(
            f"{peers.name} {peers.type}, which the program computes",
            expected="peers that are an input: addresses are never computed",
            where=op.kind.name,
        )
    return Use(fusion.inputs.index(peers), str(op.attrs["group"]), *sent_of(op), op.kind.name)


def _refused(tensor: Tensor, issued: _Issued | None, group: str) -> Error:
    if issued is None:
        text = f"int64 {list(tensor.shape)} on {tensor.device}, which is memory of no ranks"
    elif issued.group != group:
        text = f"memory of the group {issued.group!r} in an operation of {group!r}"
    else:
        text = f"{tensor.numel() - PEERS} ranks of {issued.table.numel() - PEERS}"
    return OptionError(
        text,
        expected="the tensor itself that parallelize_(dispatch='symmetric') made for the layer: it "
        "stands for addresses, which its elements are not",
        todo="zeros, on CPUs, send tokens through the process group",
        where="peers",
    )


def _number(group: str) -> int:
    return _groups.setdefault(group, len(_groups))
