"""Experts of a directory in floats, quantized: the bytes that `encodings.quantize` makes of each
matrix, and the rest as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from bad_calls import messages
from files import MADE, Tensors, again, change, change_json, copied, raw
from safetensors.torch import load_file, save_file

from fusion_moe import encodings
from fusion_moe.checkpoints import (
    Directory,
    check_scales,
    convert,
    method_of,
    quantize,
    stored_weights,
)
from fusion_moe.checkpoints.comparing import errors_of
from fusion_moe.checkpoints.conversion import Source
from fusion_moe.cli.inspect_directory import inspect_directory
from fusion_moe.errors import (
    CheckpointError,
    OptionError,
    UnsupportedError,
)

SRC = MADE / "bf16-qwen3_moe"
EXPERTS = "model.layers.0.mlp.experts"


def loaded(path: Path) -> Tensors:
    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_quantized(got: Tensors, name: str, x: torch.Tensor) -> None:
    """Bit for bit what is made of one matrix."""
    want = encodings.quantize(x, encodings.NVFP4, scales="mse")
    for suffix, part in zip(("weight", "weight_scale", "weight_scale_2"), want, strict=True):
        t = got.pop(f"{name}.{suffix}")
        assert (t.dtype, t.shape) == (part.dtype, part.shape)
        assert torch.equal(t.float(), part.float())


@pytest.mark.parametrize("all_of_them", [False, True])
def test_zeros_that_stay_zeros_have_no_error(all_of_them: bool, tmp_path: Path) -> None:
    name = f"{EXPERTS}.2.up_proj"

    def zero(tensors: Tensors) -> None:
        for key, t in tensors.items():
            if all_of_them or key == f"{name}.weight":
                t.zero_()

    src = copied(SRC.name, tmp_path)
    for file in src.glob("*.safetensors"):
        change(src, zero, file.name)
    dst = quantize(src, tmp_path / "dst")
    (found,) = errors_of(Source.open(dst), Source.open(src))
    assert (found.largest == 0) if all_of_them else (0.05 < found.error <= found.largest < 0.1)
    assert found.worst != name
    (other,) = errors_of(Source.open(quantize(SRC, tmp_path / "other")), Source.open(src))
    assert (other.largest, other.worst == name) == (float("inf"), not all_of_them)


def test_each_encoded_matrix_of_a_layer_is_compared(tmp_path: Path) -> None:
    """Also where the first expert's is in floats."""
    dst, name = quantize(SRC, tmp_path / "dst"), f"{EXPERTS}.0.up_proj"
    floats = loaded(SRC)[f"{name}.weight"]

    def decoded(tensors: Tensors) -> None:
        if f"{name}.weight" in tensors:
            for key in [key for key in tensors if key.startswith(name)]:
                del tensors[key]
            tensors[f"{name}.weight"] = floats

    for file in dst.glob("*.safetensors"):
        change(dst, decoded, file.name)
    (found,) = errors_of(Source.open(dst), Source.open(SRC))
    assert found.matrices == 11


def test_experts_of_bf16(tmp_path: Path) -> None:
    dst = quantize(SRC, tmp_path / "dst")
    before, after = loaded(SRC), loaded(dst)
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 12
    for name in experts:
        assert_quantized(after, name.removesuffix(".weight"), before.pop(name))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    directory = Directory.open(dst)
    assert directory.quantization["quant_algo"] == "W4A16_NVFP4"
    assert "model.layers.0.self_attn.q_proj" in directory.quantization["ignore"]
    older = json.loads((dst / "hf_quant_config.json").read_text())["quantization"]
    assert (older["quant_algo"], older["group_size"]) == ("W4A16_NVFP4", 16)
    check_scales(directory, stored_weights(directory.tensors, method_of(directory.quantization)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_experts_without_elements(dtype: torch.dtype, tmp_path: Path) -> None:
    """Their other sizes cost no bytes, and kernels would count through them."""
    path = copied("bf16-qwen3_moe", tmp_path)
    for file in path.glob("model*"):
        file.unlink()
    names = [f"{EXPERTS}.0.{projection}_proj.weight" for projection in ("gate", "up", "down")]
    scales = {f"{name}_scale_inv": torch.empty(0, 2**30) for name in names if dtype.itemsize == 1}
    save_file(
        {name: torch.empty(0, 2**37, dtype=dtype) for name in names} | scales,
        path / "model.safetensors",
    )
    change_json(
        path / "config.json",
        lambda c: c.update(num_experts=1, quantization_config={"quant_method": "fp8"}),
    )
    with pytest.raises(
        CheckpointError,
        match=r"proj.weight.*\[0, 137438953472\].*; expected "
        r"(experts with elements|\[N, K\])",
    ):
        quantize(path, tmp_path / "dst")


@pytest.mark.parametrize("layer", ["model.layers.1.mlp", "mtp.layers.0.mlp"])
def test_layers_for_further_tokens_stay(layer: str, tmp_path: Path) -> None:
    src = another(again("model.layers.0.mlp.experts", f"{layer}.experts"), tmp_path)
    dst = quantize(src, tmp_path / "dst")
    before, after = loaded(tmp_path / SRC.name), loaded(dst)
    further = {name for name in before if name.startswith(layer)}
    assert len(further) == 12
    assert {name for name in after if name.startswith(layer)} == further
    assert all(torch.equal(before[name], after[name]) for name in further)
    assert f"{layer}.experts" in Directory.open(dst).quantization["ignore"]


def fused(tensors: Tensors) -> None:
    """The experts of a file in one tensor for each projection, as Qwen3.5-MoE has them."""
    one = {
        p: torch.stack([tensors.pop(f"{EXPERTS}.{e}.{p}_proj.weight") for e in range(4)])
        for p in ("gate", "up", "down")
    }
    tensors[f"{EXPERTS}.gate_up_proj"], tensors[f"{EXPERTS}.down_proj"] = (
        torch.cat([one["gate"], one["up"]], 1),
        one["down"],
    )


def whole(path: Path) -> Path:
    """A sharded directory in one file."""
    tensors = loaded(path)
    for file in path.glob("model*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors")
    return path


def another(change_: Callable[[Tensors], object], folder: Path) -> Path:
    """The directory in one file with other tensors."""
    return change(whole(copied(SRC.name, folder)), change_)


def transposed(tensors: Tensors) -> None:
    fused(tensors)
    for name in ("gate_up_proj", "down_proj"):
        tensors[f"{EXPERTS}.{name}"] = tensors[f"{EXPERTS}.{name}"].mT


def test_experts_in_one_tensor_become_those_of_single_experts(tmp_path: Path) -> None:
    sources = SRC, another(fused, tmp_path)
    one, all_ = (raw(quantize(path, tmp_path / f"dst{i}")) for i, path in enumerate(sources))
    assert one.keys() == all_.keys()
    assert all(np.array_equal(one[name], all_[name]) for name in one)


def test_experts_of_fp8_are_rounded_to_bf16_first(tmp_path: Path) -> None:
    src = whole(copied(SRC.name, tmp_path))
    rand = torch.Generator().manual_seed(0)

    def to_fp8(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(1, 1, generator=rand) / 100

    change(src, to_fp8)
    change_json(
        src / "config.json",
        lambda c: c.update(
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
        ),
    )
    before, after = raw(src), loaded(quantize(src, tmp_path / "dst"))
    for name in (name for name in before if name.endswith("_proj.weight")):
        floats = (before[name].astype(np.float32) * before[f"{name}_scale_inv"]).astype(
            ml_dtypes.bfloat16
        )
        x = torch.from_numpy(floats.view(np.int16).copy()).view(torch.bfloat16)
        if ".experts." in name:
            assert_quantized(after, name.removesuffix(".weight"), x)
        else:
            assert torch.equal(after.pop(name), x)
    assert not [name for name in after if "scale" in name or "_proj" in name]


def test_fp8_of_modelopt_stays_but_for_experts(tmp_path: Path) -> None:
    """Scales of their activations go: in NVFP4 they would mean something else."""
    src = whole(copied(SRC.name, tmp_path))

    def to_fp8(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.tensor(0.01)
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)

    change(src, to_fp8)
    change_json(
        src / "config.json",
        lambda c: c.update(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}),
    )
    before, after = loaded(src), loaded(dst := quantize(src, tmp_path / "dst"))
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(
        after[f"{name}.weight"].view(torch.uint8), before[f"{name}.weight"].view(torch.uint8)
    )
    assert (after[f"{name}.weight_scale"], after[f"{name}.input_scale"]) == (
        before[f"{name}.weight_scale"],
        torch.tensor(0.5),
    )
    for expert in [
        name.removesuffix(".weight")
        for name in before
        if ".experts." in name and name.endswith(".weight")
    ]:
        x = (before[f"{expert}.weight"].float() * before[f"{expert}.weight_scale"]).bfloat16()
        assert_quantized(after, expert, x)
    assert not [name for name in after if ".experts." in name]
    said = Directory.open(dst).quantization
    assert (said["quant_algo"], said["quantized_layers"][EXPERTS]["quant_algo"]) == (
        "MIXED_PRECISION",
        "W4A16_NVFP4",
    )
    assert said["quantized_layers"][name] == {"quant_algo": "FP8"}


def test_other_quantized_weights_become_those_of_modelopt(tmp_path: Path) -> None:
    """compressed-tensors with experts in floats."""
    src, plain = copied("ct-qwen3_moe", tmp_path), loaded(SRC)

    def experts_in_floats(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors.pop(name)
        tensors.update({name: t for name, t in plain.items() if ".experts." in name})

    change(src, experts_in_floats)
    weights = stored_weights(Directory.open(quantize(src, tmp_path / "dst")).tensors, "modelopt")
    assert {w.scheme.name for w in weights.values()} == {"ModelOpt NVFP4"}
    assert len(weights) == 4 + 12


def test_what_is_refused(tmp_path: Path, golden: Callable[[str], None]) -> None:
    name = f"{EXPERTS}.2.up_proj.weight"
    changes: dict[str, Callable[[Tensors], object]] = {
        "K": lambda t: t.update({name: t[name][:, :40]}),
        "infinity": lambda t: t.update({name: torch.full((32, 64), float("inf"))}),
        "no experts": lambda t: [t.pop(key) for key in list(t) if ".experts." in key],
    }
    nothing_is_read = {
        "a rule": partial(quantize, SRC, tmp_path / "dst", scales="mes"),
        "a format": partial(quantize, SRC, tmp_path / "dst", to="int3"),
        "quantized": partial(quantize, copied("modelopt-qwen3_moe", tmp_path), tmp_path / "dst"),
    }
    golden(
        messages(
            nothing_is_read
            | {
                what: partial(quantize, another(change, tmp_path / what), tmp_path / "dst")
                for what, change in changes.items()
            }
        )
    )
    assert not (tmp_path / "dst").exists()


def test_transposed_experts_are_the_models_to_quantize(tmp_path: Path) -> None:
    src = another(transposed, tmp_path)
    with pytest.raises(
        UnsupportedError,
        match=r"gate_up_proj \[4, 64, 64\], down_proj \[4, 32, "
        r"64\]; expected .*; load the model, quant",
    ):
        quantize(src, tmp_path / "dst")


@pytest.mark.parametrize("rule", ["four_over_six", "mse"])
def test_rules_for_scales_of_blocks(rule: str, tmp_path: Path) -> None:
    dst = quantize(SRC, tmp_path / "dst", scales=rule)
    before, after = loaded(SRC), loaded(dst)
    name = f"{EXPERTS}.1.up_proj"
    want = encodings.quantize(before[f"{name}.weight"], encodings.NVFP4, scales=rule)
    assert torch.equal(after[f"{name}.weight"], want.codes)
    assert torch.equal(after[f"{name}.weight_scale"].float(), want.block_scale.float())
    assert torch.equal(after[f"{name}.weight_scale_2"], want.decode_scale)
    assert Directory.open(dst).quantization["scales"] == rule
    assert inspect_directory(dst).scales == rule
    other = quantize(SRC, tmp_path / "max", scales="max")
    assert "scales" not in Directory.open(other).quantization
    x, got = before[f"{name}.weight"], loaded(other)
    assert torch.equal(got[f"{name}.weight"], torch.ops.fusion_moe.nvfp4_quantize(x)[0])
    again = convert(dst, tmp_path / "again")
    assert Directory.open(again).quantization["scales"] == rule


@pytest.mark.parametrize("to", ["mxfp4", "int4", "fp8"])
def test_formats(to: str, tmp_path: Path) -> None:
    """The bytes of `encodings.quantize`, in a form that is read again; everything else stays."""
    dst, before = quantize(SRC, tmp_path / "dst", to=to), loaded(SRC)
    directory = Directory.open(dst)
    method = method_of(directory.quantization)
    assert method == ("fp8" if to == "fp8" else "compressed-tensors")
    weights = stored_weights(directory.tensors, method)
    experts = [n.removesuffix(".weight") for n in before if ".experts." in n]
    assert {*weights} == {*experts}
    for name in experts:
        encoding = encodings.find(to)
        x, rule = before.pop(f"{name}.weight"), "mse" if to == "int4" else "max"
        want = encodings.dequantize(encodings.quantize(x, encoding, scales=rule))
        assert torch.equal(weights[name].floats(directory.read), want)
    assert all(torch.equal(directory.read(name), t) for name, t in before.items())
    assert inspect_directory(dst).scales == ("mse" if to == "int4" else "")
    check_scales(directory, weights)


@pytest.mark.parametrize("to", ["nvfp4", "int4"])
def test_layers_are_skipped_by_name(to: str, tmp_path: Path) -> None:
    src = tmp_path / "src"
    src.mkdir()
    tensors = loaded(SRC)
    second = {
        name.replace("layers.0.", "layers.1."): t.clone()
        for name, t in tensors.items()
        if "layers.0." in name
    }
    save_file(tensors | second, src / "model.safetensors")
    config = json.loads((SRC / "config.json").read_text()) | {"num_hidden_layers": 2}
    (src / "config.json").write_text(json.dumps(config))
    dst = quantize(src, tmp_path / "dst", to=to, skip=["*.layers.0.*"])
    directory = Directory.open(dst)
    weights = stored_weights(directory.tensors, method_of(directory.quantization))
    assert {name[:14] for name in weights} == {"model.layers.1"}
    name = f"{EXPERTS}.2.up_proj.weight"
    assert torch.equal(directory.read(name), tensors[name])
    ignored = {"nvfp4": EXPERTS, "int4": r"re:model\.layers\.0\.mlp\.experts\..*"}[to]
    assert ignored in directory.quantization["ignore"]
    with pytest.raises(OptionError, match=r"skip: '\*.layers.7.\*' fits no module; .* a list"):
        quantize(src, tmp_path / "other", to=to, skip=["*.layers.7.*"])
