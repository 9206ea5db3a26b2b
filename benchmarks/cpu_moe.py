"""A layer of experts on the CPU by its threads: reading its weights and no more, ours, torch's bf16
products, and by other packages.

    python benchmarks/cpu_moe.py --threads 1,2,4,8,16,32,64 --peers [--models
        qwen3,gpt-oss,deepseek-v3] [--tokens 1,4,16,64,256,1024]
        [--activations bf16,int8] [--kernels AMXInt4_MOE,mxfp4] [--most 0.3] [--json FILE]
            [--no-page]

--peers adds KTransformers' kernels and ggml, where installed; cpu_peers.py and ggml_library.py say
how. All take the same weights, activations and routings; each call has its own routing, and calls
go round `--copies` copies of the weights. Results are compared with float64 first. Contenders take
turns in one process: a pause, in which a peer's threads stop spinning; a call of one token, which
wakes them; then the calls that are measured. Numbers are medians of the turns, spreads (longest -
shortest) / median. "Reading" is the loop of fusion_moe/runtime/host_memory/bandwidth.cpp over the
weights of a call's experts in the first of the formats, with as many threads. Times are CPU time
for one thread (of the calling one and of kt-kernel's worker, not of its thread that spins
meanwhile), wall time for more.
kt-kernel's weights are on large pages, as ours and ggml's are, with
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment. "int8" in a name says that activations are
rounded to it. cpu_moe_page.py makes a page and a chart of them.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import cpu_moe_page
import ggml_library
import torch
from cpu_ggml import Ggml
from cpu_peers import KtKernel, Layer, matrices
from cpu_vllm import Vllm
from torch import Tensor
from torch.nn.functional import linear, silu

import fusion_moe
from fusion_moe.encodings import (
    FP8,
    INT4,
    MXFP4,
    NVFP4,
    Encoding,
    Quantized,
    dequantize,
    find,
    quantize,
)
from fusion_moe.runtime import isa, native
from fusion_moe.runtime.host_memory import bandwidth, pages

PAUSE = 0.07  # s; the threads of kt-kernel spin for up to 0.05
CHECKED = 64  # tokens
DISTINCT = 8  # experts whose weights differ; the others have theirs
ONE_BY_ONE = 4  # tokens, at most, for which torch computes a product for each expert
CALLS = {1: 20, 4: 10, 16: 4}  # tokens: calls of a turn, where one is short
READING, OURS = "reading", "fusion_moe"
Clock = Callable[[], float]  # seconds
Weights = tuple[Quantized, Quantized]  # gate_up [E, 2I, H], down [E, H, I]


@dataclass(frozen=True)
class Model:
    """A layer: experts are those that are measured, of which there may be fewer than the model
    has.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    slots: int
    note: str = ""


MODELS = {
    "qwen3": Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    "gpt-oss": Model(
        "gpt-oss-120b", 2880, 2880, 64, 4, "64 of its 128 experts, SwiGLU without clamp and biases"
    ),
    "deepseek-v3": Model("DeepSeek-V3", 7168, 2048, 32, 8, "32 of its 256 experts"),
}


@dataclass
class Contender:
    """copies: the layer, several times. of: whose weights. error: of its result against float64, of
    which it may have `most`.
    """

    name: str
    of: Encoding
    copies: list[Layer]
    most: float | None = 0.01
    error: float | None = None
    # of a call, by tokens: one for each turn
    seconds: dict[int, list[float]] = field(default_factory=dict)


class Package(Protocol):
    """Another one, which computes whole layers. workers: threads that compute beside the calling
    one. rest: its threads may sleep now.
    """

    name: str
    version: str

    @property
    def workers(self) -> Sequence[int]: ...
    def rest(self) -> None: ...


@dataclass(frozen=True)
class Kernel:
    """A way of another package to compute layers. called: what it is for --kernels. make: layers of
    copies of the same weights.
    """

    package: Package
    name: str
    called: str
    of: Encoding
    make: Callable[[Sequence[Weights]], list[Layer]]
    most: float  # of the error


def random_weights(encoding: Encoding, model: Model = MODELS["qwen3"]) -> Weights:
    """Normal numbers, quantized; on large pages."""

    def matrices(n: int, k: int) -> Quantized:
        each = [
            quantize(torch.randn(n, k) / k**0.5, encoding=encoding) for _ in range(DISTINCT)
        ] * (model.experts // DISTINCT)
        return each[0].of(
            pages.on_large_pages(torch.stack(parts)) for parts in zip(*each, strict=True)
        )

    return matrices(2 * model.intermediate, model.hidden), matrices(
        model.hidden, model.intermediate
    )


def copied(weights: Weights) -> Weights:
    """A copy on large pages."""
    gate_up, down = (
        q.of(pages.empty(part.shape, part.dtype).copy_(part) for part in q) for q in weights
    )
    return gate_up, down


def ours(weights: Weights, activation_format: str) -> Layer:
    """The operation that nn.Experts calls, from C++ as after prepare_."""
    native.use()
    (gate_up, down), how = (
        map(list, weights),
        {"weight_format": weights[0].encoding.name, "activation_format": activation_format},
    )
    return lambda x, ids, w: torch.ops.fusion_moe.fused_experts(x, ids, w, gate_up, down, **how)


@dataclass(frozen=True)
class Reading:
    """Reads the codes and block scales of the experts of a call; what is read is found
    beforehand.
    """

    weights: Weights
    memory: bandwidth.Bandwidth

    def of(self, ids: Tensor) -> Callable[[], None]:
        """What reads those of a call."""
        parts = [part for q in self.weights for part in list(q)[:2]]
        return self.memory.reader(
            *[part[expert] for part in parts for expert in ids.unique().tolist()]
        )

    def __call__(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        self.of(ids)()
        return x


def in_torch(weights: Weights) -> Layer:
    """The layer by torch's products of the weights in bf16, eagerly."""
    gate_up, down = (
        torch.stack([dequantize(q.of(parts), torch.bfloat16) for parts in zip(*q, strict=True)])
        for q in weights
    )
    return lambda x, ids, w: (one_by_one if len(x) <= ONE_BY_ONE else at_once)(
        x, ids, w, gate_up, down
    )


def one_by_one(x: Tensor, ids: Tensor, w: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in torch for few tokens: a product for each expert that has some."""
    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[token], gate_up[expert]).chunk(2, -1)
        y.index_add_(
            0, token, linear(silu(gate) * up, down[expert]) * w[token, slot, None].to(x.dtype)
        )
    return y


def at_once(x: Tensor, ids: Tensor, w: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in torch, rows sorted by expert, one grouped product for all."""
    order = ids.flatten().argsort(stable=True)
    ends = (
        torch.histc(ids.flatten().float(), gate_up.shape[0], 0, gate_up.shape[0] - 1)
        .cumsum(0)
        .int()
    )
    gate, up = torch.nn.functional.grouped_mm(
        x[order // ids.shape[1]], gate_up.mT, offs=ends
    ).chunk(2, -1)
    y = torch.nn.functional.grouped_mm(silu(gate) * up, down.mT, offs=ends)
    y = torch.empty_like(y).index_copy(0, order, y).view(*ids.shape, -1)
    return (y * w[..., None]).sum(1).to(x.dtype)


def contenders(
    copies: Mapping[Encoding, Sequence[Weights]], activations: Sequence[str], with_torch: bool
) -> list[Contender]:
    """Those that run on any number of threads."""
    first, found = next(iter(copies)), list[Contender]()
    for how, (e, of) in itertools.product(activations, copies.items()):
        name, most = (
            (f"{OURS}, {e.name}", 0.01) if how == "bf16" else (f"{OURS}, {e.name}, {how}", 0.03)
        )
        found.append(Contender(name, e, [ours(w, how) for w in of], most))
    return (
        [*found, Contender("torch, bf16", first, [in_torch(w) for w in copies[first]])]
        if with_torch
        else found
    )


def of_ggml(ggml: Ggml) -> list[Kernel]:
    """As llama.cpp has them: interleaved where ggml can; Q4_K also as it is, since ggml then
    computes many rows of an expert in tiles.
    """
    return [
        Kernel(ggml, name, called, encoding, partial(ggml.layers, dtype, memory), most)
        for name, called, encoding, dtype, memory, most in (
            ("nvfp4, int8", "nvfp4", NVFP4, "nvfp4", ggml_library.PLAIN, 0.03),
            ("mxfp4, int8", "mxfp4", MXFP4, "mxfp4", ggml_library.INTERLEAVED, 0.03),
            ("Q4_0, int8", "q4_0", NVFP4, "q4_0", ggml_library.INTERLEAVED, 0.25),
            ("Q4_K, int8", "q4_k", NVFP4, "q4_K", ggml_library.INTERLEAVED, 0.25),
            ("Q4_K in tiles, int8", "q4_k_tiles", NVFP4, "q4_K", ggml_library.PLAIN, 0.25),
        )
    ]


def of_kt(kt: KtKernel) -> list[Kernel]:
    """By its classes."""
    int8 = "AMX" if kt.variant == "amx" else "AVX-512"

    def made(
        make: Callable[[str, Quantized, Quantized], Layer], kernel: str, copies: Sequence[Weights]
    ) -> list[Layer]:
        return [make(kernel, *weights) for weights in copies]

    return [
        Kernel(kt, name, called, encoding, partial(made, make, called), most)
        for name, called, encoding, make, most in (
            ("nvfp4, AVX2", "AVX2MXFP4_MOE", NVFP4, kt.fp4, 0.01),
            ("mxfp4, AVX-512", "AMXFP4_KGroup_MOE", MXFP4, kt.fp4, 0.01),
            ("mxfp4, AVX2", "AVX2MXFP4_MOE", MXFP4, kt.fp4, 0.01),
            # 4 bits for each of three weights, one scale a row
            (f"AMXINT4, {int8}", "AMXInt4_MOE", NVFP4, kt.int4, 0.35),
            (f"BF16, {int8}", "AMXBF16_MOE", NVFP4, kt.bf16, 0.01),
        )
    ]


def of_vllm(vllm: Vllm) -> list[Kernel]:
    """Those for quantized weights, but int8's."""

    def made(make: Callable[..., Layer], copies: Sequence[Weights]) -> list[Layer]:
        return [make(*weights) for weights in copies]

    return [
        Kernel(vllm, name, called, encoding, partial(made, make), most)
        for name, called, encoding, make, most in (
            ("mxfp4", "CPUExpertsMxfp4", MXFP4, vllm.mxfp4, 0.01),
            ("int4, int8", "CPUExpertsInt4", INT4, vllm.int4, 0.03),
            ("fp8", "CPUExpertsFp8", FP8, vllm.fp8, 0.01),
        )
    ]


def peers(
    kernels: Sequence[Kernel], copies: Mapping[Encoding, Sequence[Weights]], chosen: Sequence[str]
) -> tuple[list[Contender], list[str]]:
    """Those that run here; the names of those that do not. chosen: what kernels are called, [] for
    all.
    """
    found, missing = list[Contender](), list[str]()
    for k in kernels:
        if k.of not in copies or (chosen and k.called not in chosen):
            continue
        name = f"{k.package.name}, {k.name}"
        try:
            found.append(Contender(name, k.of, k.make(copies[k.of]), k.most))
        # not in this build; sizes that it does not take
        except (AttributeError, RuntimeError, ValueError) as error:
            missing.append(name)
            print(f"{name}: {error}", flush=True)
    return found, missing


def calls(model: Model, tokens: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x bf16 [T, H], ids int64 [T, k], w f32 [T, k] of some calls."""
    x = torch.randn(tokens, model.hidden).bfloat16()
    ids = (
        torch.rand(tokens, model.experts).argsort(1)[:, : model.slots].contiguous()
        for _ in range(count)
    )
    return [(x, i, torch.rand(tokens, model.slots).softmax(-1)) for i in ids]


def exact(weights: Weights, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """The layer in float64 -> [T, H], nothing rounded."""
    y, (gate_up, down) = (
        torch.zeros(x.shape, dtype=torch.float64),
        (matrices(q, torch.float64) for q in weights),
    )
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].mT).chunk(2, -1)
        y.index_add_(0, token, (silu(gate) * up) @ down[expert].mT * w[token, slot, None])
    return y


Checks = Mapping[Encoding, tuple[tuple[Tensor, ...], Tensor]]  # a call, and what it returns


def right(found: Sequence[Contender], checks: Checks) -> tuple[list[Contender], list[str]]:
    """Those of other packages that `check` takes; the names of those that it does not."""
    taken, wrong = list[Contender](), list[str]()
    for c in found:
        try:
            check([c], checks)
            taken.append(c)
        except ValueError as error:
            wrong.append(c.name)
            print(error, flush=True)
    return taken, wrong


def check(found: Sequence[Contender], checks: Checks) -> None:
    """Sets the error of each: the norm of the difference over that of the result. ValueError for
    more than it may have.
    """
    for c in found:
        call, want = checks[c.of]
        for layer in c.copies if c.most is not None else ():
            c.error = float((layer(*call).double() - want).norm() / want.norm())
            if not c.error < c.most:
                raise ValueError(f"{c.name}: error {c.error:.3g}, expected less than {c.most}")


def clock(packages: Sequence[Package], threads: int) -> Clock:
    """CPU time for one thread, wall time for more."""
    if threads > 1:
        return time.perf_counter
    workers = [threading.get_native_id()]
    for package in packages:
        if len(package.workers) > 1:
            raise ValueError(f"{len(package.workers)} workers of {package.name}, expected one")
        workers += package.workers
    # Linux's number for the clock of a thread
    return lambda: sum(time.clock_gettime(~thread << 3 | 6) for thread in workers)


def turn(
    now: Clock,
    packages: Sequence[Package],
    layers: Iterator[Layer],
    wake: tuple[Tensor, ...],
    measured: Sequence[tuple[Tensor, ...]],
) -> float:
    """Seconds of a call."""
    for package in packages:
        package.rest()
    time.sleep(PAUSE)
    next(layers)(*wake)
    each = [
        partial(layer, *call) if not isinstance(layer, Reading) else layer.of(call[1])
        for call, layer in zip(measured, layers, strict=False)
    ]
    start = now()
    for call in each:
        call()
    return (now() - start) / len(each)


def measure(
    model: Model,
    packages: Sequence[Package],
    threads: int,
    all_: Sequence[Contender],
    tokens: int,
    repeats: int,
    most: float,
) -> None:
    """Sets their seconds for so many tokens; of peers, those that took at most so many for each
    number of tokens before.
    """
    names = [package.name for package in packages]
    slow = [
        c
        for c in all_
        if c.name.split(",")[0] in names
        and any(statistics.median(times) > most for times in c.seconds.values())
    ]
    found = [c for c in all_ if c not in slow]
    (wake,), count, now = calls(model, 1, 1), CALLS.get(tokens, 1), clock(packages, threads)
    layers = [itertools.cycle(c.copies) for c in found]
    for c, each in zip(found, layers, strict=True):
        next(each)(*calls(model, tokens, 1)[0])  # compiles, takes memory
        c.seconds[tokens] = []
    for _ in range(repeats):
        measured = calls(model, tokens, count)
        for c, each in zip(found, layers, strict=True):
            c.seconds[tokens].append(turn(now, packages, each, wake, measured))
    print(
        f"{tokens} tokens:",
        ", ".join(f"{c.name} {statistics.median(c.seconds[tokens]) * 1e3:.3f} ms" for c in found),
        flush=True,
    )


class Others:
    """How much of the CPUs' time other programs take, and other machines on the same host, from now
    on.
    """

    def __init__(self) -> None:
        self._start = self._now()

    def __str__(self) -> str:
        busy, stolen, own, all_ = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return (
            f"other programs took {max(0.0, busy - own) / all_:.0%} of the CPUs' time, other "
            f"machines {stolen / all_:.0%}"
        )

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        """Seconds: of all programs, stolen, of this one, of all CPUs."""
        ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        user, nice, system, _idle, _wait, irq, softirq, stolen = (
            n / os.sysconf("SC_CLK_TCK") for n in ticks
        )
        return (
            user + nice + system + irq + softirq,
            stolen,
            time.process_time(),
            time.monotonic() * (os.cpu_count() or 1),
        )


def installed(package: Any, *args: int) -> Any:
    """A package, or None; says why not."""
    try:
        return package(*args)
    except ImportError as error:
        print(
            f"peer {package.name}: {error}; benchmarks/{package.__module__}.py says how to "
            "install it",
            flush=True,
        )
        return None


def of_model(model: Model, told: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is measured of a model: an entry for each number of threads, once more after each number
    of tokens.
    """
    encodings = [find(name) for name in told.formats]
    given = {e: random_weights(e, model) for e in encodings}
    copies = {e: [copied(w) for _ in range(told.copies)] for e, w in given.items()}
    (call,) = calls(model, CHECKED, 1)
    checks = {e: (call, exact(w, *call)) for e, w in given.items()}
    mine = contenders(copies, told.activations, not told.no_torch)
    ggml, vllm = (installed(package) if told.peers else None for package in (Ggml, Vllm))
    kernels = [*(of_ggml(ggml) if ggml else ()), *(of_vllm(vllm) if vllm else ())]
    # on any number of threads, as ours
    of_any, without = peers(kernels, copies, told.kernels)
    for threads in told.threads:
        torch.set_num_threads(threads)
        if ggml:
            ggml.rest()  # the bandwidth is measured, where it is not known yet
        memory, others = bandwidth.of(threads), Others()
        loop = Contender(
            READING, encodings[0], [Reading(w, memory) for w in copies[encodings[0]]], most=None
        )
        kt = (
            installed(KtKernel, threads, max(CHECKED, *told.tokens), model.slots)
            if told.peers
            else None
        )
        more, missing = peers(of_kt(kt) if kt else [], copies, told.kernels)
        packages = [package for package in (ggml, vllm, kt) if package]
        check(mine, checks)
        of_others, wrong = right([*of_any, *more], checks)
        found = [loop, *mine, *of_others]
        print(f"{model.name}, {threads} threads", flush=True)
        for c in found:
            c.seconds = {}
        for tokens in told.tokens:
            measure(model, packages, threads, found, tokens, told.repeats, told.most)
            yield {
                "model": model.name,
                "note": model.note,
                "threads": threads,
                "others": str(others),
                "missing": without + missing + wrong,
                "peers": {package.name: package.version for package in packages},
                "rows": [
                    {"name": c.name, "of": c.of.name, "error": c.error, "seconds": dict(c.seconds)}
                    for c in found
                ],
            }


def machine(repeats: int) -> dict[str, Any]:
    """Where, when and with what these numbers come about."""
    return {
        "cpu": bandwidth.cpu(),
        "cores": bandwidth.cpus(),
        "tier": isa.selected(),
        "date": datetime.date.today().isoformat(),
        "fusion_moe": fusion_moe.__version__,
        "torch": torch.__version__,
        "repeats": repeats,
        "pages_of_peer": "large"
        if "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "")
        else "small",
    }


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=_numbers, default=[torch.get_num_threads()])
    parser.add_argument("--tokens", type=_numbers, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        default=["qwen3"],
        help=f"of {', '.join(MODELS)}",
    )
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["nvfp4", "mxfp4"])
    parser.add_argument(
        "--kernels",
        type=lambda text: text.split(","),
        default=[],
        help="of peers: AMXInt4_MOE, mxfp4, ...; default: all",
    )
    parser.add_argument(
        "--activations",
        type=lambda text: text.split(","),
        default=["bf16"],
        help="of ours: bf16, int8",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--copies", type=int, default=2, help="of the weights, which calls go round"
    )
    parser.add_argument(
        "--most",
        type=float,
        default=float("inf"),
        help="s of a call; a peer that takes longer is left out of more tokens",
    )
    parser.add_argument("--peers", action="store_true", help="measure other packages too")
    parser.add_argument("--no-torch", action="store_true", help="leave torch's bf16 products out")
    parser.add_argument(
        "--json",
        type=Path,
        help="write the results here; benchmarks/cpu_moe_page.py turns such files into the page",
    )
    parser.add_argument("--no-page", action="store_true", help="leave benchmarks/results/ as it is")
    told = parser.parse_args()
    for threads in [t for t in told.threads if t > bandwidth.cpus()]:
        print(f"{threads} threads: left out, this process may use {bandwidth.cpus()} CPUs")
        told.threads.remove(threads)
    torch.manual_seed(0)
    found: dict[str, Any] = {"machine": machine(told.repeats), "results": []}
    results = dict[tuple[str, int], dict[str, Any]]()
    with torch.inference_mode():
        for name in told.models:
            for result in of_model(MODELS[name], told):
                results[name, result["threads"]] = result
                found["results"] = list(results.values())
                if told.json:
                    # a run that is stopped has measured something
                    told.json.write_text(json.dumps(found))
    if not told.no_page:
        print(cpu_moe_page.page([found]))


if __name__ == "__main__":
    main()
