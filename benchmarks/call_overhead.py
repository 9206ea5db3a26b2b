"""What the host does for one token of a layer: Python and torch around kernels.

    python benchmarks/call_overhead.py                    a small layer on the CPU, one thread,
                                                          where kernels take microseconds
    python benchmarks/call_overhead.py --device cuda      a layer of Qwen3-30B-A3B without CUDA
                                                          graphs: until its kernels are enqueued

Each line is the least of many short rounds, in turns with the others, and their median, in us; on
the CPU "host" is what is left of the least without the kernels. Lines that begin with "torch:" are
what torch takes by itself: operations that do nothing, in Python. "fusion_moe_python" has the
operations as they are where calls do not run without Python; with FUSION_MOE_NATIVE_CALLS=0 all
lines are so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import fusion_moe
from fusion_moe.bodies.eager import fusion_of
from fusion_moe.compile import program_of
from fusion_moe.definitions.operations import SPECS, bind, eager_types
from fusion_moe.ir.text import one_line
from fusion_moe.nn import NVFP4Experts
from fusion_moe.runtime import native

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A layer of one token, and how often it is called in a round: on CUDA never so often that the
    queue of launches is full.
    """

    device: str
    experts: int
    hidden: int
    intermediate: int
    slots: int
    rounds: int
    calls: int

    def layer(self) -> NVFP4Experts:
        """Random weights, as the kernels of the device want them."""
        shapes = (
            (self.experts, 2 * self.intermediate, self.hidden),
            (self.experts, self.hidden, self.intermediate),
        )
        layer = NVFP4Experts.from_float(
            *(torch.randn(shape, device=self.device, dtype=torch.bfloat16) for shape in shapes)
        )
        layer(*self.token())
        return layer

    def token(self) -> tuple[torch.Tensor, ...]:
        """hidden_states, top_k_index and top_k_weights."""
        ids = torch.arange(self.slots, device=self.device)[None]
        return (
            torch.randn(1, self.hidden, device=self.device).bfloat16(),
            ids,
            torch.rand(1, self.slots, device=self.device),
        )

    def measured(self, call: Call) -> float:
        """Microseconds of a call, on average over one round."""
        self.wait()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        taken = (time.perf_counter() - start) / self.calls * 1e6
        self.wait()
        return taken

    def wait(self) -> None:
        """For the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


CASES = {
    "cpu": Case("cpu", 8, 64, 64, 2, 100, 50),
    "cuda": Case("cuda", 128, 2048, 768, 8, 100, 20),
}


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=CASES, default="cpu")
    case = CASES[parser.parse_args().device]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if fusion_moe.options.current().native_calls:
        native.load()
    layer, token = case.layer(), case.token()
    program, tensors, again = program_of_call(layer, token)
    kernels = kernels_alone(case, program, tensors) if case.device == "cpu" else None
    contenders = {**torch_alone(layer, token), **calls(layer, token, program, tensors, again)}
    print(
        f"fusion_moe {fusion_moe.__version__}, torch {torch.__version__}, one thread, "
        f"{case.rounds} rounds of {case.calls} calls",
        end="",
    )
    print(f", {where(case)}, {'C++' if fusion_moe.options.current().native_calls else 'Python'}")
    print(f"{'':64}{'least':>7}{'median':>8}" + ("" if kernels is None else f"{'host':>7}"))
    if kernels is not None:
        print(f"{'the kernels of the program':64}{kernels:7.1f}")
    for name, times in measure(case, contenders).items():
        least = min(times)
        host = "" if kernels is None or name.startswith("torch:") else f"{least - kernels:7.1f}"
        print(f"{name:64}{least:7.1f}{statistics.median(times):8.1f}{host}")


def where(case: Case) -> str:
    """The machine."""
    return torch.cuda.get_device_name() if case.device == "cuda" else "CPU"


def measure(case: Case, contenders: Mapping[str, Call]) -> dict[str, list[float]]:
    """Microseconds of a call of each, in turns; of a name that ends with "no_grad" under it, of
    others in inference mode.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(3 + case.rounds):  # the first calls compile
        for name, call in contenders.items():
            with torch.no_grad() if name.endswith("no_grad") else torch.inference_mode():
                found[name].append(case.measured(call))
    return {name: times[3:] for name, times in found.items()}


def operation_of(
    layer: NVFP4Experts, token: tuple[torch.Tensor, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the module passes to its operation."""
    return (*token, list(layer.weight_of("gate_up")), list(layer.weight_of("down"))), {
        "weight_format": layer.encoding.name,
        "weight_layout": layer.weight_layout,
    }


def program_of_call(
    layer: NVFP4Experts, token: tuple[torch.Tensor, ...]
) -> tuple[Any, list[torch.Tensor], tuple[Any, ...]]:
    """The program of the call, its inputs, and the arguments of `fusion_moe::run` for it, as
    compiled graphs pass them.
    """
    call = bind(SPECS["fused_experts"], *operation_of(layer, token))
    text = one_line(fusion_of("fused_experts", eager_types(call), call.others))
    tensors = list(call.tensors.values())
    return (
        program_of(text, tensors[0].device),
        tensors,
        (text, tensors, [1], fusion_moe.options.current().key()),
    )


def kernels_alone(case: Case, program: Any, tensors: list[torch.Tensor]) -> float:
    """The C++ of a program, called with arguments that are made already."""
    program(tensors)
    entry, found = program.joined._entry, list[float]()

    def timed(*arguments: Any) -> int:
        found.extend(case.measured(lambda: entry(*arguments)) for _ in range(case.rounds))
        return 0

    program.joined._arrays.call(timed, tensors, {"s0": 1})
    return min(found)


def torch_alone(layer: NVFP4Experts, token: tuple[torch.Tensor, ...]) -> dict[str, Call]:
    """Operations that do nothing, written in Python, and graphs with them."""
    library, result = torch.library.Library("call_overhead", "FRAGMENT"), torch.empty_like(token[0])
    kept.append(library)
    for name, schema in (("one", "(Tensor x) -> Tensor"), ("same", SPECS["fused_experts"].schema)):
        library.define(name + schema)
        library.impl(name, lambda *_, **__: result, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "call_overhead::same", lambda x, *_, **__: torch.empty_like(x), lib=library
    )
    ops, (arguments, about) = torch.ops.call_overhead, operation_of(layer, token)
    return {
        "torch: an empty operation of one tensor": lambda: ops.one.default(token[0]),
        "torch: an empty operation of fused_experts' arguments": lambda: ops.same.default(
            *arguments, **about
        ),
        "torch: a graph of it, torch.compile()": graph_of(ops.same, layer, token, "inductor"),
    }


kept: list[torch.library.Library] = []


def graph_of(
    operation: Any, layer: NVFP4Experts, token: tuple[torch.Tensor, ...], backend: str
) -> Call:
    """A compiled function of a token, whose graph is one call of an operation between two that
    Inductor generates.
    """
    (_, _, _, gate_up, down), about = operation_of(layer, token)

    def graph(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return operation(x * 2, ids, w, gate_up, down, **about) + x

    compiled = torch.compile(graph, backend=backend)
    return lambda: compiled(*token)


def calls(
    layer: NVFP4Experts, token: tuple[torch.Tensor, ...], program: Any, tensors: Any, again: Any
) -> dict[str, Call]:
    """The ways to one program."""
    arguments, about = operation_of(layer, token)
    ops = torch.ops.fusion_moe
    run = ops.run_graph_safe if token[0].is_cuda else ops.run
    compiled, graph = torch.compile(layer, backend="fusion_moe"), torch.compile(layer)
    operation = lambda: ops.fused_experts(*arguments, **about)  # noqa: E731
    twins = torch.ops.fusion_moe_python if fusion_moe.options.current().native_calls else ops
    twin_of_run = twins.run_graph_safe if token[0].is_cuda else twins.run
    return {
        "program(tensors)": lambda: program(tensors),
        "torch.ops.fusion_moe_python.run": lambda: twin_of_run.default(*again),
        "torch.ops.fusion_moe_python.fused_experts": lambda: twins.fused_experts(
            *arguments, **about
        ),
        "torch.ops.fusion_moe_python.fused_experts, no_grad": lambda: twins.fused_experts(
            *arguments, **about
        ),
        "torch.ops.fusion_moe.run, as compiled graphs call it": lambda: run.default(*again),
        "torch.ops.fusion_moe.fused_experts": operation,
        "torch.ops.fusion_moe.fused_experts, no_grad": operation,
        "a graph of it, torch.compile()": graph_of(ops.fused_experts, layer, token, "inductor"),
        'a graph of it, torch.compile(backend="fusion_moe")': graph_of(
            ops.fused_experts, layer, token, "fusion_moe"
        ),
        "nn.NVFP4Experts": lambda: layer(*token),
        "nn.NVFP4Experts, no_grad": lambda: layer(*token),
        'nn.NVFP4Experts, torch.compile(backend="fusion_moe")': lambda: compiled(*token),
        "nn.NVFP4Experts, torch.compile()": lambda: graph(*token),
    }


if __name__ == "__main__":
    main()
