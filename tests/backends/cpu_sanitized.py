"""Runs the CPU backend's kernels built with sanitizers, in a process that preloads them: see
test_cpu_kernels.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import precompiled
import torch
from cpu_tiers import OF_VECTORS, TIERS, emulated_amx, together
from fusions import fusion_of_call
from test_cpu_added import fusion_of, operands as beside
from test_cpu_encodings import random_weights
from test_cpu_kernels import VARIANTS, expert_mlp, random_weight
from test_cpu_loops import CASES, OF_ANY_ROWS, made, swizzled
from test_cpu_training import BF16, KINDS, operands, product

from fusion_moe.ir.core import Fusion
from fusion_moe.runtime import build, isa, memory

Cases = Iterator[tuple[Fusion, list[torch.Tensor]]]
# of each tier, the encodings that it has kernels of its own for, and those in products of int8
BOTH = ("nvfp4", "mxfp4")
OWN = {
    "amx": (BOTH, ()),
    "avx512": ((*BOTH, "int4", "bf16"), BOTH),
    "avx2": ((*BOTH, "bf16"), ()),
    "generic": (("nvfp4", "int4"), ("nvfp4",)),
}


def allocate_apart(
    found: memory.Memory, device: torch.device | None = None
) -> tuple[object, list[int]]:
    """As memory.allocate, but each array is an allocation of its own, past which nothing may be
    touched.
    """
    held = [torch.empty(array.nbytes, dtype=torch.uint8, device=device) for array in found.arrays]
    return held, [t.data_ptr() for t in held]


def main() -> None:
    # for compilers, which take twice as long with ASan's allocator
    os.environ.pop("LD_PRELOAD", None)
    memory.allocate = allocate_apart
    build.BASE_FLAGS = (
        *build.BASE_FLAGS,
        "-O0",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    )
    precompiled.use()
    tier = isa.selected()
    encodings, of_int8 = OWN[tier]
    cases = [*products_of(encodings), *products_of_int8(of_int8)]
    if tier in OF_VECTORS:
        cases += [*products_of_training(), *products_beside_others()]
    if tier == TIERS[-1]:  # no tier has loops, prologues and epilogues of its own
        cases += [*experts(), *loops()]
    run(tier, cases)
    print("clean")


def run(tier: str, cases: Iterable[tuple[Fusion, list[torch.Tensor]]]) -> None:
    """Kernel by kernel, and in one call."""
    programs = together({str(fusion): fusion for fusion, _ in cases}, tier)
    for fusion, inputs in cases:
        program = programs[str(fusion)]
        program._one_by_one(inputs, program.sizes(inputs, {}))
        program(inputs)


def weights(encoding: str, n: int, k: int) -> list[torch.Tensor]:
    return list(
        random_weight(3, n, k) if encoding == "nvfp4" else random_weights(encoding, 3, n, k)
    )


def products_of(encodings: Iterable[str]) -> Cases:
    for encoding in encodings:
        for n, k, sizes in ((1, 32, (1, 0, 2)), (33, 96, (3, 17, 40)), (20, 1312, (1, 16, 0))):
            w, ends = weights(encoding, n, k), torch.tensor(sizes).cumsum(0).int()
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for value in (1.0, torch.inf):
                    x = torch.full((sum(sizes) + 2, k), value, dtype=dtype)
                    yield (
                        fusion_of_call("grouped_mm", x, w, ends, weight_format=encoding),
                        [
                            x,
                            *w,
                            ends,
                        ],
                    )


def products_of_int8(encodings: Iterable[str]) -> Cases:
    for encoding in encodings:
        for n, k, sizes in ((1, 32, (1, 0, 2)), (33, 1312, (250, 5, 33))):
            w, ends = weights(encoding, n, k), torch.tensor(sizes).cumsum(0).int()
            for value in (1.0, torch.inf):
                x = torch.full((sum(sizes) + 2, k), value, dtype=torch.bfloat16)
                how = {"weight_format": encoding, "activation_format": "int8"}
                yield fusion_of_call("grouped_mm", x, w, ends, **how), [x, *w, ends]


def products_of_training() -> Cases:
    for kind in KINDS:
        for n, k, sizes, b_dtype in (
            (45, 71, (3, 17, 40), torch.bfloat16),
            (20, 200, (1100, 16, 0), torch.float32),
        ):
            dtypes = (torch.bfloat16, b_dtype if kind == "grouped_outer" else torch.bfloat16)
            a, b = operands(kind, sizes, n, k, dtypes, exact=False)
            shape = tuple(b.shape[1:] if kind == "grouped_outer" else b.shape)
            fusion = product(kind, (n, a.dtype), (shape, b.dtype), len(sizes))
            yield fusion, [a, b, torch.tensor(sizes).cumsum(0).int()]


def products_beside_others() -> Cases:
    for kind in ("grouped_mm", "grouped_mm_t"):
        for n, sizes in ((1, (1, 0, 2)), (71, (3, 17, 40))):
            both = [(kind, beside(kind, sizes, n, k, BF16, 0)) for k in (40, 3)]
            tensors = [t for _, each in both for t in each]
            yield fusion_of(both), [torch.tensor(sizes).cumsum(0).int(), *tensors]


def experts() -> Cases:
    for name in VARIANTS:
        args, kwargs = expert_mlp(name, torch.bfloat16)
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        yield fusion_of_call("expert_mlp", *args, **kwargs), inputs


def loops() -> Cases:
    for name in CASES:
        fusion, inputs = made(name)
        for rows in (7, 1, 0) if name in OF_ANY_ROWS else (7,):
            yield fusion, [t[:rows] if t.shape[:1] == (7,) else t for t in inputs]
    for sizes in ((0, 0), (1, 200), (31, 1)):
        fusion, inputs = swizzled(sizes, 7)
        yield fusion, inputs
        # no row to spare: of no group, nothing at all
        yield fusion, [inputs[0][: int(inputs[1][-1])], inputs[1]]


if __name__ == "__main__":
    with emulated_amx():
        main()
