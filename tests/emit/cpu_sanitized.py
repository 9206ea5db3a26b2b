"""Runs the CPU backend's kernels built with sanitizers, in a process that preloads them: see test_cpu_kernels.py."""

from __future__ import annotations

from functools import partial

import torch
from test_cpu_kernels import VARIANTS, expert_mlp, fusion_of_call, program, random_weight

from fusion_moe.runtime import build, isa


def main() -> None:
    build.load = partial(build.load, flags=["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"])
    tier = isa.selected()
    for k, n, sizes in ((16, 1, (1, 0, 2)), (80, 33, (3, 17, 40)), (1296, 20, (1, 16, 0))):
        weight, rows = random_weight(3, n, k), sum(sizes) + 2
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for value in (1.0, torch.inf):
                x = torch.full((rows, k), value, dtype=dtype)
                args = (x, *weight, torch.tensor(sizes).cumsum(0).int())
                program(fusion_of_call("nvfp4_grouped_mm", *args), tier)(list(args))
    for name in VARIANTS:
        args, kwargs = expert_mlp(name, torch.bfloat16)
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        program(fusion_of_call("expert_mlp", *args, **kwargs), tier)(inputs)
    print("clean")


if __name__ == "__main__":
    main()
