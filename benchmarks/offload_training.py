"""A step with adapters whose experts are in the host's memory, beside a step with all experts
on the GPU, in turns: milliseconds, those that copies alone would take, the GPU's peak, and whether
all gradients are equal, bit for bit.

    python benchmarks/offload_training.py --layers 12 --tokens 16384 4096
    python benchmarks/offload_training.py --model qwen3-235b --layers 4 --files FOLDER
    python benchmarks/offload_training.py --attention --checkpointing    # needs PEFT
    python benchmarks/offload_training.py --model tiny --tokens 64    # on a CPU: equal bits alone
    python benchmarks/offload_training.py --model small --layers 4 --tokens 2048 --files FOLDER \\
        --steps 500    # flat memory

Layers of experts of a model's sizes with random weights, LoRA of rank 16, and four frozen square
products between them in place of attention, which is not computed, since it would add up gradients
in another order each time. --attention: the model of finetune_peers.py, without an optimizer; its
gradients are not compared.

A time is that of a step among several that nothing waits for in between, as in training: what one
step fetches for the next comes meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.lora.adapter import add_lora_
from fusion_moe.nn import Experts, NVFP4Experts
from fusion_moe.offload import OffloadedExperts
from fusion_moe.offload.cache import Cache
from fusion_moe.offload.machine import EXPECTED
from fusion_moe.offload.offload import _into_files
from fusion_moe.offload.pretended import Pretended
from fusion_moe.runtime.host_memory import pages

# experts, hidden and intermediate features, experts of a token
MODELS = {
    "qwen3-30b": (128, 2048, 768, 8),
    "qwen3-235b": (128, 4096, 1536, 8),
    "small": (32, 1024, 512, 4),
    "tiny": (8, 64, 32, 2),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM, TIMES, STEPS = 2, 5, 3  # steps of a time


class Layers(nn.Module):
    """Layers of experts, and what is between them."""

    def __init__(self, layers: list[Any], hidden: int):
        super().__init__()
        self.layers, self.hidden = nn.ModuleList(layers), hidden
        self.between = torch.eye(hidden, dtype=torch.bfloat16, device=DEVICE)

    def forward(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """x [T, H] -> [T, H]"""
        for layer in self.layers:
            for _ in range(4):
                x = linear(x, self.between)
            x = x + layer(layer_norm(x, (self.hidden,)), ids, w)
        return x


def experts(seed: int, encoding: str, count: int, hidden: int, inner: int) -> Experts:
    """Of a layer, on the device."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    up, down = (
        torch.randn(count, n, k, generator=g, device=DEVICE, dtype=torch.bfloat16) / k**0.5
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    if encoding == "nvfp4":
        return NVFP4Experts.from_float(up, down)
    return Experts(*(quantize(w, ENCODINGS[encoding]) for w in (up, down)))


def device_of(slots: int) -> Any:
    """What makes the devices of layers from their storage."""
    costs, shared = EXPECTED["H200"], list[Any]()
    if DEVICE.type == "cpu":
        return lambda s: Pretended(s, slots, 2, costs.constants(s.nbytes, s.macs))
    from fusion_moe.offload.cuda import Cuda, shared_of

    def make(storage: Any) -> Any:
        if not shared:
            shared.append(shared_of(storage, DEVICE))
        constants = costs.constants(storage.nbytes, storage.macs)
        return Cuda(storage, slots, 2, constants, shared[0], DEVICE)

    return make


def built(args: argparse.Namespace, away: bool) -> Layers:
    """The model, its experts on the device or away."""
    count, hidden, inner, _ = MODELS[args.model]
    slots, shared = int(args.resident * count), dict[Any, Any]()
    layers, make = list[Any](), device_of(slots)
    for i in range(args.layers):
        layer: Any = experts(i, args.format, count, hidden, inner)
        if away:
            in_files = args.files is not None and i >= args.layers // 2
            with pages.in_files(args.files) if in_files else nullcontext():
                layer = layer.to("cpu")
                if in_files:
                    _into_files(layer)
            layer = OffloadedExperts.of(layer, make, Cache(count, slots), 0, shared)
        layers.append(layer)
    model = Layers(layers, hidden)
    add_lora_(model, rank=16)
    g = torch.Generator(DEVICE).manual_seed(7)
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(0, 0.01, generator=g)
    return model


def step(model: Layers, x: Tensor, ids: Tensor, w: Tensor) -> Iterator[Tensor]:
    """The result, and all gradients."""
    model.zero_grad()
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = model(x, ids, w)
    y.float().square().mean().backward()
    yield from (y.detach(), x.grad, w.grad)  # type: ignore[misc]
    yield from (p.grad.cpu() for p in model.parameters() if p.grad is not None)


def inputs(args: argparse.Namespace, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts, the router's weights."""
    count, hidden, _, k = MODELS[args.model]
    g = torch.Generator(DEVICE).manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=g, device=DEVICE, dtype=torch.bfloat16)
    chosen = torch.rand(tokens, count, generator=g, device=DEVICE).topk(k)
    return x, chosen.indices, chosen.values


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def backward(model: Layers, given: tuple[Tensor, ...]) -> None:
    """A step, whose gradients are dropped."""
    x, ids, w = given
    model(x.clone().requires_grad_(), ids, w).float().square().mean().backward()
    model.zero_grad()


def of_text(model: Any, ids: Tensor) -> None:
    """A step of a whole model, whose gradients are dropped."""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    model.zero_grad()


def milliseconds(calls: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
    """Of each call, which take turns, several at once; and GB of the GPU's memory at its peak."""
    times, peaks = [list[float]() for _ in calls], [0] * len(calls)
    for _ in range(WARM + TIMES):
        for number, call in enumerate(calls):
            before, start = begun(), time.perf_counter()
            for _ in range(STEPS):
                call()
            synchronize()
            times[number].append(1e3 * (time.perf_counter() - start) / STEPS)
            peaks[number] = max(peaks[number], peak() - before)
    middle = [sorted(each[WARM:])[TIMES // 2] for each in times]
    return [(ms, nbytes / 1e9) for ms, nbytes in zip(middle, peaks, strict=True)]


def begun() -> int:
    """Bytes of the GPU's memory when a step begins, from which its peak is counted."""
    synchronize()
    if DEVICE.type == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    """Bytes of the GPU's memory."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def copies(layers: Sequence[Any]) -> float:
    """Milliseconds that the copies of a step take by themselves: all layers both ways, but for the
    three last ones of each way, which are there.
    """
    at = layers[0].storage.empty(layers[0].storage.experts, DEVICE)
    return sum(_copying(layer, at) for layer in [*layers[3:], *layers[:-3]])


def _copying(layer: Any, at: dict[str, Tensor]) -> float:
    """Milliseconds of what is away of a layer."""
    away = (layer.device.expert_map < 0).nonzero().flatten().tolist()
    times = []
    for _ in range(TIMES):
        synchronize()
        start = time.perf_counter()
        layer.device.fetch(away, at)
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[TIMES // 2]


def host_bytes() -> int:
    """Of the process, without pages of files."""
    with Path("/proc/self/status").open() as lines:
        return 1024 * sum(int(s.split()[1]) for s in lines if s.startswith(("RssAnon", "RssShmem")))


def many(model: Layers, given: tuple[Tensor, ...], steps: int) -> None:
    """Prints what steps leave in the host's memory."""
    for number in range(1, steps + 1):
        backward(model, given)
        if number in (steps // 10, steps // 2, steps):
            synchronize()
            print(f"after {number} steps {host_bytes() / 1e6:,.1f} MB of the host", flush=True)


def main() -> None:
    """Prints a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--format", choices=ENCODINGS, default="nvfp4", help="of the weights")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--resident", type=float, default=0.1, help="share of experts in slots")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 4096])
    parser.add_argument("--files", type=Path, help="a folder for the second half of the layers")
    parser.add_argument("--steps", type=int, help="so many, and what is in memory after them")
    parser.add_argument("--attention", action="store_true", help="a whole model, with PEFT")
    parser.add_argument("--checkpointing", action="store_true", help="of its gradients")
    args = parser.parse_args()
    if args.steps:
        many(built(args, away=True), inputs(args, args.tokens[0]), args.steps)
        return
    if args.attention:
        with_attention(args)
        return
    models = [built(args, away) for away in (False, True)]
    for tokens in args.tokens:
        given = inputs(args, tokens)
        times = milliseconds([partial(backward, m, given) for m in models])
        link, (want, found) = copies([*models[1].layers]), [[*step(m, *given)] for m in models]
        equal = sum(a.cpu().equal(b.cpu()) for a, b in zip(found, want, strict=True))
        show(args, tokens, times, link, f"{equal} of {len(want)} equal")


def with_attention(args: argparse.Namespace) -> None:
    """Prints a line for each number of tokens."""
    from finetune_peers import SEQUENCE, ours

    args.config, args.vocabulary = args.model, None
    models = [ours(args, away).to(DEVICE).train() for away in (False, True)]
    for model in models if not args.checkpointing else ():
        model.gradient_checkpointing_disable()
    link = copies([m for m in models[1].modules() if isinstance(m, OffloadedExperts)])
    for tokens in args.tokens:
        length = min(tokens, SEQUENCE)
        ids = torch.randint(0, 100, (tokens // length, length), device=DEVICE)
        times = milliseconds([partial(of_text, m, ids) for m in models])
        show(args, tokens, times, link, "with attention" + ", checkpointing" * args.checkpointing)


def show(
    args: argparse.Namespace,
    tokens: int,
    times: Sequence[tuple[float, float]],
    link: float,
    more: str,
) -> None:
    """Prints a line. times: with all there, and away; link: of copies."""
    (resident, _), (ms, nbytes) = times
    print(
        f"{args.model}, {args.format}, {args.layers} layers, {tokens:,} tokens, "
        f"{args.resident:.0%} there: "
        f"{ms:.1f} ms, all there {resident:.1f} ms, copies {link:.1f} ms: "
        f"{max(resident, link) / ms:.3f} of what bounds it; a step takes {nbytes:.2f} GB; {more}",
        flush=True,
    )


if __name__ == "__main__":
    main()
