"""The kernels of a step on a GPU (kernels/), compiled when a model is offloaded, and launched with
one structure each: numbers and addresses, 8 bytes each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..backends.cuda.launch import headers
from ..encodings import CodeOrder, Encoding, Part as EncodingPart
from ..encodings.orders import USUAL, Nibbles
from ..errors import UnsupportedError, WorkerError
from ..layouts.w16x64 import COLUMNS
from ..runtime import cuda, nvrtc
from ..runtime.faults import FAULTS, Fault

_NO_ANSWER = 5  # Fault of backends/cuda/kernels/ragged.cuh
_WHY = "it failed before", "it has ended", "it is late", "it found bad input"
FAULTS[_NO_ANSWER] = Fault(
    "the CPU's worker did not compute rows of experts that are not on the GPU: {place}, after "
    "{value} ms",
    "a worker that answers",
    WorkerError,
    "that call's result lacks these experts; offload the model again",
    lambda why, milliseconds: (_WHY[why], milliseconds),
)
HERE = Path(__file__).parent / "kernels"
THREADS, SUMMING = 512, 64  # of a block; of one that sums
MOST_PARTS, TURNS = 12, 12  # of kernels/experts.cuh
_SCALES = {1: 2, 2: 4, 4: 5}  # the kinds of parts there, by bytes of a scale
CTYPES = {torch.int32: "i32", torch.int64: "i64", torch.bfloat16: "bf16", torch.float16: "f16"}
CTYPES[torch.float32] = "float"


def text(name: str, header: str, parameter: str, body: str, threads: int = THREADS) -> str:
    """A kernel that takes one structure, `s`."""
    return (
        f'#include "{header}.cuh"\n\nextern "C" __global__ void __launch_bounds__({threads}) '
        f"{name}(const {parameter} s) {{\n    {body}\n}}\n"
    )


def name_of(source: str) -> str:
    """The name of the kernel in a source that `text` made."""
    return source.partition("(const ")[0].rpartition(" ")[2]


def begin_step(ids: torch.dtype, weights: torch.dtype) -> str:
    """The source of the kernel that begins a step: it finds the experts that the GPU lacks, copies
    some into its cache, and hands the rows of the others to the CPU. ids, weights: dtypes.
    """
    parameter = f"BeginStep<{CTYPES[ids]}, {CTYPES[weights]}>"
    body = "extern __shared__ i32 memory[];\n    s.run(memory);"
    return text("begin_step", "begin", parameter, body)


def end_step(x: torch.dtype, weights: torch.dtype, slots: int, features: int) -> str:
    """The source of the kernel that ends a step: it waits for the CPU's rows, and sums the rows of
    each token. x, weights: dtypes; slots: rows of a token; features: of a row.
    """
    parameter = f"EndStep<{CTYPES[x]}, {CTYPES[weights]}, {slots}, {features}>"
    return text("end_step", "handover", parameter, "s.run();", SUMMING)


def put_rows() -> str:
    """CUDA C++ of the kernel that writes the rows of one turn of a long step into the step's
    result.
    """
    return text("put_rows", "put", "PutRows", "s.run();")


def load() -> str:
    """The source of the kernel that copies experts from the host into the GPU's cache."""
    return text("load", "experts", "Load", "s.run();")


def build(source: str, arch: str) -> Path:
    """The path of the cubin of a kernel's source, compiled if needed. BuildError."""
    flags = ("--device-int128",)
    return nvrtc.build(source, name=name_of(source), arch=arch, headers=headers(HERE), flags=flags)


class Kernel:
    """kernel(stream, numbers): a launch on the current device, of so many blocks. overlaps: whether
    it begins while the kernel before it ends, for which it waits itself.
    """

    def __init__(
        self,
        source: str,
        blocks: int = 0,
        shared: int = 0,
        overlaps: bool = False,
        threads: int = THREADS,
    ):
        arch = cuda.arch(torch.cuda.current_device())
        name = name_of(source)
        path = build(source, arch.nvrtc)
        function, overlaps = cuda.load(path, name, shared), overlaps and arch.programmatic_launch
        cuda.check_room(function, torch.cuda.current_device(), name, threads, shared)
        self._blocks = blocks
        self._of = cache(lambda n: cuda.Launch(function, n, threads, shared, overlaps))

    def __call__(self, stream: int, numbers: Sequence[int], blocks: int = 0) -> None:
        """Launches on a stream with one structure. blocks: how many, if other than usual."""
        params = (ctypes.c_longlong * len(numbers))(*numbers)
        pointer = ctypes.c_void_p(ctypes.addressof(params))
        self._of(blocks or self._blocks)(stream, ctypes.addressof(pointer))


@dataclass(frozen=True)
class Shape:
    """What a kernel copies of a tensor [E, ...]: `Part` of kernels/experts.cuh.

    kind: 0 its bytes; into the layout w16x64: 1 codes of 4 bits, 3 of 8, and scales of so many
    bytes as `_SCALES` has them.
    """

    kind: int
    nbytes: int  # of an expert
    rows: int
    tiles: int
    each: int
    table: tuple[int, ...] = ()  # of what codes or scales become

    @classmethod
    def of(
        cls, t: Tensor, part: EncodingPart | None = None, order: CodeOrder | None = None
    ) -> Shape:
        """How kernels copy t[e] for an expert e. With an order of codes, `part` of an encoding
        (codes, or scales of blocks) is stored as tiles of `w16x64`; else bytes are copied as they
        are.
        """
        nbytes = t[0].nbytes
        if order and part and part.scale is None:
            if isinstance(order, Nibbles):
                return cls(1, nbytes, t.shape[1], t.shape[2] // 32, 0, turns_of_codes(order))
            return cls(3, nbytes, t.shape[1], t.shape[2] // COLUMNS, 0)
        if order and part and part.scale and part.of_blocks:
            each, size = scales_of_tile(part), part.dtype.itemsize
            of, table = _SCALES[size], part.scale.recoding.table
            return cls(of, nbytes, t.shape[1], t.shape[2] // each, each * size, table)
        each = 16 if nbytes % 16 == 0 else 2
        return cls(0, nbytes, 0, nbytes // each, each)


def turns_of_codes(order: CodeOrder) -> tuple[int, ...]:
    """How the bits of eight codes become a word of a tile: u32[2, TURNS], by how much the codes are
    turned to the left, and which bits of that the word has. 16 h + 8 i + 4 j bits are before the
    code of half h, row i and place j. UnsupportedError for an order that does more than move bits.
    """
    codes, shifts = torch.arange(16), torch.arange(4)
    x = torch.zeros(8, 16, 2, 2, 2, dtype=torch.uint8)  # j h i
    for place in range(8):
        x[place, :, place % 2, place // 4, place // 2 % 2] = codes
    words = order.stored(x.flatten(2)).view(torch.int32).long().view(8, 16) & 0xFFFFFFFF
    bits = words[:, 1 << shifts]
    kept = dict[int, int]()
    for bit, word in enumerate(bits.flatten().tolist()):
        turn = (word.bit_length() - 1 - bit) % 32
        kept[turn] = kept.get(turn, 0) | word
    moved = (bits[:, None] * (codes[:, None] >> shifts & 1)).sum(-1)
    if (bits & bits - 1).any() or not moved.equal(words) or len(kept) > TURNS:
        raise UnsupportedError(
            f"codes in the order {order}",
            expected=f"one that moves bits, by at most {TURNS} distances",
            todo="keep its experts on the device",
            where="offload",
        )
    rest = [0] * (TURNS - len(kept))
    signed = [word - (word >> 31 << 32) for word in kept.values()]
    return (*kept, *rest, *signed, *rest)


def scales_of_tile(part: EncodingPart) -> int:
    """How many scales a row of a tile has; tiles of scales for many elements are as wide as one."""
    assert part.scale is not None
    return max(1, COLUMNS // part.scale.block) if part.scale.block > 0 else 1


def why_not_tiled(encoding: Encoding) -> str:
    """Why kernels do not copy weights in an encoding into the layout w16x64; "" if they do."""
    order, blocks = encoding.element.tile_order, [p for p in encoding.parts if p.of_blocks]
    if not (isinstance(order, Nibbles) or order == USUAL[8]) or encoding.axis != -1:
        return f"{encoding.name} has no codes of 4 or 8 bits with scales along K"
    wide = [p.name for p in blocks if scales_of_tile(p) * p.dtype.itemsize > max(_SCALES)]
    return f"{encoding.name} has more bytes of {wide[0]} in a row of a tile" if wide else ""


class Parts:
    """What is copied of each expert: tensors on the host, where kernels find them, and in slots."""

    def __init__(self, shapes: Sequence[Shape], stored: Sequence[int], slots: Sequence[Tensor]):
        self.slots = list(slots)
        self.nbytes = sum(shape.nbytes for shape in shapes)
        self._tables = [
            torch.tensor(
                shape.table, dtype=torch.int32 if shape.kind == 1 else torch.uint8, device=t.device
            )
            for shape, t in zip(shapes, slots, strict=True)
        ]
        numbers = [len(shapes)]
        for shape, storage, t, table in zip(shapes, stored, slots, self._tables, strict=True):
            assert t.is_contiguous()
            assert t[0].nbytes == shape.nbytes
            at = table.data_ptr() if shape.table else 0
            numbers += [shape.kind, storage, t.data_ptr(), shape.nbytes, shape.nbytes]
            numbers += [shape.rows, shape.tiles, shape.each, at]
        numbers += [0] * (9 * (MOST_PARTS - len(shapes)))
        self._memory = torch.tensor(numbers, dtype=torch.int64, device=slots[0].device)
        self.address = self._memory.data_ptr()
