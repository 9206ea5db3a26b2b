"""How fast a core of this CPU quantizes weights in bfloat16, by each rule for scales.

    python benchmarks/cpu_quantize.py            MB of bfloat16 a second and core, with and without
                                                 the kernels of blocks.cpp

The least CPU time of several calls, on one thread, both in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fusion_moe.encodings import ENCODINGS, search
from fusion_moe.encodings.convert import quantize_weight

CELLS = [
    *(("nvfp4", rule) for rule in search.RULES),
    *((name, rule) for name in ("mxfp4", "int4", "int4_128") for rule in ("max", "mse")),
]
ROUNDS = 7


def seconds(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    torch.set_num_threads(1)
    x = (torch.randn(2, 512, 2048) / 50).bfloat16()
    kernels = dict(search.BLOCK_KERNELS)
    print(f"{'encoding':10} {'scales':14} {'kernels':>8} {'torch':>8}  MB/s")
    for name, rule in CELLS:
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(ROUNDS + 1):  # the first one compiles
            for with_kernels, of_round in times.items():
                search.BLOCK_KERNELS.clear()
                search.BLOCK_KERNELS.update(kernels if with_kernels else {})
                of_round.append(
                    seconds(lambda: quantize_weight(x, ENCODINGS[name], scales=rule))  # noqa: B023
                )
        rates = [x.nbytes / 1e6 / min(of_round[1:]) for of_round in times.values()]
        print(f"{name:10} {rule:14} {rates[0]:8.0f} {rates[1]:8.0f}")


if __name__ == "__main__":
    main()
