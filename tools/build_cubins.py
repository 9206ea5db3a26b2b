"""Compiles the CUDA kernels of layers that many people run, for the wheel of a release: what
fusion_moe/runtime/shipped_cubins.py reads. Needs no GPU.

    python tools/build_cubins.py fusion_moe/runtime/shipped/cubins.xz
    python tools/build_cubins.py build/cubins.xz --nvrtc FOLDER --only gpt-oss

Each layer: every kernel that calls of any number of tokens need in inference, on each of GPUS, by
each of the ways in which people call it (WAYS). --nvrtc: a folder with libnvrtc.so, in place of the
one that is installed: a driver older than that does not use what it makes. What was compiled is in
the cache, so an interrupted run goes on. Where NVRTC is missing nothing is written.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import lzma
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fusion_moe import options
from fusion_moe.arch import H100, H200, Arch
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda.launch import KERNELS, Call, build
from fusion_moe.backends.cuda.source import KernelSource
from fusion_moe.compile import compile_fusion
from fusion_moe.definitions.operations import SPECS, bind, eager_types, fusion_of
from fusion_moe.encodings import ENCODINGS
from fusion_moe.nn import swiglu
from fusion_moe.runtime import nvrtc, shipped_cubins
from fusion_moe.runtime.precompile import _one_for_each, run_builds

# each instruction has 16 bytes, and so have the places of cubins
_WORD = 16
_FILTER = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 4, "pb": 4}


@dataclass(frozen=True)
class Layer:
    """Experts, how many of them a token goes to, hidden and intermediate features; the encoding of
    weights; other arguments of `fused_experts`, and whether projections have biases.
    """

    experts: int
    slots: int
    hidden: int
    intermediate: int
    encoding: str = "nvfp4"
    bias: bool = False
    arguments: tuple[tuple[str, object], ...] = ()


_OF_GPT_OSS = (("activation", swiglu(limit=7.0, alpha=1.702, up_offset=1.0)),)
LAYERS = {
    "Qwen3-30B-A3B": Layer(128, 8, 2048, 768),
    "Qwen3-235B-A22B": Layer(128, 8, 4096, 1536),
    "Qwen3-Next-80B-A3B": Layer(512, 10, 2048, 512),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, "mxfp4", True, _OF_GPT_OSS),
    "gpt-oss-120b": Layer(128, 4, 2880, 2880, "mxfp4", True, _OF_GPT_OSS),
    "DeepSeek-V3": Layer(256, 8, 7168, 2048),
    "Kimi-K2": Layer(384, 8, 7168, 2048),
    "GLM-4.5-Air": Layer(128, 8, 4096, 1408),
    "GLM-4.6": Layer(160, 8, 5120, 1536),
    "Mixtral-8x7B": Layer(8, 2, 4096, 14336),
    "Llama-4-Scout": Layer(16, 1, 5120, 8192, arguments=(("scale_on", "input"),)),
}
GPUS = (H200, H100)
# dtypes of experts' ids and of routing weights: of transformers' models, and of serving engines
WAYS = (
    (torch.int64, torch.bfloat16),
    (torch.int64, torch.float32),
    (torch.int32, torch.float32),
)


def call_of(layer: Layer, ids: torch.dtype, weights: torch.dtype) -> Call:
    """All kernels of a layer in the layout that GPUs read, as a module of fusion_moe.nn calls it
    with bf16 activations.
    """
    of, e, h, i = ENCODINGS[layer.encoding], layer.experts, layer.hidden, layer.intermediate
    with torch.device("meta"):
        up, down = (
            [torch.empty(of.part_shape(part, (e,), *nk), dtype=part.dtype) for part in of.parts]
            for nk in ((2 * i, h), (h, i))
        )
        if up[-1].dim() == 1:  # gate and up have scales of their own
            up[-1] = up[-1].new_empty(e, 2)
        arguments = dict(layer.arguments)
        if layer.bias:
            arguments |= {
                f"{name}_bias": torch.empty(e, n, dtype=torch.bfloat16)
                for name, n in (("gate_up", 2 * i), ("down", h))
            }
        x = torch.empty(7, h, dtype=torch.bfloat16)
        routing = (torch.empty(7, layer.slots, dtype=dtype) for dtype in (ids, weights))
        call = bind(
            SPECS["fused_experts"],
            (x, *routing, up, down),
            {
                **arguments,
                "weight_format": layer.encoding,
                "weight_layout": TARGETS["cuda"].layout_of(layer.encoding, "bf16"),
            },
        )
    fusion = fusion_of("fused_experts", eager_types(call), call.others)
    program = compile_fusion(fusion, TARGETS["cuda"], options.current())
    assert isinstance(program.joined, Call)
    return program.joined


def kernels_of(call: Call, arch: Arch) -> list[KernelSource]:
    """The kernels that calls of any number of tokens need."""
    (tokens,) = call.parts.symbols

    def needed(n: int) -> frozenset[KernelSource]:
        return frozenset(call.choose({tokens: n}, arch).kernels)

    counts = _one_for_each(lambda n: frozenset(kernel.text for kernel in needed(n)))
    return [kernel for n in counts for kernel in needed(n)]


def files_of(layer: Layer, headers: nvrtc.Headers) -> dict[str, tuple[KernelSource, Arch]]:
    """The kernels of a layer for all GPUS and WAYS, by their files in the store."""
    return {
        nvrtc.file_of(kernel.text, kernel.name, gpu.nvrtc, headers): (kernel, gpu)
        for way in WAYS
        for gpu in GPUS
        for kernel in kernels_of(call_of(layer, *way), gpu)
    }


def compiled(layers: Mapping[str, Layer]) -> dict[str, dict[str, bytes]]:
    """The cubins of layers, by their files."""
    headers = nvrtc.headers(KERNELS)
    files = {name: files_of(layer, headers) for name, layer in layers.items()}
    todo = {file: partial(build, *what) for of in files.values() for file, what in of.items()}
    print(f"compiling {len(todo)} kernels with NVRTC {nvrtc.version()}", file=sys.stderr)
    paths = run_builds(todo.items())
    return {name: {file: paths[file].read_bytes() for file in of} for name, of in files.items()}


def archive(layers: Mapping[str, Mapping[str, bytes]], by: str) -> bytes:
    """The archive of the cubins of layers, made by a version of NVRTC. Equal ones are there once,
    those of one kernel beside each other.
    """
    begins, data = dict[bytes, int](), bytearray()
    for _, cubin in sorted(pair for of in layers.values() for pair in of.items()):
        if cubin not in begins:
            data += bytes(-len(data) % _WORD)
            begins[cubin] = len(data)
            data += cubin
    places = {
        name: {file: (begins[cubin], begins[cubin] + len(cubin)) for file, cubin in of.items()}
        for name, of in layers.items()
    }
    line = json.dumps({"nvrtc": by, "layers": places}).encode()
    line += b" " * (-(len(line) + 1) % _WORD) + b"\n"
    filters = [_FILTER | {"dict_size": max(len(line) + len(data), lzma.PRESET_DEFAULT << 12)}]
    return lzma.compress(line + bytes(data), check=lzma.CHECK_CRC64, filters=filters)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument("--nvrtc", type=Path, metavar="FOLDER", help="where libnvrtc.so is")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="layers whose names contain one")
    asked = parser.parse_args(arguments)
    if asked.nvrtc:  # cuda-bindings takes what is loaded
        for name in ("libnvrtc-builtins.so*", "libnvrtc.so*"):
            ctypes.CDLL(str(next(asked.nvrtc.rglob(name))), ctypes.RTLD_GLOBAL)
    if why := nvrtc.why_missing():
        print(f"no cubins: {why}", file=sys.stderr)
        return 1
    shipped_cubins.ARCHIVE = Path("/nonexistent")  # what an older run made is not copied
    names = asked.only or [""]
    layers = {k: layer for k, layer in LAYERS.items() if any(name in k for name in names)}
    data = archive(cubins := compiled(layers), nvrtc.version())
    asked.archive.parent.mkdir(parents=True, exist_ok=True)
    asked.archive.write_bytes(data)
    count = len({file for of in cubins.values() for file in of})
    print(
        f"{asked.archive}: {len(data) / 1e6:.2f} MB, {count} cubins of {len(layers)} layers by "
        f"NVRTC {nvrtc.version()}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
