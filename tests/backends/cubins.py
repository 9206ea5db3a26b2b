"""What kernels in cubins use of a multiprocessor, read from the ELF files that they are."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fusion_moe.arch import RESERVED

# of .nv.info: a format, attribute and size, in 4 bytes; with this format a symbol and a number
_VALUE = 0x04
_REGISTERS, _FRAME = 0x2F, 0x11


@dataclass(frozen=True)
class Use:
    """registers: of a thread; stack: bytes of it in local memory, where registers are spilled;
    shared: bytes of static shared memory of a block.
    """

    registers: int
    stack: int
    shared: int


def use_of(path: Path) -> Use:
    """What the only kernel of a cubin uses."""
    by_name = dict(sections(path.read_bytes()))
    own = [n for name, (_, n) in by_name.items() if name.startswith(".nv.shared.") and n > 64]
    # from compute capability 9.0 on with what the driver reserves
    reserved = RESERVED if ".nv.shared.reserved.0" in by_name else 0
    found: dict[int, int] = {}
    info, _ = by_name[".nv.info"]
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _VALUE:
            found[attribute] = struct.unpack_from("<II", info, at)[1]
            at += size
    return Use(found[_REGISTERS], found[_FRAME], max(max(own, default=0) - reserved, 0))


def sections(elf: bytes) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """The sections' names, contents and sizes."""
    (offset,), (size, count, names) = (
        struct.unpack_from("<Q", elf, 0x28),
        struct.unpack_from("<HHH", elf, 0x3A),
    )
    heads = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    at = heads[names][4]
    for name, _, _, _, begin, length, *_ in heads:
        text = elf[at + name : elf.index(b"\0", at + name)].decode()
        yield text, (elf[begin : begin + length], length)
