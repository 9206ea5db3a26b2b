"""Runs the CPU backend's kernels built with sanitizers, in a process that preloads them: see
test_cpu_kernels.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import precompiled
import torch
from cpu_tiers import TIERS, emulated_amx, fusion_of_call, together
from test_cpu_added import computed as summed
from test_cpu_added import operands as beside
from test_cpu_encodings import FORMATS, random_weights
from test_cpu_kernels import VARIANTS, expert_mlp, random_weight
from test_cpu_loops import CASES, OF_ANY_ROWS, compiled, swizzled
from test_cpu_training import computed, operands

from fusion_moe.ir.core import Fusion
from fusion_moe.runtime import build, isa, memory

Cases = Iterator[tuple[Fusion, list[torch.Tensor]]]


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
    run(tier, [*products_of_nvfp4(), *products_of_encodings(), *products_of_int8(), *experts()])
    products_of_training(tier)
    products_beside_others(tier)
    if tier == TIERS[-1]:  # no tier has loops of its own
        loops()
    print("clean")


def run(tier: str, cases: Iterable[tuple[Fusion, list[torch.Tensor]]]) -> None:
    """Kernel by kernel, and in one call."""
    cases = [(str(fusion), fusion, inputs) for fusion, inputs in cases]
    programs = together({text: fusion for text, fusion, _ in cases}, tier)
    for text, _, inputs in cases:
        programs[text]._one_by_one(inputs, programs[text].sizes(inputs, {}))
        programs[text](inputs)


def products_of_nvfp4() -> Cases:
    for k, n, sizes in ((16, 1, (1, 0, 2)), (80, 33, (3, 17, 40)), (1296, 20, (1, 16, 0))):
        weight, rows = random_weight(3, n, k), sum(sizes) + 2
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for value in (1.0, torch.inf):
                x = torch.full((rows, k), value, dtype=dtype)
                args = (x, *weight, torch.tensor(sizes).cumsum(0).int())
                yield fusion_of_call("nvfp4_grouped_mm", *args), list(args)


def products_of_encodings() -> Cases:
    for encoding in FORMATS:
        for n, k, sizes in ((1, 32, (1, 0, 2)), (33, 96, (3, 17, 40)), (20, 1312, (1, 16, 0))):
            x, ends = torch.randn(sum(sizes) + 2, k).bfloat16(), torch.tensor(sizes).cumsum(0).int()
            args = (x, random_weights(encoding, 3, n, k), ends)
            yield fusion_of_call("grouped_mm", *args, weight_format=encoding), [x, *args[1], ends]


def products_of_int8() -> Cases:
    for encoding in ("nvfp4", "mxfp4"):
        for n, k, sizes in ((1, 32, (1, 0, 2)), (33, 1312, (250, 5, 33))):
            weight, rows = (
                random_weight(3, n, k)
                if encoding == "nvfp4"
                else random_weights(encoding, 3, n, k),
                sum(sizes) + 2,
            )
            ends = torch.tensor(sizes).cumsum(0).int()
            for value in (1.0, torch.inf):
                x = torch.full((rows, k), value, dtype=torch.bfloat16)
                fusion = fusion_of_call(
                    "grouped_mm",
                    x,
                    list(weight),
                    ends,
                    weight_format=encoding,
                    activation_format="int8",
                )
                yield fusion, [x, *weight, ends]


def products_of_training(tier: str) -> None:
    for kind in ("grouped_mm_t", "grouped_outer"):
        for n, k, sizes, b_dtype in (
            (45, 71, (3, 17, 40), torch.bfloat16),
            (20, 200, (1100, 16, 0), torch.float32),
        ):
            dtypes = (torch.bfloat16, b_dtype if kind == "grouped_outer" else torch.bfloat16)
            a, b = operands(kind, sizes, n, k, dtypes, exact=False)
            computed(kind, tier, a, b, torch.tensor(sizes).cumsum(0).int())


def products_beside_others(tier: str) -> None:
    both = (torch.bfloat16, torch.bfloat16)
    for kind in ("grouped_mm", "grouped_mm_t"):
        for n, sizes in ((1, (1, 0, 2)), (71, (3, 17, 40))):
            summed([(kind, beside(kind, sizes, n, k, both, 0)) for k in (40, 3)], sizes, tier)


def experts() -> Cases:
    for name in VARIANTS:
        args, kwargs = expert_mlp(name, torch.bfloat16)
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        yield fusion_of_call("expert_mlp", *args, **kwargs), inputs


def loops() -> None:
    for name, make in CASES.items():
        fusion, inputs = make()
        for rows in (7, 1, 0) if name in OF_ANY_ROWS else (7,):
            compiled(fusion)([t[:rows] if t.shape[0] == 7 else t for t in inputs])
    for sizes in ((0, 0), (1, 200), (31, 1)):
        fusion, inputs = swizzled(sizes, 7)
        compiled(fusion)(inputs)
        # no row to spare: of no group, nothing at all
        compiled(fusion)([inputs[0][: int(inputs[1][-1])], inputs[1]])


if __name__ == "__main__":
    with emulated_amx():
        main()
