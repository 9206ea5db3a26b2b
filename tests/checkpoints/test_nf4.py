"""Matrices that bitsandbytes quantized, against its own decoder where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_calls import message
from files import MADE, Tensors, change, copied
from safetensors.torch import load_file, save_file

from fusion_moe.checkpoints import Directory, check_scales, convert, quantize, weights_in
from fusion_moe.encodings import NF4, NVFP4, quantize as quantized
from fusion_moe.errors import UnsupportedError
from fusion_moe.layouts.layout import as_bytes

EXPERTS, LINEAR = "bnb-qwen3_moe", "bnb-qwen3_moe-linear"  # all matrices, those of attention
NAME = "model.layers.0.self_attn.o_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
CONFIG = {"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}}


def decoded_by_bitsandbytes(tensors: Tensors, weight: str) -> torch.Tensor:
    """float32"""
    functional = pytest.importorskip("bitsandbytes.functional")
    parts = {n.removeprefix("weight."): t for n, t in below(tensors, weight).items()}
    codes = parts.pop("weight")
    state = functional.QuantState.from_dict(parts, torch.device("cpu"))
    state.dtype = torch.float32
    return functional.dequantize_4bit(codes, state)


def below(tensors: Tensors, weight: str) -> Tensors:
    prefix = f"{weight}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


@pytest.mark.judges("bitsandbytes")
@pytest.mark.parametrize("name", [EXPERTS, LINEAR])
def test_every_number_is_that_of_bitsandbytes(name: str) -> None:
    directory, tensors = Directory.open(MADE / name), load_file(MADE / name / "model.safetensors")
    weights = weights_in(directory)
    check_scales(directory, weights)
    assert len(weights) == 4 + (12 if name == EXPERTS else 0)
    for weight in weights.values():
        assert weight.scheme.encoding is NF4
        theirs = decoded_by_bitsandbytes(tensors, weight.name)
        assert torch.equal(weight.floats(directory.read), theirs)


@pytest.mark.judges("bitsandbytes")
@pytest.mark.parametrize("nested", [True, False])
def test_scales_in_several_blocks(nested: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    codes, state = functional.quantize_4bit(
        x, blocksize=64, compress_statistics=nested, quant_type="nf4"
    )
    tensors = {f"a.weight.{n}": t for n, t in state.as_dict(packed=True).items()}
    tensors["a.weight"] = codes
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    directory = Directory.open(tmp_path)
    weight = weights_in(directory)["a"]
    assert torch.equal(weight.floats(directory.read), functional.dequantize_4bit(codes, state))
    if not nested:
        q = quantized(x, NF4)
        assert all(map(torch.equal, weight.quantized(directory.read), q))
        for part, t in zip(weight.scheme.parts, q, strict=True):
            assert torch.equal(part.from_part(t), tensors["a" + part.suffix])


def test_it_is_written_as_floats_and_nothing_else(tmp_path: Path) -> None:
    """NF4 has no other form without loss."""
    for to in ("modelopt", "compressed-tensors"):
        with pytest.raises(UnsupportedError, match="in nf4"):
            convert(MADE / EXPERTS, tmp_path / "dst", to)
    source = Directory.open(MADE / EXPERTS)
    written = Directory.open(convert(MADE / EXPERTS, tmp_path / "dense", "dense"))
    for weight in weights_in(source).values():
        assert torch.equal(written.read(f"{weight.name}.weight"), weight.floats(source.read))
    assert not any("absmax" in name or "quant" in name for name in written.tensors)
    experts = weights_in(Directory.open(quantize(tmp_path / "dense", tmp_path / "again")))
    assert {weight.scheme.encoding for weight in experts.values()} == {NVFP4}


@pytest.mark.parametrize("name", [EXPERTS, LINEAR])
def test_what_a_model_saves(name: str, tmp_path: Path) -> None:
    """Scales in float32, as bitsandbytes without double quantization."""
    transformers = pytest.importorskip("fusion_moe.transformers")
    model = transformers.from_pretrained(MADE / name, dtype=torch.float32)
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.encoding is NF4
    assert (getattr(layer.mlp.experts, "encoding", None) is NF4) == (name == EXPERTS)
    model.save_pretrained(tmp_path)
    source, saved = Directory.open(MADE / name), Directory.open(tmp_path)
    for weight, again in zip(weights_in(source).values(), weights_in(saved).values(), strict=True):
        assert torch.equal(again.floats(saved.read), weight.floats(source.read))
    reloaded = transformers.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(
        torch.equal(as_bytes(t), as_bytes(reloaded[n])) for n, t in model.state_dict().items()
    )
    tensors = load_file(MADE / name / "model.safetensors")
    of_state = transformers.from_pretrained(
        None, config=type(model.config).from_pretrained(MADE / name), state_dict=tensors
    )
    assert of_state.model.layers[0].self_attn.q_proj.encoding is NF4
    tensors, weight = load_file(tmp_path / "model.safetensors"), NAME.removesuffix(".weight")
    assert torch.equal(
        decoded_by_bitsandbytes(tensors, weight), weights_in(source)[weight].floats(source.read)
    )


def _said(**changes: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        said = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)

    return change


BAD: dict[str, Callable[[Tensors], Any]] = {
    "a shape of one dimension": _said(shape=[16384]),
    "another shape": _said(shape=[128, 256]),
    "blocks of 128": _said(blocksize=128),
    "blocks across rows": _said(shape=[512, 32]),
    "no blocks": _said(blocksize=None),
    "an offset in words": _said(nested_offset="1"),
    "no JSON": lambda tensors: tensors.update({STATE: tensors[STATE][:-1]}),
    "a list": lambda tensors: tensors.update({STATE: torch.tensor([91, 93], dtype=torch.uint8)}),
    "no scales": lambda tensors: tensors.pop(f"{NAME}.absmax"),
    "no scales of scales": lambda tensors: tensors.pop(f"{NAME}.nested_absmax"),
    "too few scales": lambda tensors: tensors.update(
        {f"{NAME}.absmax": tensors[f"{NAME}.absmax"][1:]}
    ),
    "no codes": lambda tensors: tensors.pop(NAME),
    "codes of another width": lambda tensors: tensors.update({NAME: tensors[NAME].short()}),
    "no state": lambda tensors: tensors.pop(STATE),
    "another table": lambda tensors: tensors[f"{NAME}.quant_map"].mul_(2),
    "infinite scales of scales": lambda tensors: tensors[f"{NAME}.nested_absmax"].fill_(torch.inf),
    "FP4": lambda tensors: tensors.update({STATE.replace("nf4", "fp4"): tensors.pop(STATE)}),
}


def _check(path: Path) -> None:
    directory = Directory.open(path)
    check_scales(directory, weights_in(directory))


@pytest.mark.parametrize("how", BAD.values(), ids=BAD)
def test_what_does_not_fit(
    how: Callable[[Tensors], Any], tmp_path: Path, golden: Callable[..., None]
) -> None:
    path = change(copied(LINEAR, tmp_path), how)
    golden(message(lambda: _check(path)))


def test_blocks_of_scales_without_end(tmp_path: Path) -> None:
    """They are as many as there are scales, whatever memory that says."""
    path = change(copied(LINEAR, tmp_path), _said(nested_blocksize=2**62))
    (found, want) = (
        weights_in(directory)[NAME.removesuffix(".weight")].floats(directory.read)
        for directory in (Directory.open(path), Directory.open(MADE / LINEAR))
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_that_are_stored_as_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    """As FSDP needs them: bnb_4bit_quant_storage. The bytes are the same."""
    path = change(
        copied(LINEAR, tmp_path), lambda t: t.update({NAME: t[NAME].view(1, -1).view(dtype)})
    )
    (read, want) = (
        weights_in(directory)[NAME.removesuffix(".weight")].floats(directory.read)
        for directory in (Directory.open(path), Directory.open(MADE / LINEAR))
    )
    assert torch.equal(read, want)
