"""Which tensors may stand for memory that the ranks of a group share: those that `issue` made.

    handle = issue(ranks + 4, group, device)
    tell(handle, [rank, layer, tokens, row, *addresses])    # for kernels
    uses = uses_of(program)
    taken = tables([handle], uses, sizes)       # for a call: tables in place of handles

Kernels store to the addresses in a table, so nobody else holds one. What a program gets is a
handle, whose elements nothing reads: a call finds the table by where the handle lies, and refuses
every other tensor. native.cpp has the same register.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Error, FusionError, OptionError, ShapeError
from ..ir import AnySize, Fusion, Op, value
from ..ir.kinds.collectives import PEERS, peers_of, sent_of
from . import native


@dataclass
class _Issued:
    """A handle, which lives as long as its entry: no other tensor lies there meanwhile. room: for
    tokens of a rank, and bytes of each.
    """

    handle: Tensor
    table: Tensor
    group: str
    room: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Use:
    """An operation's use of an input: memory of a group, with room for rows of each rank, and bytes
    of each.
    """

    input: int
    group: str
    rows: AnySize
    row: AnySize


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


def uses_of(fusion: Fusion) -> tuple[Use, ...]:
    """What a program does with memory of ranks. FusionError if it computes where that is."""
    return tuple(_use(op, fusion) for op in fusion.ops if op.kind.role == "collective")


def _use(op: Op, fusion: Fusion) -> Use:
    peers = peers_of(op)
    if peers not in fusion.inputs:
        raise FusionError(
            f"{peers.name} {peers.type}, which the program computes",
            expected="peers that are an input: addresses are never computed",
            where=op.kind.name,
        )
    return Use(fusion.inputs.index(peers), str(op.attrs["group"]), *sent_of(op))


def handles_of(uses: Sequence[Use]) -> list[int]:
    """The inputs that are handles, for C++: input, group, input, group, ..."""
    return [n for use in uses for n in (use.input, _number(use.group))]


def tables(
    tensors: Sequence[Tensor], uses: Sequence[Use], sizes: Mapping[str, int]
) -> list[Tensor]:
    """The inputs of a call with tables in place of handles. OptionError for anything else, unless
    it lies on the CPU and is zeros: then ranks share no memory. ShapeError without room.
    """
    taken = list(tensors)
    for use in uses:
        argument = tensors[use.input]
        issued = _issued.get(argument.data_ptr())
        if issued is None and argument.device.type == "cpu" and not argument.any():
            continue
        if issued is None or issued.table.numel() != argument.numel() or issued.group != use.group:
            raise _refused(argument, issued, use.group)
        need = value(use.rows, sizes), value(use.row, sizes)
        if issued.room[0] and (need[0] > issued.room[0] or need[1] > issued.room[1]):
            raise ShapeError(
                f"{need[0]} tokens of a rank, of {need[1]} bytes each",
                expected=f"at most {issued.room[0]}, of at most {issued.room[1]}: the memory that "
                "ranks share",
                where="peers",
            )
        taken[use.input] = issued.table
    return taken


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
