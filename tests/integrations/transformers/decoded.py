"""A plain model of transformers with the weights that a quantized directory means, decoded from the
raw file by numpy and ml_dtypes.

Nothing of fusion_moe is used: names, shapes and numbers are looked up here again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from raw_integers import of_packed, of_qweight
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
TOKENS = torch.arange(3, 20)[None]
RENAMED = {
    "mixtral": ((r"\.block_sparse_moe\.", ".mlp."),),
    "nemotron_h": ((r"^backbone\.", "model."),),
    "qwen3_5_moe_text": ((r"^model\.language_model\.", "model."),),
}


def plain_model(directory: Path) -> Any:
    """The model in float32."""
    config = AutoConfig.from_pretrained(directory)
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    quantization = json.loads((directory / "config.json").read_text()).get("quantization_config")
    tensors = _tensors(directory, config.model_type)
    _decode_integers(tensors, quantization or {})
    _decode_nf4(tensors)
    state = model.state_dict()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for key, like in state.items():
        if key not in tied:
            state[key] = _value(key, like, tensors, model.get_submodule(key.rpartition(".")[0]))
    model.load_state_dict(state)
    model.tie_weights()
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def configured(directory: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The directory, whose configuration a function has changed."""
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def relative(got: Tensor, want: Tensor) -> float:
    """The norm of the difference, relative to the norm."""
    return ((got - want).norm() / want.norm()).item()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same in all they are."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


def same_parameters(a: Any, b: Any) -> bool:
    """Whether two models have the same parameters and buffers. (Logits may differ in the last bit:
    products depend on alignment.)
    """
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(
        same_bytes(t, second[name]) for name, t in first.items()
    )


def _tensors(directory: Path, family: str) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.exists()
        else ["model.safetensors"]
    )
    found = {}
    for file in files:
        with safe_open(directory / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                live = name
                for pattern, by in RENAMED.get(family, ()):
                    live = re.sub(pattern, by, live)
                found[live] = opened.get_tensor(name)
    return found


def _value(key: str, like: Tensor, tensors: dict[str, Tensor], module: Any) -> Tensor:
    """float32, in the shape that the model's parameter has."""
    if (
        "_weight_scale" not in key
        and key.endswith(("gate_up_proj", "down_proj", "up_proj"))
        and like.dim() == 3
    ):
        value = _experts(key, tensors, module)
    elif key.endswith("_proj_bias") and key not in tensors:
        value = _biases(key, tensors, like)
    elif key.endswith(".weight"):
        value = _weight(key.removesuffix(".weight"), tensors)
    else:
        value = tensors[key].float()
    assert value.shape == like.shape, (key, value.shape, like.shape)
    return value


def _weight(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """A matrix under the names of ModelOpt or compressed-tensors."""
    if f"{name}.weight_packed" in tensors:
        divisor = tensors[f"{name}.weight_global_scale"].numpy()
        return _nvfp4(
            tensors[f"{name}.weight_packed"],
            tensors[f"{name}.weight_scale"],
            np.float32(1.0) / divisor,
        )
    weight = tensors[f"{name}.weight"]
    if f"{name}.weight_scale_2" in tensors:
        return _nvfp4(
            weight, tensors[f"{name}.weight_scale"], tensors[f"{name}.weight_scale_2"].numpy()
        )
    if weight.dtype == torch.float8_e4m3fn:
        return weight.float() * tensors[f"{name}.weight_scale"].float()
    return weight.float()


def _codes(packed: Tensor) -> np.ndarray:
    b = packed.numpy().astype(np.uint8)
    return E2M1[np.stack([b & 15, b >> 4], -1).reshape(*b.shape[:-1], -1)]


def _nvfp4(packed: Tensor, scale: Tensor, matrix: np.ndarray) -> Tensor:
    values = _codes(packed)
    scales = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(
        np.float32
    ) * matrix.astype(np.float32)
    return torch.from_numpy(values * np.repeat(scales, 16, -1))


def _decode_integers(tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
    """Adds `….weight`, in float32, for each weight in words of integers."""
    for name in list(tensors):
        base, _, part = name.rpartition(".")
        if part == "qweight":
            tensors[f"{base}.weight"] = of_qweight(
                *(tensors[f"{base}.{p}"] for p in ("qweight", "qzeros", "scales")), said
            )
        elif part == "weight_packed" and tensors[name].dtype == torch.int32:
            zeros = tensors.get(f"{base}.weight_zero_point")
            shape = tensors.pop(f"{base}.weight_shape").tolist()
            tensors[f"{base}.weight"] = of_packed(
                tensors.pop(name), tensors[f"{base}.weight_scale"], zeros, shape
            )


def _decode_nf4(tensors: dict[str, Tensor]) -> None:
    """Puts float32 matrices in the place of those that bitsandbytes quantized."""
    for name in [name for name in tensors if name.endswith(".quant_state.bitsandbytes__nf4")]:
        weight = name.removesuffix(".quant_state.bitsandbytes__nf4")
        said = json.loads(tensors[name].numpy().tobytes())
        raw = {
            part: tensors[f"{weight}.{part}"].numpy()
            for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
            if f"{weight}.{part}" in tensors
        }
        scales = raw["absmax"]
        if "nested_absmax" in raw:
            factors = np.repeat(raw["nested_absmax"], said["nested_blocksize"])[: len(scales)]
            scales = raw["nested_quant_map"][scales] * factors + np.float32(said["nested_offset"])
        codes = tensors[weight].numpy().ravel()
        codes = np.stack([codes >> 4, codes & 15], -1).reshape(-1, said["blocksize"])
        numbers = raw["quant_map"][codes] * scales[:, None]
        tensors[weight] = torch.from_numpy(numbers.reshape(said["shape"]))


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    exponents = scales.view(torch.uint8).numpy().astype(np.int32) - 127
    return torch.from_numpy(
        np.ldexp(_codes(blocks.flatten(-2)), np.repeat(exponents, 32, -1)).astype(np.float32)
    )


def _experts(key: str, tensors: dict[str, Tensor], module: Any) -> Tensor:
    """All experts of a projection, as the module wants them."""
    base, _, projection = key.rpartition(".")
    transposed, concatenated = (
        getattr(module, "is_transposed", True),
        getattr(module, "is_concatenated", True),
    )
    if f"{key}_blocks" in tensors:
        return _mxfp4(tensors[f"{key}_blocks"], tensors[f"{key}_scales"]).mT.contiguous()
    if f"{key}_weight_scale_2" in tensors:  # packed along the dimension before the last
        args = (
            tensors[key].mT.contiguous(),
            tensors[f"{key}_weight_scale"].mT.contiguous(),
            tensors[f"{key}_weight_scale_2"].numpy(),
        )
        return _nvfp4(*args).mT.contiguous()
    if key in tensors:
        return tensors[key].float()
    triple = (
        ("gate_proj", "up_proj", "down_proj")
        if any(f"{base}.0.down_proj" in name for name in tensors)
        else ("w1", "w3", "w2")
    )
    names = {"gate_up_proj": triple[:2], "up_proj": triple[1:2], "down_proj": triple[2:]}[
        projection
    ]
    count = 1 + max(
        int(name.removeprefix(f"{base}.").split(".")[0])
        for name in tensors
        if re.match(re.escape(base) + r"\.\d", name)
    )
    parts = [
        torch.stack([_weight(f"{base}.{e}.{name}", tensors) for e in range(count)])
        for name in names
    ]
    joined = (
        torch.cat(parts, 1)
        if concatenated or len(parts) == 1
        else torch.stack(parts, 2).flatten(1, 2)
    )
    return joined.mT.contiguous() if transposed else joined


def _biases(key: str, tensors: dict[str, Tensor], like: Tensor) -> Tensor:
    """Biases under the names of each expert, gate and up interleaved."""
    base, _, name = key.removesuffix("_bias").rpartition(".")
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    return torch.stack(
        [
            torch.stack([tensors[f"{base}.{e}.{n}.bias"].float() for e in range(len(like))])
            for n in names
        ],
        2,
    ).flatten(1)
