"""A mixture-of-experts layer through real nvFuser on a CUDA device, for conformance: every way in,
the same inputs, one run.

    python benchmarks/nvfuser_moe.py [--tokens 1 64 1024] [--model qwen3-30b-a3b]

Printed for each: the largest difference from a float64 loop over experts, relative to the largest
element; the median time of a call with its 10th and 90th percentile; its ratio to torch's own
grouped_mm on weights dequantized to bf16 beforehand, which reads four times the bytes. The floor is
the time to read the touched weights' bytes at 4.2 TB/s. nvFuser dequantizes all weights at each
call and its product loops over groups on the host: this path exists for inspection and conformance,
not for speed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import NVFP4, Quantized, dequantize
from fusion_moe.frontends.inductor import backend
from fusion_moe.thunder import thunder_executors

MODELS = {  # hidden, intermediate, experts, slots of a token
    "small": (512, 256, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "llama-4-scout": (5120, 8192, 16, 1),
}
READ = 4.2e12  # bytes per second


class Layer(torch.nn.Module):
    """Experts with given routing."""

    def __init__(self, hidden: int, intermediate: int, experts: int):
        super().__init__()
        gate_up, down = (
            torch.randn(s, device="cuda") / 32
            for s in ((experts, 2 * intermediate, hidden), (experts, hidden, intermediate))
        )
        self.experts = fusion_moe.NVFP4Experts.from_float(gate_up, down)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.experts(x, ids, weights)

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2I, H] and down [E, H, I], decoded."""
        e = self.experts
        return (
            dequantize(
                Quantized(
                    e.gate_up_proj, e.gate_up_proj_scale, e.gate_up_decode_scale, encoding=NVFP4
                )
            ).to(dtype),
            dequantize(
                Quantized(e.down_proj, e.down_proj_scale, e.down_decode_scale, encoding=NVFP4)
            ).to(dtype),
        )


def grouped(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer with torch's grouped_mm on decoded weights: what there is without fusion_moe."""
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=len(gate_up)).cumsum(0).int()
    rows = x[order // ids.shape[1]]
    gate, up = torch.nn.functional.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, -1)
    y = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, offs=ends)
    y = torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1)
    return (y.float() * weights[..., None]).sum(1).to(x.dtype)


def loop(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in float64, expert by expert."""
    out = torch.zeros(len(x), x.shape[1], dtype=torch.float64, device=x.device)
    for e in range(len(gate_up)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if len(token):
            gate, up = (x[token].double() @ gate_up[e].double().T).chunk(2, -1)
            y = (torch.nn.functional.silu(gate) * up) @ down[e].double().T
            out.index_add_(0, token, y * weights[token, slot, None].double())
    return out


def ways(layer: Layer) -> dict[str, Callable[..., Tensor]]:
    """Every way of running the layer, by name."""
    decoded = layer.matrices(torch.bfloat16)

    def nvfuser(*args: Tensor) -> Tensor:
        with options.override(target="sm_90"):
            return layer(*args)

    compiled = torch.compile(
        layer, backend=partial(backend, options={"fusion_moe.target": "sm_90"}), dynamic=False
    )
    found = {
        "torch grouped_mm, bf16 weights": lambda *args: grouped(*args, *decoded),
        "the same under torch.compile": partial(
            _with, torch.compile(grouped, dynamic=False), decoded
        ),
        "torch grouped_mm, decoding first": lambda *args: grouped(
            *args, *layer.matrices(torch.bfloat16)
        ),
        "fusion_moe eager, reference": layer,
        "fusion_moe eager, nvFuser": nvfuser,
        "fusion_moe torch.compile, nvFuser": compiled,
    }
    return found | thunder_doors(layer)


def thunder_doors(layer: Layer) -> dict[str, Callable[..., Tensor]]:
    """thunder with our executor, and with nvFuser's that our translators extend; none where thunder
    is missing.
    """
    try:
        import thunder
    except ImportError:
        print("thunder is not installed: skipping it")
        return {}
    with options.override(target="sm_90"):
        ours = thunder.jit(layer, executors=thunder_executors())
        theirs = thunder.jit(layer, executors=thunder_executors(nvfuser=True))
    return {
        "thunder, fusion_moe's executor": _at_target(ours),
        "thunder, nvFuser's executor": theirs,
    }


def _with(function: Callable[..., Tensor], more: tuple[Tensor, ...], *args: Tensor) -> Tensor:
    return function(*args, *more)


def _at_target(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Tensor) -> Tensor:
        with options.override(target="sm_90"):
            return function(*args)

    return call


def milliseconds(call: Callable[[], Tensor], repeats: int) -> list[float]:
    """Sorted times of single calls."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)


def measure(name: str, tokens: int, repeats: int) -> None:
    """One table: a model's layer at one number of tokens."""
    hidden, intermediate, experts, slots = MODELS[name]
    torch.manual_seed(0)
    layer = Layer(hidden, intermediate, experts).requires_grad_(False)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weights, ids = torch.rand(tokens, experts, device="cuda").topk(slots)
    want = loop(x, ids, weights, *layer.matrices(torch.float32))
    touched = layer.experts.nbytes * len(ids.unique()) / experts
    print(
        f"\n{name}: {tokens} tokens, {len(ids.unique())} of {experts} experts; floor "
        f"{touched / READ * 1e3:.4f} ms"
    )
    print(f"{'':36}{'max diff':>10}{'median ms':>11}{'p10':>9}{'p90':>9}{'x torch':>9}")
    base = None
    for way, call in ways(layer).items():
        with torch.inference_mode():
            try:
                found = call(x, ids, weights)
            except Exception as error:  # told, and the others still run
                print(f"{way:36}{type(error).__name__}: {str(error).splitlines()[0][:90]}")
                continue
            for _ in range(3):
                call(x, ids, weights)
            times = milliseconds(lambda call=call: call(x, ids, weights), repeats)
        median = statistics.median(times)
        base = base or median
        diff = (found.double() - want).abs().max() / want.abs().max()
        p10, p90 = times[len(times) // 10], times[-1 - len(times) // 10]
        print(
            f"{way:36}{diff.item():>10.2e}{median:>11.3f}{p10:>9.3f}{p90:>9.3f}"
            f"{median / base:>9.2f}",
            flush=True,
        )


def main() -> None:
    """Every model asked for, at every number of tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["small", "qwen3-30b-a3b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 64, 1024])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for model in args.model:
        for tokens in args.tokens:
            measure(model, tokens, args.repeats)


if __name__ == "__main__":
    main()
