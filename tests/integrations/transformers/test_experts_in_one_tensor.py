"""Experts that files have in one tensor, with scales for each of them, in any encoding: loaded, and
compared with the floats that they mean, by numpy and ml_dtypes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from decoded import logits, plain_model, relative
from files import MADE, change, copied
from safetensors.torch import load_file, save_file
from test_schemes_together import (
    BLOCKS,
    COMPRESSED,
    CT,
    MIXED,
    MODELOPT,
    QUARK,
    QWEN,
    assert_loads,
    e2m1,
    fp8,
    fp8_blocks,
    int4,
    mxfp4,
    pair,
    quark,
)
from torch import Tensor
from transformers import Qwen3MoeConfig

from fusion_moe.checkpoints import Directory, convert, quantize, weights_in
from fusion_moe.errors import CheckpointError, UnsupportedError
from fusion_moe.nn.frozen.packed import PackedModule
from fusion_moe.transformers import NVFP4Config, from_pretrained

LARGER = Qwen3MoeConfig.from_dict(
    QWEN.to_dict() | {"moe_intermediate_size": 128, "hidden_size": 256, "num_hidden_layers": 1}
)
ONE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+_proj)\.?(.*)")


def nvfp4(name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    """With a scale of its own for each matrix."""
    matrix = torch.rand(()) / 8
    scale = (torch.rand(n, k // 16) + 0.5).to(torch.float8_e4m3fn)
    codes, values = e2m1(n, k, scale.float() * matrix)
    parts = {"weight": codes, "weight_scale": scale, "weight_scale_2": matrix}
    return {f"{name}.{part}": t for part, t in parts.items()}, values


def packed_mxfp4(name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    tensors, values = mxfp4(name, n, k)
    codes, scale = (t.view(torch.uint8) for t in tensors.values())
    return {f"{name}.weight_packed": codes, f"{name}.weight_scale": scale}, values


def joined(tensors: dict[str, Tensor], mark: str = "_", gate_up: bool = True) -> dict[str, Tensor]:
    """All experts of a projection in one tensor; scales of matrices as [E, 2] or [E]."""
    parts: dict[tuple[str, str, str], dict[int, Tensor]] = {}
    made = {}
    for name, t in tensors.items():
        if found := ONE.fullmatch(name):
            layer, expert, projection, part = found.groups()
            parts.setdefault((layer, projection, part), {})[int(expert)] = t
        else:
            made[name] = t
    for (layer, projection, part), of in parts.items():
        stacked = bytes_of(torch.stack([of[e] for e in sorted(of)]))
        suffix = "" if part == "weight" else mark + part
        if projection == "gate_proj" and gate_up:
            up = parts[layer, "up_proj", part]
            ups = bytes_of(torch.stack([up[e] for e in sorted(up)]))
            matrix = stacked.numel() == len(of)
            stacked = (
                torch.stack([stacked.flatten(), ups.flatten()], 1)
                if matrix
                else torch.cat([stacked, ups], 1)
            )
            made[f"{layer}.gate_up_proj{suffix}"] = stacked.view(of[0].dtype)
        elif projection != "up_proj" or not gate_up:
            stacked = stacked.flatten() if stacked.numel() == len(of) else stacked
            made[f"{layer}.{projection}{suffix}"] = stacked.view(of[0].dtype)
    return made


def bytes_of(t: Tensor) -> Tensor:
    """8-bit floats as bytes, which torch joins."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def change_all(directory: Path, how) -> Path:
    save_file(
        {n: t.contiguous() for n, t in how(load_file(directory / "model.safetensors")).items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


ENCODINGS = {
    "NVFP4": (MIXED, nvfp4, QWEN),
    "NVFP4, one scale": (MIXED, MODELOPT, QWEN),
    "NVFP4 of compressed-tensors": (COMPRESSED, CT, QWEN),
    "MXFP4": (BLOCKS, mxfp4, QWEN),
    "MXFP4 of compressed-tensors": (COMPRESSED, packed_mxfp4, QWEN),
    "MXFP4 of Quark": (QUARK, quark, QWEN),
    "INT4": (COMPRESSED, int4(), QWEN),
    "FP8": (MIXED, fp8("weight_scale", lambda n, k: ()), QWEN),
    "FP8 of rows": (MIXED, fp8("weight_scale", lambda n, k: (n, 1)), QWEN),
    "FP8 of blocks": (BLOCKS, fp8_blocks("weight_scale_inv"), LARGER),
}


@pytest.mark.parametrize("mark", ["_", "."])
@pytest.mark.parametrize("gate_up", [True, False], ids=["gate_up", "gate"])
@pytest.mark.parametrize(("said", "rule", "config"), ENCODINGS.values(), ids=ENCODINGS)
def test_all_encodings(said, rule, config, mark, gate_up, tmp_path):
    encoded, plain = pair(tmp_path, config, said, {r"\.experts\.": rule})
    single = Directory.open(encoded)
    want = {name: w.floats(single.read) for name, w in weights_in(single).items()}
    change_all(encoded, lambda tensors: joined(tensors, mark, gate_up))
    opened = Directory.open(encoded)
    found = weights_in(opened)
    assert found.keys() == want.keys()
    for name, weight in found.items():
        assert torch.equal(weight.floats(opened.read), want[name])
    if mark == "_" and gate_up:
        model = assert_loads(encoded, plain)
        assert isinstance(model.model.layers[0].mlp.experts, PackedModule)
        model.save_pretrained(tmp_path / "saved")
        assert_loads(tmp_path / "saved", plain)
        assert_loads(convert(encoded, tmp_path / "dense", "dense"), plain)


@pytest.mark.parametrize("shape", [(4, 1), (4, 1, 1), (1,), ()], ids=str)
def test_scales_of_gate_and_up_together(shape, tmp_path):
    """One for both matrices of an expert, or for all experts."""
    encoded, plain = pair(tmp_path, QWEN, MIXED, {r"\.experts\.": MODELOPT})

    def together(tensors):
        made = joined(tensors)
        for name in [name for name in made if name.endswith("scale_2")]:
            made[name] = made[name].flatten()[0].expand(shape)
        return made

    assert_loads(change_all(encoded, together), plain)


@pytest.mark.parametrize("rule", [nvfp4, fp8("weight_scale", lambda n, k: ())])
def test_transposed(rule, tmp_path):
    """As some families store them, and with a scale for each expert."""
    encoded, plain = pair(tmp_path, QWEN, MIXED, {r"\.experts\.": rule})

    def turned(tensors):
        return {
            name: bytes_of(t).mT.contiguous().view(t.dtype) if t.dim() == 3 else t
            for name, t in joined(tensors).items()
        }

    assert_loads(change_all(encoded, turned), plain)


def test_a_projection_in_floats_beside_codes(tmp_path):
    encoded, plain = pair(tmp_path, QWEN, MIXED, {r"\.experts\.\d\.(gate|up)": nvfp4})
    assert_loads(change_all(encoded, joined), plain)
    written = quantize(encoded, tmp_path / "written")
    assert_loads(written, convert(written, tmp_path / "dense", "dense"))


def of_each(tensors):
    """A scale for each expert."""
    for name in [name for name in tensors if name.endswith("_proj_weight_scale_2")]:
        tensors[name] = tensors[name].reshape(1).repeat(4)


def test_rows_in_turns_with_biases_and_a_scale_for_each_expert(tmp_path):
    """gpt-oss as ModelOpt writes it, whose scale is of all experts otherwise."""
    path = copied("modelopt-gpt_oss", tmp_path)
    model = from_pretrained(change(path, of_each), dtype=torch.float32)
    assert isinstance(model.model.layers[0].mlp.experts, PackedModule)
    assert relative(logits(model), logits(plain_model(MADE / "modelopt-gpt_oss"))) <= 1e-5


def test_rows_in_turns_of_a_text_model(tmp_path):
    """The family stands in a part of config.json, as that of InternVL with gpt-oss."""
    path = change(copied("modelopt-gpt_oss", tmp_path), of_each)

    def floats():
        opened = Directory.open(path)
        return {name: w.floats(opened.read) for name, w in weights_in(opened).items()}

    want, file = floats(), path / "config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": "internvl", "text_config": text}))
    assert all(torch.equal(t, want[name]) for name, t in floats().items())
    assert sum("experts" in name for name in want) == 4 * 3


@pytest.mark.parametrize("name", ["awq-qwen3_moe", "auto_round-gptq"])
def test_words_along_rows(name, tmp_path):
    """AWQ and GPTQ have N last."""
    path = copied(name, tmp_path)
    single = Directory.open(path)
    want = {name: w.floats(single.read) for name, w in weights_in(single).items()}
    change_all(path, lambda tensors: joined(tensors, ".", gate_up=False))
    opened = Directory.open(path)
    found = weights_in(opened)
    assert found.keys() == want.keys()
    for name, weight in found.items():
        assert torch.equal(weight.floats(opened.read), want[name])


def test_what_is_asked_for(tmp_path):
    encoded, _ = pair(tmp_path, QWEN, MIXED, {r"\.experts\.": fp8("weight_scale", lambda n, k: ())})
    want = from_pretrained(encoded, quantization_config=NVFP4Config()).state_dict()
    change_all(encoded, joined)
    found = from_pretrained(encoded, quantization_config=NVFP4Config()).state_dict()
    assert all(torch.equal(bytes_of(t), bytes_of(want[name])) for name, t in found.items())


def test_what_is_refused(tmp_path):
    said, rule, config = ENCODINGS["FP8 of blocks"]
    small = Qwen3MoeConfig.from_dict(config.to_dict() | {"moe_intermediate_size": 192})
    encoded, _ = pair(tmp_path, small, said, {r"\.experts\.": rule})

    def straddling(tensors):
        made = joined(tensors)
        for name in [name for name in made if name.endswith("gate_up_proj_weight_scale_inv")]:
            made[name] = made[name][:, :3]
        return made

    change_all(encoded, straddling)
    with pytest.raises(UnsupportedError, match="3 for 384 rows, of which gate and up share some"):
        Directory.open(encoded)


def test_matrices_that_are_there_twice(tmp_path):
    encoded, _ = pair(tmp_path, QWEN, MIXED, {r"\.experts\.": nvfp4})
    change_all(encoded, lambda tensors: tensors | joined(tensors))
    with pytest.raises(CheckpointError, match="_proj and .*experts.0.*; expected one of the"):
        Directory.open(encoded)


def test_no_more_experts_than_bytes(tmp_path):
    encoded, _ = pair(tmp_path, QWEN, MIXED, {r"\.experts\.": nvfp4})
    name = "model.layers.0.mlp.experts.gate_up_proj"
    empty = torch.empty(2**40, 0, 32, dtype=torch.uint8)
    change_all(encoded, lambda tensors: joined(tensors) | {name: empty})
    with pytest.raises(CheckpointError):
        weights_in(Directory.open(encoded))
