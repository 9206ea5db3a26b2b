"""What the host does for one token of a layer: Python and torch around kernels.

    python benchmarks/call_overhead.py                  # a small layer on the CPU, one thread
    python benchmarks/call_overhead.py --device cuda    # Qwen3-30B-A3B's, without CUDA graphs:
                                                        # until its kernels are enqueued
    FUSION_MOE_NATIVE_CALLS=0 python benchmarks/call_overhead.py    # all calls in Python

Each line is the least of many short rounds, in turns with the others, and their median, in us. On
the CPU that includes the kernels, which take a few.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from stored_scales import calls as products
from torch import Tensor

import fusion_moe
from fusion_moe.bodies.eager import fusion_of
from fusion_moe.definitions.operations import SPECS, bind, eager_types
from fusion_moe.ir.text import one_line
from fusion_moe.nn import NVFP4Experts
from fusion_moe.runtime import native

# experts, H, I, experts of a token, calls of a round: on CUDA never so many that the queue is full
CASES = {"cpu": (8, 64, 64, 2, 50), "cuda": (128, 2048, 768, 8, 20)}
ROUNDS = 100


def ways(layer: NVFP4Experts, token: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """Calls of the same program. A name that ends with "no_grad" is called under it, others in
    inference mode.
    """
    arguments = (*token, list(layer.weight_of("gate_up")), list(layer.weight_of("down")))
    how = {"weight_format": "nvfp4", "weight_layout": layer.weight_layout}
    ops = torch.ops.fusion_moe
    call = bind(SPECS["fused_experts"], arguments, how)
    text = one_line(fusion_of("fused_experts", eager_types(call), call.others))
    again = (text, list(call.tensors.values()), [1], fusion_moe.options.current().key())
    run = ops.run_graph_safe if token[0].is_cuda else ops.run

    def graph(x: Tensor, *others: Tensor) -> Tensor:
        y: Tensor = ops.fused_experts(x * 2, *others, *arguments[3:], **how)
        return y + x

    found: dict[str, Callable[[], object]] = {
        "fusion_moe::run, as compiled graphs call it": lambda: run.default(*again),
        "fused_experts": lambda: ops.fused_experts(*arguments, **how),
        "fused_experts, no_grad": lambda: ops.fused_experts(*arguments, **how),
        "nn.NVFP4Experts": lambda: layer(*token),
        "nn.NVFP4Experts, no_grad": lambda: layer(*token),
    }
    for backend in ("inductor", "fusion_moe"):
        for name, function in (("fused_experts between two kernels", graph), ("the module", layer)):
            compiled = torch.compile(function, backend=backend)
            found[f"{name}, torch.compile(backend={backend!r})"] = lambda f=compiled: f(*token)  # type: ignore[misc]
    of_scales = "f16a_nvfp4weight_scaled_grouped_mm", "nvfp4_grouped_mm"
    found |= zip(of_scales, products(2, 128, 64, 1, token[0].device.type), strict=True)
    return found


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=CASES, default="cpu")
    device = parser.parse_args().device
    experts, hidden, inner, slots, calls = CASES[device]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if in_cxx := fusion_moe.options.current().native_calls:
        native.load()
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    layer = NVFP4Experts.from_float(
        *(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    )
    token = (
        torch.randn(1, hidden, device=device).bfloat16(),
        torch.arange(slots, device=device)[None],
        torch.rand(1, slots, device=device),
    )
    layer(*token)
    found = ways(layer, token)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(3 + ROUNDS):  # the first calls compile
        for name, call in found.items():
            with torch.no_grad() if name.endswith("no_grad") else torch.inference_mode():
                wait()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    print(f"fusion_moe {fusion_moe.__version__}, torch {torch.__version__}, {device}, one thread")
    print(f"{'calls in C++' if in_cxx else 'calls in Python':64}{'least':>7}{'median':>8}")
    for name, us in times.items():
        print(f"{name:64}{min(us[3:]):7.1f}{statistics.median(us[3:]):8.1f}")


if __name__ == "__main__":
    main()
