"""What travels of an engine to a GPU machine, and what does not: pack.py reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FLASH = "_vllm_fa3_C"
# imported where they are there, or by what no engine here runs
_UNNEEDED = {
    *("torchcodec", "flashinfer-python", "tilelang", "nvidia-cutlass-dsl", "quack-kernels"),
    *("humming-kernels", "cryptography", "fastapi-cli", "fastapi-cloud-cli", "email-validator"),
    "torch-c-dlpack-ext",
}
_DROPPED = (
    *("*/__pycache__/*", "*/tests/*", "*.pyi", "*.a", "*.md", "*/licenses/*"),
    *("mistral_common/data/*", "pycountry/locales/*"),
)
# SGLang's key of a compiled module has the machine's compilers and headers; its name says the rest
_COMPILED = """
def compute_build_key(spec, *, build_file):
    return "travelled"


def find_prebuilt(*, scope, module_name):
    return next(scope.glob(f"deps-*/{module_name}.so"), None)
"""


@dataclass(frozen=True)
class Engine:
    """unneeded: names of packages that are not taken. more: requirements that its wheel does not
    name. dropped: patterns of files. own: its libraries, of which `libraries` are taken, without
    machine code for other GPUs. older: files taken of another version, since the machine's torch
    loads no newer. made: files with this content, unless the library of that name is taken.
    appended: what is added to the end of files.
    """

    unneeded: set[str]
    dropped: tuple[str, ...]
    own: str
    libraries: tuple[str, ...]
    more: tuple[str, ...] = ()
    older: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    appended: Mapping[str, str] = field(default_factory=dict)


ENGINES = {
    "vllm": Engine(
        unneeded=_UNNEEDED
        | {"pynvvideocodec", "nvidia-cudnn-frontend", "nvtx", "fastsafetensors", "instanttensor"}
        | {"tokenspeed-mla", "opentelemetry-exporter-otlp"},
        dropped=(
            *_DROPPED,
            *(f"vllm/third_party/*.{kind}" for kind in ("h", "hpp", "cuh", "cu")),
            *("vllm/vllm-rs", "*/RECORD"),
        ),
        own=r"vllm/.*\.so",
        libraries=(
            *("_C_stable_libtorch", "_moe_C_stable_libtorch", FLASH),
            *("cumem_allocator", "fs_io_C", "spinloop"),
        ),
        # attention without its libraries is Triton's; vLLM imports one of them in any case
        made={f"vllm/vllm_flash_attn/{FLASH}.py": ""},
    ),
    "sglang": Engine(
        unneeded=_UNNEEDED
        | {"anthropic", "blobfile", "build", "cuda-python", "datasets", "deepseek-recipe"}
        | {"flash-attn-4", "ipython", "kernels", "mistral-common", "modelscope", "ninja", "numba"}
        | {"nvidia-mathdx", "nvshmem4py-cu13", "outlines", "py-spy", "scipy", "sgl-deep-ep"}
        | {"sgl-deep-gemm", "sgl-flash-mla", "smg-grpc-servicer", "timm", "tml-renderers"}
        | {
            "torchaudio",
            "torchvision",
            "zstandard",
            "torch",
            "transformers",
            "tokenizers",
            "numpy",
        },
        # of datasets, of outlines, and of fastapi
        more=("dill", "diskcache", "jsonschema", "opentelemetry-api"),
        dropped=(
            *_DROPPED,
            # imported, or needed by a library that is: srt/hardware_backend/npu, tvm_ffi's testing
            *("sglang/multimodal_gen/*", "sglang/test/*", "sglang/benchmark/*"),
            *("sglang/srt/rust_extensions/*.so", "sglang/kernels/jit/csrc/diffusion/*"),
            # by other RECORDs tvm_ffi finds xgrammar's library
            "sglang*/RECORD",
            *("sgl_kernel/sm100/*", "*hook_mode_preload*", "*hook_mode_torch_cu12*"),
            *("*hook_mode_torch.abi3.so", "compressed_tensors/transform/utils/*.safetensors"),
        ),
        own=r"sgl_kernel/.*\.so",
        libraries=("common_ops",),
        # 0.4.10 wants torch 2.14
        older={"sgl_kernel/sm90/common_ops.abi3.so": "sglang-kernel==0.4.5"},
        made={
            "IPython/__init__.py": "",
            "IPython/display.py": "HTML = display = None\n",
            "zstandard.py": "",
        },
        appended={"sglang/kernels/jit/utils/compile/cache.py": _COMPILED},
    ),
}
