"""Builds the kernels of the fusion_moe that is imported, and prints their files by label, as JSON.
Runs inside of each tree.

    python kernels.py cuda|cpu PATTERN

It has to run in trees from before and after a change, so it uses little: public operations, the
options, and

- CUDA: `compile_fusion`; calls with choose(sizes, arch), whose result has kernels, or objects with
launches(sizes, arch), which are these;
  kernels have a name and a text; NVRTC with the folder of headers; the tables of variants, each of
      which is made the only one in turn
  (`forced`). Without such tables: what is chosen for some sizes.
- CPU: the names of CPU features. Libraries for CPUs that are not here are built and not run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

import fusion_moe
from fusion_moe import nn, options
from fusion_moe.options import Options

ARCHS = ("sm_90a", "sm_80")
TOKENS = (1, 4, 32, 128, 512, 2048, 8192)
FORCED_TOKENS = 512
AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "popcnt")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512vbmi")
BF16 = (*AVX512, "avx512_bf16", "avx512_vnni")
CPUS = {  # by name: the ISA level, and what the CPU has
    "generic": ("generic", ()),
    "avx2": ("avx2", AVX2),
    "avx512": ("avx512", AVX512),
    "avx512-bf16": ("avx512", BF16),
    "avx512-fp16": ("avx512", (*BF16, "avx512_fp16")),
    "amx": ("amx", (*BF16, "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")),
}


def main(which: str, pattern: str) -> None:
    wanted = re.compile(pattern)
    found = cuda(wanted) if which == "cuda" else cpu(wanted)
    print(json.dumps({label: str(path) for label, path in found.items()}))


# The calls ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a public operation. forced: whether each variant is made for it, or what is chosen
    alone; gradients: the inputs whose gradients are computed, too; archs: for which.
    """

    operation: str
    tensors: Sequence[Any]
    keywords: dict[str, Any]
    forced: bool = True
    gradients: tuple[int, ...] = ()
    archs: Sequence[str] = ARCHS


def layer(
    experts: int,
    slots: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    layout: str,
    device: str,
    bias: bool = False,
) -> Call:
    """An expert_mlp of four tokens; bias: with all else that a model of gpt-oss's kind has."""

    def t(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    e, h, i, f8, f32 = experts, hidden, inner, torch.float8_e4m3fn, torch.float32
    tensors = [t(4, h, dtype=dtype), t(4, slots, dtype=torch.int64), t(4, slots, dtype=f32)]
    tensors += [t(e, 2 * i, h // 2), t(e, 2 * i, h // 16, dtype=f8), t(e, 2, dtype=f32)]
    tensors += [t(e, h, i // 2), t(e, h, i // 16, dtype=f8), t(e, dtype=f32)]
    if not bias:
        return Call("expert_mlp", tensors, {"weight_layout": layout})
    tensors += [t(e, 2 * i, dtype=dtype), t(e, h, dtype=dtype)]
    numbers = {"interleave": 8, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
    # trees before the activation was a text take numbers
    more = {"activation": nn.swiglu(**numbers)} if hasattr(nn, "swiglu") else numbers
    return Call("expert_mlp", tensors, {"weight_layout": layout, **more}, forced=False)


def product(groups: int, n: int, k: int, dtype: torch.dtype, layout: str, device: str) -> Call:
    """An nvfp4_grouped_mm of four sorted rows."""
    sizes = ((4, k), (groups, n, k // 2), (groups, n, k // 16), (groups,), (groups,))
    dtypes = (dtype, torch.uint8, torch.float8_e4m3fn, torch.float32, torch.int32)
    tensors = [torch.zeros(s, dtype=d, device=device) for s, d in zip(sizes, dtypes, strict=True)]
    return Call("nvfp4_grouped_mm", tensors, {"weight_layout": layout})


def encoded(encoding: str, dtype: torch.dtype, layout: str, device: str) -> Call:
    """A grouped_mm of four sorted rows, with weights of an encoding, 1024 x 1024 for each of 16
    groups.
    """
    from fusion_moe.encodings import ENCODINGS

    parts = ENCODINGS[encoding].parts
    shapes = [ENCODINGS[encoding].part_shape(part, (16,), 1024, 1024) for part in parts]
    weight = [
        torch.zeros(shape, dtype=part.dtype, device=device)
        for part, shape in zip(parts, shapes, strict=True)
    ]
    tensors = [
        torch.zeros((4, 1024), dtype=dtype, device=device),
        weight,
        torch.zeros(16, dtype=torch.int32, device=device),
    ]
    return Call(
        "grouped_mm", tensors, {"weight_format": encoding, "weight_layout": layout}, forced=False
    )


def experts(
    weight_format: str, activation_format: str, device: str, gradients: tuple[int, ...] = ()
) -> Call:
    """A fused_experts of 64 tokens by 8 experts of 256 features."""
    from fusion_moe.encodings import ENCODINGS

    def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    of = ENCODINGS[weight_format]
    weights = [
        [t(*of.part_shape(part, (8,), n, 256), dtype=part.dtype) for part in of.parts]
        for n in (512, 256)
    ]
    tokens = t(64, 256), t(64, 2, dtype=torch.int64), t(64, 2, dtype=torch.float32)
    how = {"weight_format": weight_format, "activation_format": activation_format}
    archs = ARCHS[: 1 if activation_format == "fp8_block" else 2]  # wgrads of codes need clusters
    return Call("fused_experts", [*tokens, *weights], how, False, gradients, archs)


# CUDA ---------------------------------------------------------------------------------------------


def cuda(wanted: re.Pattern[str]) -> dict[str, Path]:
    """The cubins of kernels, each text once."""
    from fusion_moe.encodings import ENCODINGS

    bf16, meta = torch.bfloat16, "meta"
    calls = {
        "layer tiled": layer(128, 8, 2048, 768, bf16, "w16x64", meta),
        "layer linear": layer(128, 8, 2048, 768, bf16, "linear", meta),
        "biased layer tiled": layer(128, 4, 2880, 2880, bf16, "w16x64", meta, bias=True),
        "product tiled": product(128, 1536, 2048, bf16, "w16x64", meta),
        "product linear": product(128, 1536, 2048, bf16, "linear", meta),
    }
    for encoding, dtype in (
        ("mxfp4", bf16),
        ("int4", bf16),
        ("nvfp4", torch.float16),
        ("bf16", bf16),
    ):
        if encoding in ENCODINGS:  # an older tree lacks some
            calls |= {
                f"{encoding} product {layout}": encoded(encoding, dtype, layout, meta)
                for layout in ("w16x64", "linear")
            }
    in_codes = [x for x in ("fp8", "fp8_tensor", "nvfp4") if x in ENCODINGS]
    calls |= {f"layer in {x}": experts(x, "fp8", meta) for x in in_codes}
    calls |= {
        f"layer trained in {x}": experts("bf16", x, meta, gradients=(0, 2, 3, 4))
        for x in ("bf16", "fp8_block", "mxfp8")
    }
    kernels: dict[str, tuple[Any, str]] = {}
    for name, call in calls.items():
        makers = [maker for made in programs(call) for maker in makers_of(made)]
        assert makers, f"{name} has no CUDA kernels"
        for arch in call.archs:
            texts = {kernel.text: kernel for kernel in launches(makers, arch, call.forced)}
            for kernel in texts.values():
                kernels[unused(f"{arch}, {name}, {kernel.name}", kernels)] = kernel, arch
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        chosen = {label: kernel for label, kernel in kernels.items() if wanted.search(label)}
        return dict(
            zip(chosen, pool.map(lambda kernel: compiled(*kernel), chosen.values()), strict=True)
        )


def programs(call: Call) -> Iterator[Any]:
    """The program of a call; with gradients, forward and backward."""
    from fusion_moe.backends import TARGETS
    from fusion_moe.compile import compile_fusion
    from fusion_moe.definitions.operations import (
        SPECS,
        bind,
        eager_types,
        fusion_of,
    )

    bound = bind(SPECS[call.operation], call.tensors, call.keywords)
    fusion = fusion_of(call.operation, eager_types(bound), bound.others)
    fusions = [fusion]
    if call.gradients:
        from fusion_moe.ir.derivative import differentiate

        made = differentiate(fusion, call.gradients, by_columns=True)
        fusions = [made.forward, made.backward]
    yield from (compile_fusion(each, TARGETS["cuda"], Options()) for each in fusions)


Maker = Callable[[dict[str, int], Any], Sequence[Any]]  # sizes, what `facts` returns -> kernels


def makers_of(made: Any) -> list[tuple[Sequence[str], Maker]]:
    """The symbols and the kernels of each segment of a program by itself, then of all in one
    call.
    """
    if not find_spec("fusion_moe.backends.cuda.choose"):
        return [(source.fusion.symbols, source.launches) for source in having(made, "launches")]
    calls = [
        # an older tree has a call in a launch
        *(getattr(kernel.launch, "call", kernel.launch) for kernel in made.kernels),
        *([made.joined] if made.joined else []),
    ]
    return [
        (call.parts.symbols, lambda sizes, arch, call=call: call.choose(sizes, arch).kernels)
        for call in calls
    ]


def launches(
    makers: Sequence[tuple[Sequence[str], Maker]], arch: str, with_forced: bool
) -> Iterator[Any]:
    """All kernels that are launched for some sizes."""

    def made(tokens: int) -> Iterator[Any]:
        for symbols, maker in makers:
            yield from (
                kernel
                for kernel in maker(dict.fromkeys(symbols, tokens), facts(arch))
                if kernel.blocks
            )

    for tokens in TOKENS:
        yield from made(tokens)
    for _ in forced() if with_forced else ():
        yield from made(FORCED_TOKENS)


def forced() -> Iterator[None]:
    """Makes each variant of a table the only one that is chosen, where it can be, and goes on."""
    if find_spec("fusion_moe.backends.cuda.table"):
        yield from forced_by_table()
        return
    from fusion_moe.backends.cuda import variants

    for name, table in list(vars(variants).items()):
        if (
            isinstance(table, tuple)
            and table
            and all(hasattr(regime, "variants") for regime in table)
        ):
            bound, several = (
                ("max_average", "size_classes")
                if hasattr(table[0], "max_average")
                else ("most", "uneven")
            )
            for variant in dict.fromkeys(v for regime in table for v in regime.variants):
                only = dataclasses.replace(
                    table[0], **{bound: math.inf, "variants": (variant,), several: ()}
                )
                setattr(variants, name, (only, table[-1]))
                yield
            setattr(variants, name, table)


def forced_by_table() -> Iterator[None]:
    """The same where tables are data of a GPU."""
    from fusion_moe.arch import H200
    from fusion_moe.backends.cuda import heuristics
    from fusion_moe.backends.cuda.table import ALWAYS, Regime

    table_of, table = heuristics.table_of, heuristics.table_of(H200)
    for name, regimes in vars(table).items():
        for variant in (
            dict.fromkeys(v for regime in regimes for v in regime.variants)
            if isinstance(regimes, tuple)
            else ()
        ):
            only = dataclasses.replace(table, **{name: (Regime(ALWAYS, (variant,)), regimes[-1])})
            heuristics.table_of = lambda arch, only=only: only
            yield
    heuristics.table_of = table_of


def facts(arch: str) -> Any:
    """What makers take for an architecture: its name, or the facts of an H200 as if it were one."""
    if not find_spec("fusion_moe.arch"):
        return arch
    from fusion_moe.arch import H200

    digits = re.sub(r"\D", "", arch)
    return dataclasses.replace(H200, capability=(int(digits[:-1]), int(digits[-1])))


def unused(label: str, taken: Collection[str]) -> str:
    """The label, or with a number if it is taken."""
    return next(
        name for name in chain([label], (f"{label} #{i}" for i in count(2))) if name not in taken
    )


def compiled(kernel: Any, arch: str) -> Path:
    from fusion_moe.runtime import nvrtc

    folder = Path(fusion_moe.__file__).parent / "backends" / "cuda" / "kernels"
    headers = nvrtc.headers(folder, *getattr(kernel, "folders", ()))
    return nvrtc.build(kernel.text, name=kernel.name, arch=arch, headers=headers)


def having(root: object, method: str) -> Iterator[Any]:
    """The objects of ours with a method that can be reached from one, through attributes and
    containers, in order.
    """
    seen, waiting = set[int](), [root]
    while waiting:
        found = waiting.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        if callable(getattr(found, method, None)):
            yield found
        elif isinstance(found, tuple | list):
            waiting += found
        elif type(found).__module__.startswith("fusion_moe"):
            waiting += getattr(found, "__dict__", {}).values()


# CPU ----------------------------------------------------------------------------------------------


def cpu(wanted: re.Pattern[str]) -> dict[str, Path]:
    """The libraries for every kind of CPU, by a process for each."""
    found: dict[str, Path] = {}
    for name in CPUS:
        done = subprocess.run(
            [sys.executable, __file__, "cpu-of", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found |= json.loads(done.stdout)
    return {label: Path(path) for label, path in found.items() if wanted.search(label)}


def cpu_of(name: str) -> None:
    """Prints the libraries for a kind of CPU. A program asks for one by loading it, and is told by
    what it gets that its input is bad.
    """
    from fusion_moe.runtime import isa

    isa_level, having = CPUS[name]
    isa.features = lambda: frozenset(having)
    isa._may_use_tiles = lambda: True
    isa.available.cache_clear()
    found: dict[str, str] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        calls = {
            "layer": layer(4, 2, 128, 64, dtype, "linear", "cpu"),
            "product": product(4, 128, 128, dtype, "linear", "cpu"),
        }
        for what, call in calls.items():
            opened: list[Path] = []
            with options.override(cpu_isa=isa_level), told(opened.append):
                getattr(torch.ops.fusion_moe, call.operation)(*call.tensors, **call.keywords)
            for path in opened:
                found.setdefault(
                    f"{name}, {what}, {str(dtype).removeprefix('torch.')}, "
                    f"{re.split('[-_]', path.name)[0]}",
                    str(path),
                )
    assert found, "no library was asked for"
    print(json.dumps(found))


@contextlib.contextmanager
def told(tell: Callable[[Path], object]) -> Iterator[None]:
    """Has `tell` told which of our libraries are opened. Their functions return 1, which is bad
    input, and do nothing.
    """
    opened, ours = ctypes.CDLL, Path(options.current().cache_dir)
    bad = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)

    class Library:
        def __init__(self, name: Any, *args: Any, **kwargs: Any):
            tell(Path(name))

        def __getattr__(self, name: str) -> Any:
            return bad

    ctypes.CDLL = lambda name, *args, **kwargs: (
        Library if Path(str(name)).parent == ours else opened
    )(name, *args, **kwargs)
    try:
        yield
    finally:
        ctypes.CDLL = opened


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "cpu-of":
        cpu_of(sys.argv[2])
    else:
        main(*sys.argv[1:])
