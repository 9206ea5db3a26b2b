"""The repository that tools/hub_kernel makes, as Hugging Face's `kernels` loads it: beside the
installed package, whose bits it has, and without it, where it computes what transformers' own
experts do.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fusions import fusion_of_call
from torch.torch_version import TorchVersion

kernels = pytest.importorskip("kernels", "0.17")
transformers = pytest.importorskip("transformers")

from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from kernels._rust import Digest, DigestAlgorithm, Metadata  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import fusion_moe  # noqa: E402
from fusion_moe.encodings import dequantize, find  # noqa: E402
from fusion_moe.ir.text import text  # noqa: E402
from fusion_moe.nn import contract_of, convert  # noqa: E402
from fusion_moe.nn.config import CONFIGS  # noqa: E402
from tests.families.models import AnyConfig, E, K, class_of, randomized  # noqa: E402
from tests.families.tiny import tiny  # noqa: E402

TOOL = runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "tools" / "hub_kernel" / "__main__.py")
)
H, I, T = 64, 96, 33
QWEN3, GPT_OSS = ("qwen3_moe", "Qwen3MoeExperts"), ("gpt_oss", "GptOssExperts")
LAYERS = {
    "nvfp4": ("NVFP4Experts", QWEN3),
    "mxfp4": ("MXFP4Experts", GPT_OSS),
    "int4": ("INT4Experts", QWEN3),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    TOOL["build"](folder)
    return folder


@pytest.fixture(scope="module")
def kernel(repository) -> ModuleType:
    return kernels.get_local_kernel(repository)


@pytest.fixture
def names(kernel):
    """Those in transformers' experts interface."""
    yield dict(zip(kernel.FORMATS, kernel.register_experts(), strict=True))
    for name in kernel.FORMATS:
        del ALL_EXPERTS_FUNCTIONS._global_mapping[f"fusion_moe_{name}"]


def experts_of(family: str, name: str, device: str = "cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    return randomized(class_of(family, name)(AnyConfig(H, I))).bfloat16().to(device).eval()


def inputs(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(T, H, generator=generator).bfloat16()
    w, ids = torch.randn(T, E, generator=generator).softmax(-1).topk(K)
    return x.to(device), ids.to(device), w.bfloat16().to(device)


def decoded(experts: torch.nn.Module, weight_format: str) -> torch.nn.Module:
    """Experts in float64 with the values to which weights are rounded."""
    rounded, result = convert(experts, CONFIGS[weight_format]()), copy.deepcopy(experts).double()
    contract = contract_of(experts)
    for name in rounded.projections:
        (value,) = contract.view_of(f"{name}_proj").pack(dequantize(rounded.weight_of(name)))
        getattr(result, f"{name}_proj").data = value.double()
    return result


def kernelized(experts: torch.nn.Module, repository: Path, name: str, mode: Mode) -> None:
    kernels.replace_kernel_forward_from_hub(type(experts), "Experts")
    layer = LocalLayerRepository(repository, layer_name=name)
    device = next(experts.parameters()).device.type
    with use_kernel_mapping({"Experts": {device: layer}}, inherit_mapping=False):
        kernelize(experts, mode=mode, use_fallback=mode is not Mode.INFERENCE)


def test_variants(repository):
    """Their metadata, a digest of each file, one version, one id for each, ops of that name."""
    variants = sorted(path.name for path in (repository / "build").iterdir())
    assert variants == ["torch-cpu", "torch-cuda"]
    ids = set()
    for variant in variants:
        folder = repository / "build" / variant
        metadata = Metadata.read_from_file(folder / "metadata.json")
        assert f"torch-{metadata.backend.backend_type}" == variant
        assert str(metadata.version) == fusion_moe.__version__.split(".")[0]
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
        kernel = kernels.get_local_kernel(folder)  # of both, in one process with fusion_moe
        assert (kernel.__name__, kernel.__version__) == (metadata.id, fusion_moe.__version__)
        ids.add(metadata.id)
        assert hasattr(getattr(torch.ops, metadata.id), "fused_experts")
        assert sum(path.stat().st_size for path in folder.rglob("*.*")) < 12 * 2**20
    assert len(ids) == 2


def test_a_library_with_state_is_loaded_for_each(kernel):
    """native.cpp's: in a file of its own, compiled here or with the wheel."""
    ours, installed = (
        importlib.import_module(f"{package}.runtime.native")._source()
        for package in (kernel.__name__, "fusion_moe")
    )
    file = installed.came_with().name
    assert ours.came_with().name == file.replace("native", f"native{kernel.__name__}")
    shipped = {f"runtime/shipped/{file}": b""}
    files = TOOL["renamed"](TOOL["sources"]() | shipped, kernel.__name__)
    assert f"runtime/shipped/{ours.came_with().name}" in files


def test_the_id_changes_with_the_sources(repository, tmp_path, monkeypatch):
    monkeypatch.setitem(TOOL["sources"].__globals__, "version", lambda: "7.3.0")
    TOOL["build"](tmp_path)
    file = Path("build", "torch-cpu", "metadata.json")
    old, new = (json.loads((folder / file).read_text()) for folder in (repository, tmp_path))
    assert (new["version"], new["id"] != old["id"]) == (7, True)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    with pytest.raises(ImportError, match="needs torch 2.10"):
        kernels.get_local_kernel(tmp_path)


WITHOUT = """
import importlib, pkgutil, sys
sys.modules["fusion_moe"] = sys.modules["fusion_moe_translators"] = None  # no import finds them

import kernels, torch
from transformers import AutoModelForCausalLM

kernel = kernels.get_kernel("someone/fusion-moe", version=0)
for module in pkgutil.walk_packages(kernel.__path__, f"{kernel.__name__}."):
    importlib.import_module(module.name)
assert not [name for name in sys.modules if name.startswith("fusion_moe.")]
plain, ours = (
    AutoModelForCausalLM.from_pretrained(sys.argv[1], experts_implementation=name)
    for name in ("eager", kernel.register_experts()[0])
)
with torch.no_grad():
    logits = [model(torch.arange(3, 20)[None]).logits for model in (plain, ours)]
    kernel.quantize_(plain, "nvfp4")
    assert plain(torch.arange(3, 20)[None]).logits.equal(logits[1])
print(((logits[0] - logits[1]).norm() / logits[0].norm()).item())
"""


@pytest.mark.slow
def test_by_name_where_fusion_moe_cannot_be_imported(repository, tmp_path):
    """Every module of it imports; rounding changes logits by as much as 4 bits do; no compiler."""
    torch.manual_seed(0)
    model = randomized(tiny("qwen3_moe"))
    model.save_pretrained(tmp_path)
    environment = os.environ | {"LOCAL_KERNELS": f"someone/fusion-moe={repository}"}
    for name in ("PYTHONPATH", "FUSION_MOE_CACHE_DIR"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, tmp_path],
        cwd=tmp_path,
        env=environment | {"CXX": "/nowhere", "FUSION_MOE_TARGET": "auto"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout.splitlines()[-1]) < 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight_format", LAYERS)
@torch.no_grad()
def test_layer(kernel, repository, weight_format, device):
    """Bit for bit what the installed package computes; beside float64 at most 1.1 times the error
    of transformers' own experts in bf16 with the same rounded weights, and 2**-7 in all.
    """
    layer, of_family = LAYERS[weight_format]
    experts, arguments = experts_of(*of_family, device), inputs(device)
    judge = decoded(experts, weight_format)
    want = judge(*(t.double() if t.is_floating_point() else t for t in arguments))
    theirs = judge.bfloat16()(*arguments)
    kernelized(experts, repository, layer, Mode.INFERENCE)
    options = importlib.import_module(f"{kernel.__name__}.options")
    with options.override(native_calls=False), kernel.preparing():  # weights are rounded there too
        experts(*arguments)
    got = experts(*arguments)
    assert got.equal(convert(experts, CONFIGS[weight_format]())(*arguments))
    far, limit = (((y - want).norm() / want.norm()).item() for y in (got, theirs))
    assert far <= min(1.1 * limit, 2**-7), (far, limit)


@torch.no_grad()
def test_names_and_functions(kernel, names):
    """They are the layers; functions take the parts of weights."""
    experts, (x, ids, w) = experts_of(*QWEN3), inputs()
    for weight_format, name in names.items():
        experts.config._experts_implementation = name
        assert experts(x, ids, w).equal(convert(experts, CONFIGS[weight_format]())(x, ids, w))
        parts = [kernel.quantize(p, weight_format) for p in experts.parameters()]
        judge = copy.deepcopy(experts).double()
        judge.config._experts_implementation = "eager"
        for part, value in zip(parts, judge.parameters(), strict=True):
            other = kernel.dequantize(part, weight_format)
            assert (other - value).norm() < 0.15 * value.norm()
            value.data = other.double()
        want = judge(x.double(), ids, w.double())
        y = kernel.fused_experts(x, ids, w, *parts, weight_format=weight_format)
        assert (y - want).norm() <= 2**-7 * want.norm()
        ends, row_of, _ = kernel.route(ids, E)
        up = (x[row_of], parts[0], ends)
        gate_up = kernel.grouped_mm(*up, weight_format=weight_format)
        assert gate_up.shape == (T * K, 2 * I)
        grouped_mm = getattr(torch.ops, kernel.__name__).grouped_mm
        fake = "test_faketensor"  # torch's test of schemas has no 8-bit floats
        torch.library.opcheck(grouped_mm, up, {"weight_format": weight_format}, test_utils=fake)


@torch.no_grad()
def test_changed_floats_are_rounded_again(repository):
    experts, arguments = experts_of(*QWEN3), inputs()
    kernelized(experts, repository, "NVFP4Experts", Mode.INFERENCE)
    before = experts(*arguments)
    assert before.equal(experts(*arguments))
    experts.down_proj.mul_(2)
    assert experts(*arguments).equal(2 * before)
    assert list(experts.state_dict()) == ["gate_up_proj", "down_proj"]


@torch.no_grad()
def test_in_one_graph(kernel, repository):
    experts, (x, ids, w) = experts_of(*QWEN3), inputs()
    kernelized(experts, repository, "MXFP4Experts", Mode.INFERENCE | Mode.TORCH_COMPILE)
    compiled = torch.compile(lambda *t: experts(*t), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="call the model once before compiling"):
        compiled(x, ids, w)
    experts(x, ids, w)
    torch._dynamo.reset()  # what was compiled ended in that error
    for rows in (T, 5, 6, 7):
        some = x[:rows], ids[:rows], w[:rows]
        with torch.compiler.set_stance(
            "default" if rows in (T, 5) else "fail_on_recompile"  # 5: sizes become symbols
        ):
            assert compiled(*some).equal(experts(*some))


def cuda_kernels(package: str, program: str) -> dict[tuple[str, str, int], str]:
    """The text of each kernel that a package launches for a program, by GPU, name and rows; with
    NVRTC also the file that the last is compiled to, which is named by all that it is made of.
    """

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"{package}.{name}")

    backends, launch, result = module("backends"), module("backends.cuda.launch"), {}
    target, fusion = backends.TARGETS["cuda"], module("ir.text").parse(program)
    for segment in module("compile").lower(fusion, target, module("options").Options()).segments:
        source = backends.emit(segment, target).launch
        for gpu, rows in itertools.product(("H200", "A100"), (1, 64, 8192)):
            arch = getattr(module("arch"), gpu)
            sizes = dict.fromkeys(source.parts.symbols, rows)
            for kernel in source.choose(sizes, arch).kernels:
                result[gpu, kernel.name, rows] = kernel.text
    if not module("runtime.nvrtc").why_missing():
        result["compiled", kernel.name, rows] = launch.build(kernel, arch).name
    return result


@pytest.mark.parametrize("weight_format", LAYERS)
def test_a_gpu_gets_the_same_kernels(repository, weight_format):
    """Those of the installed package, for the experts of Qwen3-30B-A3B."""
    kernel = kernels.get_local_kernel(repository / "build" / "torch-cuda")
    encoding, kinds = find(weight_format), (torch.bfloat16, torch.int64, torch.float32)
    with torch.device("meta"):
        shapes = (64, 2048), (64, 8), (64, 8)
        tokens = [torch.empty(s, dtype=kind) for s, kind in zip(shapes, kinds, strict=True)]
        weights = [
            [
                torch.empty(encoding.part_shape(p, (128,), *nk), dtype=p.dtype)
                for p in encoding.parts
            ]
            for nk in ((1536, 2048), (2048, 768))
        ]
    how = {"weight_format": weight_format, "weight_layout": "w16x64"}
    program = text(fusion_of_call("fused_experts", *tokens, *weights, **how))
    ours = cuda_kernels(kernel.__name__, program)
    assert len({name for _, name, _ in ours}) > 3
    assert ours == cuda_kernels("fusion_moe", program)


def test_training_is_left_to_transformers(kernel, repository, names):
    experts, (x, ids, w) = experts_of(*QWEN3).train(), inputs()
    want = experts(x, ids, w)
    kernelized(experts, repository, "NVFP4Experts", Mode.TRAINING)
    assert experts(x, ids, w).equal(want)
    experts.config._experts_implementation = names["nvfp4"]
    with pytest.raises(RuntimeError, match="no gradient reaches rounded weights"):
        experts(x, ids, w)


def test_a_quantized_model_is_not_written(kernel, tmp_path):
    model = tiny("qwen3_moe")
    kernel.quantize_(model, "mxfp4")
    with pytest.raises(RuntimeError, match="the package fusion_moe writes checkpoints"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
