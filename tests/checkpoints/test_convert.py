"""Directories in other forms: the same numbers, against numpy and ml_dtypes on the raw bytes of
both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from bad_calls import message, messages
from files import MADE, Tensors, again, at, change, change_json, copied, decoded, raw

from fusion_moe.checkpoints import (
    Directory,
    check_scales,
    convert,
    method_of,
    quantize,
    stored_weights,
)
from fusion_moe.errors import CheckpointError, UnsupportedError

Raw = dict[str, np.ndarray]
MODELOPT = sorted(path.name for path in MADE.glob("modelopt-*"))
COMPRESSED = ["ct-qwen3_moe", "ct-mixtral", "ct-gpt_oss"]


def weights_of(path: Path) -> set[str]:
    directory = Directory.open(path)
    found = stored_weights(directory.tensors, method_of(directory.quantization))
    check_scales(directory, found)
    return set(found)


def plain(tensors: Raw) -> Raw:
    """What each weight of a directory means, float32, by its name without a suffix; plain tensors
    by theirs.
    """
    made: Raw = {}
    for name, t in tensors.items():
        base = name.removesuffix(".weight")
        if name.endswith("_blocks"):
            scale = tensors[name.replace("_blocks", "_scales")].view(ml_dtypes.float8_e8m0fnu)
            made[name.removesuffix("_blocks")] = np.swapaxes(
                decoded(t.reshape(*t.shape[:2], -1), scale), 1, 2
            )
        elif name.endswith(".weight_packed") and t.dtype == np.int32:
            base, scale = (
                name.removesuffix(".weight_packed"),
                tensors[name.replace("_packed", "_scale")].astype(np.float32),
            )
            codes = (t[..., None] >> (4 * np.arange(8, dtype=np.int32)) & 15) - 8
            made[base] = (
                (codes.reshape(*scale.shape, 32) * scale[..., None])
                .reshape(t.shape[0], -1)
                .astype(np.float32)
            )
        elif name.endswith(".weight_packed"):
            base = name.removesuffix(".weight_packed")
            made[base] = decoded(
                t,
                tensors[f"{base}.weight_scale"],
                np.float32(1) / tensors[f"{base}.weight_global_scale"],
            )
        elif t.dtype == np.uint8 and name.endswith(".weight"):
            made[base] = decoded(
                t, tensors[f"{base}.weight_scale"], tensors[f"{base}.weight_scale_2"]
            )
        elif t.dtype == np.uint8 and t.ndim == 3 and not name.endswith("_scales"):
            codes, scale = np.swapaxes(t, 1, 2), np.swapaxes(tensors[f"{name}_weight_scale"], 1, 2)
            made[name] = np.swapaxes(decoded(codes, scale, tensors[f"{name}_weight_scale_2"]), 1, 2)
        elif t.dtype == ml_dtypes.float8_e4m3fn and name.endswith(".weight"):
            made[base] = t.astype(np.float32) * tensors[f"{base}.weight_scale"]
        elif not name.endswith(("scale", "scale_2", "_scales", ".weight_shape")):
            made[base] = t.astype(np.float32)
    return made


def assert_equal(a: Raw, b: Raw) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("name", [*COMPRESSED, "mxfp4-gpt_oss"])
def test_to_modelopt_without_loss(name: str, tmp_path: Path) -> None:
    dst = convert(MADE / name, tmp_path / "dst")
    assert_equal(plain(raw(dst)), plain(raw(MADE / name)))
    assert weights_of(dst) == weights_of(MADE / name)
    said = json.loads((dst / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert "lm_head" in said["ignore"]
    older = json.loads((dst / "hf_quant_config.json").read_text())["quantization"]
    assert (older["quant_algo"], older["exclude_modules"]) == ("W4A16_NVFP4", said["ignore"])


@pytest.mark.parametrize("name", MODELOPT)
def test_what_is_in_modelopts_form_keeps_its_bytes(name: str, tmp_path: Path) -> None:
    dst = convert(MADE / name, tmp_path / "dst")
    before, after = raw(MADE / name), raw(dst)
    assert before.keys() == after.keys()
    for key in before:
        a, b = before[key], after[key]
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), key
    algorithms = [
        json.loads((d / "config.json").read_text())["quantization_config"]["quant_algo"]
        for d in (MADE / name, dst)
    ]
    assert algorithms[0] == algorithms[1]


@pytest.mark.parametrize("name", [*MODELOPT, *COMPRESSED, "ct-qwen3_moe-int4", "mxfp4-gpt_oss"])
def test_to_float32_without_loss(name: str, tmp_path: Path) -> None:
    dst = convert(MADE / name, tmp_path / "dst", "dense")
    config = json.loads((dst / "config.json").read_text())
    assert (
        "quantization_config" in config,
        config["dtype"],
        (dst / "hf_quant_config.json").exists(),
    ) == (False, "float32", False)
    assert_equal(plain(raw(dst)), in_floats(name, plain(raw(MADE / name))))


def in_floats(name: str, made: Raw) -> Raw:
    """By the names that the class reads: compressed-tensors names experts of all families alike."""
    if name == "ct-mixtral":
        words = (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
        return {reduce(lambda n, w: n.replace(*w), words, key): t for key, t in made.items()}
    if name != "ct-gpt_oss":
        return made
    other = {key: t for key, t in made.items() if ".experts." not in key}
    for key in made:
        block, _, rest = key.partition(".experts.0.")
        if not rest or rest.startswith("gate_proj"):
            continue

        def of_all(rest: str, block: str = block) -> np.ndarray:
            return np.stack([made[f"{block}.experts.{e}.{rest}"] for e in range(4)])

        whole, to = of_all(rest), rest.replace("up_proj", "gate_up_proj")
        if rest.startswith("up_proj"):  # gate and up alternate
            gate = of_all(rest.replace("up", "gate"))
            whole = np.stack([gate, whole], 2).reshape(4, -1, *whole.shape[2:])
        bias = rest.endswith(".bias")
        other[f"{block}.experts.{to.replace('.bias', '_bias')}"] = (
            whole if bias else np.swapaxes(whole, 1, 2)
        )
    return other


@pytest.mark.parametrize("to", ["modelopt", "dense"])
@pytest.mark.parametrize(
    ("part", "key"), [("", "compression_config"), ("text_config", "quantization_config")]
)
def test_the_sources_quantization_is_not_said_again(
    part: str, key: str, to: str, tmp_path: Path
) -> None:
    src = copied("ct-qwen3_moe", tmp_path)

    def move(config: dict[str, Any]) -> None:
        said = config.pop("quantization_config")
        (config.setdefault(part, {}) if part else config)[key] = said

    change_json(src / "config.json", move)
    written = Directory.open(convert(src, tmp_path / "dst", to))
    assert method_of(written.quantization) == ("modelopt" if to == "modelopt" else "")
    assert "compressed-tensors" not in (tmp_path / "dst" / "config.json").read_text()


def test_mxfp4_is_what_transformers_decodes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MADE / "mxfp4-gpt_oss", quantization_config=config, dtype=torch.bfloat16
    )
    tensors = raw(convert(MADE / "mxfp4-gpt_oss", tmp_path / "dst", "dense"))
    for name in ("gate_up_proj", "down_proj"):
        want = getattr(model.model.layers[0].mlp.experts, name).detach().float().numpy()
        np.testing.assert_array_equal(tensors[f"model.layers.0.mlp.experts.{name}"], want)


def test_to_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    dst = convert(MADE / "modelopt-qwen3_moe", tmp_path / "dst", "dense", dtype=torch.bfloat16)
    want = {
        name: t.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, t in plain(raw(MADE / "modelopt-qwen3_moe")).items()
    }
    assert_equal(plain(raw(dst)), want)


def test_input_scales_become_multipliers(tmp_path: Path) -> None:
    """compressed-tensors with quantized activations."""
    name = "model.layers.0.mlp.experts.0.gate_proj"

    def add(tensors: Tensors) -> None:
        tensors.update(
            {
                f"{key.removesuffix('.weight_packed')}.input_global_scale": torch.tensor([448.0])
                for key in list(tensors)
                if key.endswith(".weight_packed")
            }
        )

    dst = convert(change(copied("ct-qwen3_moe", tmp_path), add), tmp_path / "dst")
    assert raw(dst)[f"{name}.input_scale"] == np.float32(1 / 448)
    assert (
        json.loads((dst / "config.json").read_text())["quantization_config"]["quant_algo"]
        == "NVFP4"
    )


def test_mixed_precision_is_said_layer_by_layer(tmp_path: Path) -> None:
    dst = convert(MADE / "modelopt-qwen3_5_moe-mixed", tmp_path / "dst")
    said, theirs = (
        json.loads((d / "config.json").read_text())["quantization_config"]
        for d in (dst, MADE / "modelopt-qwen3_5_moe-mixed")
    )
    assert {name: how["quant_algo"] for name, how in said["quantized_layers"].items()} == {
        name: how["quant_algo"] for name, how in theirs["quantized_layers"].items()
    }


def deepseek_v4(path: Path) -> Path:
    """Experts in int8 and E8M0, attention in FP8 with E8M0 for 128 x 128, in the names of
    DeepSeek-V4.
    """
    rand = torch.Generator().manual_seed(0)

    def bytes_(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=rand)

    def rename(tensors: Tensors) -> None:
        tensors.clear()
        for e in range(4):
            for name in ("w1", "w2", "w3"):
                tensors[f"layers.0.ffn.experts.{e}.{name}.weight"] = bytes_(32, 32).view(torch.int8)
                tensors[f"layers.0.ffn.experts.{e}.{name}.scale"] = bytes_(
                    32, 2, low=110, high=127
                ).view(torch.float8_e8m0fnu)
        tensors["layers.0.attn.wq_a.weight"] = (torch.randn(160, 64, generator=rand)).to(
            torch.float8_e4m3fn
        )
        tensors["layers.0.attn.wq_a.scale"] = bytes_(2, 1, low=110, high=120).view(
            torch.float8_e8m0fnu
        )
        tensors["layers.0.hc_attn_scale"] = torch.ones(3)

    change(path, rename)
    change_json(
        path / "config.json",
        lambda c: c.update(
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
        ),
    )
    return path


def test_deepseek_v4(tmp_path: Path) -> None:
    src = deepseek_v4(copied("modelopt-qwen3_moe", tmp_path))
    before, after = raw(src), raw(convert(src, tmp_path / "dst"))
    for e in range(4):
        for name in (f"layers.0.ffn.experts.{e}.{w}" for w in ("w1", "w2", "w3")):
            got = decoded(
                *(after[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
            )
            np.testing.assert_array_equal(
                got, decoded(before[f"{name}.weight"], before[f"{name}.scale"])
            )
    scale = before["layers.0.attn.wq_a.scale"].astype(np.float32).repeat(128, 0)[:160]
    want = before["layers.0.attn.wq_a.weight"].astype(np.float32) * scale
    assert after["layers.0.attn.wq_a.weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(after["layers.0.attn.wq_a.weight"].astype(np.float32), want)


def test_fp8_whose_scales_are_no_powers_of_two(tmp_path: Path) -> None:
    src = deepseek_v4(copied("modelopt-qwen3_moe", tmp_path))
    name = "layers.0.attn.wq_a"
    change(
        src,
        lambda tensors: tensors.update(
            {f"{name}.weight_scale_inv": tensors.pop(f"{name}.scale").float() * 1.1}
        ),
    )
    with pytest.raises(
        UnsupportedError,
        match="convert: layers.0.attn.wq_a: FP8 whose scales are "
        "no powers of two; expected numbers",
    ):
        convert(src, tmp_path / "dst")
    before, after = raw(src), raw(convert(src, tmp_path / "dst", "dense"))
    want = (
        before[f"{name}.weight"].astype(np.float32)
        * before[f"{name}.weight_scale_inv"].repeat(128, 0)[:160]
    )
    np.testing.assert_array_equal(after[f"{name}.weight"], want)


def test_fp8_in_blocks_alone_is_none_of_modelopts_forms(tmp_path: Path) -> None:
    src = quantize(MADE / "bf16-qwen3_moe", tmp_path / "src", to="fp8")
    with pytest.raises(UnsupportedError, match="FP8 in blocks alone; .* one scale; convert it to="):
        convert(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_no_other_form_is_known(tmp_path: Path, golden: Callable[..., None]) -> None:
    to = partial(convert, MADE / "modelopt-qwen3_moe", tmp_path / "dst")
    golden(
        messages(
            {
                "gguf": lambda: to("gguf"),
                "integers": lambda: to("dense", dtype=torch.int32),
                "FP8": lambda: to("dense", dtype=torch.float8_e4m3fn),
            }
        )
    )
    assert not (tmp_path / "dst").exists()


def _set_scales(*at: int) -> Callable[[Path], object]:
    """2^-27 at one place of the scales of down [E, N, K/32]."""

    def wide(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.experts.down_proj_scales"][at] = 100

    return lambda path: change(path, wide)


REFUSED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "bf16": ("bf16-qwen3_moe", lambda path: None),
    "int4": ("ct-qwen3_moe-int4", lambda path: None),
    "mxfp4, a row of many octaves": ("mxfp4-gpt_oss", _set_scales(0, 0, 0)),
    "mxfp4, experts of many octaves": ("mxfp4-gpt_oss", _set_scales(0)),
    "an expert missing": (
        "ct-qwen3_moe",
        lambda path: change(
            path,
            lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts.3." in name],
        ),
    ),
    "another number of experts in one tensor": (
        "mxfp4-gpt_oss",
        lambda path: change_json(path / "config.json", lambda c: c.update(num_local_experts=3)),
    ),
    "there already": ("modelopt-qwen3_moe", lambda path: (path.parent / "dst").write_text("mine")),
}


@pytest.mark.parametrize(("name", "how"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_leaves_nothing(
    name: str, how: Callable[[Path], object], tmp_path: Path, golden: Callable[..., None]
) -> None:
    path = copied(name, tmp_path)
    how(path)
    before = set(tmp_path.iterdir())
    golden(message(lambda: convert(path, tmp_path / "dst")))
    assert set(tmp_path.iterdir()) == before


ENTRIES = {
    "a number of another kind": {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    "a list": {"rope_parameters": {"rope_type": ["default"]}},
    "past its range": {"pad_token_id": 10**6},
    "past all memory": {"hidden_size": 2**62},
    "no dtype": {"dtype": 3},
    "a long list": {"pad_token_id": [0] * 10_000},
}


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
def test_configurations_of_which_there_is_no_model(entries: dict[str, Any], tmp_path: Path) -> None:
    source = copied("modelopt-qwen3_moe", tmp_path)
    change_json(source / "config.json", lambda config: config.update(entries))
    with pytest.raises(UnsupportedError, match="expected a configuration") as error:
        convert(source, tmp_path / "written", to="dense")
    assert len(str(error.value)) < 2000


@pytest.mark.usefixtures("pythons_own_recursion_limit")
def test_a_configuration_that_is_nested_too_deeply(tmp_path: Path) -> None:
    source = copied("modelopt-qwen3_moe", tmp_path)
    file = source / "config.json"
    file.write_text(file.read_text().rstrip()[:-1] + f', "extra": {"[" * 900 + "]" * 900}}}')
    with pytest.raises(UnsupportedError, match="expected a configuration"):
        convert(source, tmp_path / "written", to="dense")


def test_biases_without_rows(tmp_path: Path) -> None:
    """They are read when floats are written: an error of ours, and nothing is left."""
    source = copied("ct-gpt_oss", tmp_path)
    names = [n for n in Directory.open(source).tensors if n.endswith("bias") and "experts" in n]
    change(source, at(names[0], lambda t: t[:0]))
    with pytest.raises(CheckpointError, match=rf"{names[0]} is \[0.*expected .* rows"):
        convert(source, tmp_path / "written", to="dense")
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("to", ["dense", "modelopt"])
def test_biases_that_a_class_does_not_have(to: str, tmp_path: Path) -> None:
    """Floats cannot say them; in another form they stay, and a model refuses them."""
    source, written = copied("ct-qwen3_moe", tmp_path), tmp_path / "written"
    name = "model.layers.0.mlp.experts.1.up_proj.bias"
    change(source, lambda tensors: tensors.update({name: torch.ones(32)}))
    if to == "modelopt":
        assert name in Directory.open(convert(source, written, to=to)).tensors
        return
    with pytest.raises(CheckpointError, match=f"{name}, which their class does not have"):
        convert(source, written, to=to)
    assert not written.exists()


def test_gates_that_a_class_does_not_have(tmp_path: Path) -> None:
    source = copied("modelopt-nemotron_h", tmp_path)
    change(source, again("up_proj.", "gate_proj."))
    with pytest.raises(CheckpointError, match="gate_proj.*, which their class does not have"):
        convert(source, tmp_path / "written", to="dense")


@pytest.mark.parametrize(
    ("name", "to"), [("ct-qwen3_moe-int4", "compressed-tensors"), ("ct-qwen3_moe", "modelopt")]
)
def test_how_activations_are_computed_stays(name: str, to: str, tmp_path: Path) -> None:
    source = copied(name, tmp_path)
    own = {"activation_format": "fp8", "scales": "mse"}
    change_json(source / "config.json", lambda c: c["quantization_config"].update(own))
    written = Directory.open(convert(source, tmp_path / "written", to=to))
    assert own.items() <= written.quantization.items()


@pytest.mark.parametrize(
    ("name", "code", "dtype", "largest"),
    [
        ("mxfp4-gpt_oss", 145, torch.float16, r"6.55e\+04"),
        ("mxfp4-gpt_oss", 254, torch.float32, r"3.403e\+38"),
    ],
)
def test_numbers_beyond_a_dtype(
    name: str, code: int, dtype: torch.dtype, largest: str, tmp_path: Path
) -> None:
    """MXFP4 has any power of two as a scale; floats would be infinite."""
    source, written = copied(name, tmp_path), tmp_path / "written"
    change(source, lambda tensors: [t.fill_(code) for n, t in tensors.items() if "_scales" in n])
    with pytest.raises(
        UnsupportedError, match=f"experts.*magnitude .*; expected at most {largest}"
    ):
        convert(source, written, to="dense", dtype=dtype)
    assert not written.exists()
