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

from ..backends.cuda.launch import KERNELS
from ..encodings import CodeOrder, Encoding, Part as EncodingPart
from ..encodings.orders import Nibbles
from ..layouts.w16x64 import COLUMNS
from ..runtime import cuda, nvrtc

HERE = Path(__file__).parent / "kernels"
THREADS, SUMMING = 512, 64  # of a block; of one that sums
MOST_PARTS = 12  # of kernels/experts.cuh
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
    """The source of the kernel that puts the rows of a part of a long step into its result."""
    return text("put_rows", "put", "PutRows", "s.run();")


def load() -> str:
    """The source of the kernel that copies experts from the host into the GPU's cache."""
    return text("load", "experts", "Load", "s.run();")


def build(source: str, arch: str) -> Path:
    """The path of the cubin of a kernel's source, compiled if needed. BuildError."""
    flags = ("--device-int128",)
    return nvrtc.build(source, name=name_of(source), arch=arch, headers=headers(), flags=flags)


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

    kind: 0 its bytes, 1 codes of 4 bits, 2 scales of a byte; the last two into the layout w16x64.
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
        """That of a tensor, of which `part` of an encoding becomes tiles if an order of codes is
        given.
        """
        nbytes = t[0].nbytes
        if order and part and part.scale is None:
            return cls(1, nbytes, t.shape[1], t.shape[2] // 32, 0, words_of_codes(order))
        if order and part and part.scale and part.of_blocks:
            each = scales_of_tile(part)
            return cls(2, nbytes, t.shape[1], t.shape[2] // each, each, part.scale.recoding.table)
        each = 16 if nbytes % 16 == 0 else 2
        return cls(0, nbytes, 0, nbytes // each, each)


def words_of_codes(order: CodeOrder) -> tuple[int, ...]:
    """For a code of each row i, half h and place j: what it is in a word of a tile, u32[2, 2, 2,
    16]. Words are these, put together.
    """
    places = range(8)
    x = torch.zeros(8, 16, 2, 2, 2, dtype=torch.uint8)  # j h i
    for place in places:
        i, h, j = place // 4, place // 2 % 2, place % 2
        x[place, :, j, h, i] = torch.arange(16)
    words = order.stored(x).reshape(8, 16, 4).view(torch.int32)
    return tuple(words.flatten().tolist())


def scales_of_tile(part: EncodingPart) -> int:
    """How many scales a row of a tile has; tiles of scales for many elements are as wide as one."""
    assert part.scale is not None
    return max(1, COLUMNS // part.scale.block) if part.scale.block > 0 else 1


def why_not_tiled(encoding: Encoding) -> str:
    """Why kernels do not copy weights in an encoding into the layout w16x64; "" if they do."""
    wide = [part.name for part in encoding.parts if part.of_blocks and part.dtype.itemsize != 1]
    if not isinstance(encoding.element.tile_order, Nibbles) or wide or encoding.axis != -1:
        return f"{encoding.name} has no codes of 4 bits with scales of a byte along K"
    return ""


class Parts:
    """What is copied of each expert: tensors on the host, where kernels find them, and in slots."""

    def __init__(self, shapes: Sequence[Shape], stored: Sequence[int], slots: Sequence[Tensor]):
        self.slots = list(slots)
        self.nbytes = sum(shape.nbytes for shape in shapes)
        dtypes = torch.uint8, torch.int32, torch.uint8  # by kind
        self._tables = [
            torch.tensor(shape.table, dtype=dtypes[shape.kind], device=t.device)
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


@cache
def headers() -> nvrtc.Headers:
    """Those of kernels/, and of all CUDA kernels."""
    return nvrtc.Headers({**nvrtc.headers(KERNELS), **nvrtc.headers(HERE)})
