"""What the host does for one token of a small layer on the CPU, where kernels take microseconds: Python and torch around them.

    python benchmarks/call_overhead.py

A layer of 8 experts, 64 features in and out, 2 experts a token, in NVFP4; one thread. Each line is the least of many short rounds, in turns
with the others, in us; "host" is what is left of it without the kernels. Lines that begin with "torch:" are what torch takes by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fusion_moe
from fusion_moe.compile import program_of
from fusion_moe.eager import fusion_of
from fusion_moe.ir.text import one_line
from fusion_moe.nn import NVFP4Experts
from fusion_moe.op_definitions import SPECS, bind, eager_types

EXPERTS, FEATURES, SLOTS = 8, 64, 2
ROUNDS, CALLS = 100, 50


def main() -> None:
    """Measures, and prints the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights = torch.randn(EXPERTS, 2 * FEATURES, FEATURES), torch.randn(EXPERTS, FEATURES, FEATURES)
    layer = NVFP4Experts.from_float(*weights)
    token = torch.randn(1, FEATURES).bfloat16(), torch.tensor([[1, 5]]), torch.rand(1, SLOTS)
    program, tensors, again = program_of_call(layer, token)
    kernels = kernels_alone(program, tensors)
    contenders = {**torch_alone(layer, token), **calls(layer, token, program, tensors, again)}
    print(f"fusion_moe {fusion_moe.__version__}, torch {torch.__version__}, one thread, least of {ROUNDS} rounds of {CALLS} calls")
    print(f"{'':64}{'us':>7}{'host':>7}\n{'the kernels of the program':64}{kernels:7.1f}")
    for name, us in least(contenders).items():
        print(f"{name:64}{us:7.1f}" + ("" if name.startswith("torch:") else f"{us - kernels:7.1f}"))


def least(contenders: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of a call of each, in turns; of a name that ends with "no_grad" under it, of others in inference mode."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(3 + ROUNDS):  # the first calls compile
        for name, call in contenders.items():
            with torch.no_grad() if name.endswith("no_grad") else torch.inference_mode():
                found[name].append(measured(call))
    return {name: min(times) for name, times in found.items()}


def measured(call: Callable[[], object]) -> float:
    """Microseconds of a call, on average over one round."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def operation_of(layer: NVFP4Experts, token: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the module passes to its operation."""
    return (*token, list(layer.weight_of("gate_up")), list(layer.weight_of("down"))), {"weight_layout": layer.weight_layout}


def program_of_call(layer: NVFP4Experts, token: tuple[torch.Tensor, ...]) -> tuple[Any, list[torch.Tensor], tuple[Any, ...]]:
    """The program of the call, its inputs, and the arguments of `fusion_moe::run` for it, as compiled graphs pass them."""
    call = bind(SPECS["fused_experts"], *operation_of(layer, token))
    text = one_line(fusion_of("fused_experts", eager_types(call), call.others))
    tensors = list(call.tensors.values())
    return program_of(text, torch.device("cpu")), tensors, (text, tensors, [1], fusion_moe.options.current().key())


def kernels_alone(program: Any, tensors: list[torch.Tensor]) -> float:
    """The C++ of a program, called with arguments that are made already."""
    program(tensors)
    entry, found = program.joined._entry, list[float]()

    def timed(*arguments: Any) -> int:
        found.extend(measured(lambda: entry(*arguments)) for _ in range(ROUNDS))
        return 0

    program.joined._arrays.call(timed, tensors, {"s0": 1})
    return min(found)


def torch_alone(layer: NVFP4Experts, token: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], object]]:
    """Operations that do nothing, written in Python as ours are, and a compiled function."""
    library, result = torch.library.Library("call_overhead", "FRAGMENT"), torch.empty_like(token[0])
    kept.append(library)
    for name, schema in (("one", "(Tensor x) -> Tensor"), ("same", SPECS["fused_experts"].schema)):
        library.define(name + schema)
        library.impl(name, lambda *_, **__: result, "CompositeExplicitAutograd")
    torch.library.register_fake("call_overhead::same", lambda x, *_, **__: torch.empty_like(x), lib=library)
    ops, (arguments, about) = torch.ops.call_overhead, operation_of(layer, token)
    compiled = torch.compile(Empty(layer.weight_of("gate_up"), layer.weight_of("down")))
    return {
        "torch: an empty operation of one tensor": lambda: ops.one.default(token[0]),
        "torch: an empty operation of fused_experts' arguments": lambda: ops.same.default(*arguments, **about),
        "torch: a module with it, torch.compile()": lambda: compiled(*token),
    }


kept: list[torch.library.Library] = []


class Empty(NVFP4Experts):
    """The same module with an operation that does nothing."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The arguments and the result of NVFP4Experts."""
        gate_up, down = (self._parts(name) for name in self.projections)
        return torch.ops.call_overhead.same(hidden_states, top_k_index, top_k_weights, gate_up, down)


def calls(layer: NVFP4Experts, token: tuple[torch.Tensor, ...], program: Any, tensors: Any, again: Any) -> dict[str, Callable[[], object]]:
    """The ways to one program."""
    arguments, about = operation_of(layer, token)
    ops = torch.ops.fusion_moe
    compiled, graph = torch.compile(layer, backend="fusion_moe"), torch.compile(layer)
    operation = lambda: ops.fused_experts(*arguments, **about)  # noqa: E731
    return {
        "program(tensors)": lambda: program(tensors),
        "torch.ops.fusion_moe.run, as compiled graphs call it": lambda: ops.run.default(*again),
        "torch.ops.fusion_moe.fused_experts": operation,
        "torch.ops.fusion_moe.fused_experts, no_grad": operation,
        "nn.NVFP4Experts": lambda: layer(*token),
        "nn.NVFP4Experts, no_grad": lambda: layer(*token),
        'nn.NVFP4Experts, torch.compile(backend="fusion_moe")': lambda: compiled(*token),
        "nn.NVFP4Experts, torch.compile()": lambda: graph(*token),
    }


if __name__ == "__main__":
    main()
