"""Weights in the files of other packages: which ones are found, and what they mean, against numpy
and ml_dtypes on the raw bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import message, messages
from files import MADE, Tensors, at, change, copied, raw, same

from fusion_moe.checkpoints import (
    Direction,
    Directory,
    StoredWeight,
    method_of,
    stored_weights,
    weights_in,
)
from fusion_moe.checkpoints.methods import METHODS
from fusion_moe.errors import CheckpointError, UnsupportedError

GATE = "model.layers.0.mlp.experts.0.gate_proj"


def weights_of(path: Path) -> tuple[Directory, dict[str, StoredWeight]]:
    directory = Directory.open(path)
    return directory, weights_in(directory)


SCHEMES = {
    "modelopt-qwen3_moe": {"ModelOpt NVFP4": 4 + 12},
    "modelopt-mixtral": {"ModelOpt NVFP4": 4 + 12},
    "modelopt-deepseek_v3-w4a16": {"ModelOpt NVFP4": 5 + 3 + 12},
    "modelopt-nemotron_h": {"ModelOpt NVFP4": 4 + 2 + 8},
    "modelopt-llama4_text": {"ModelOpt NVFP4": 4 + 3, "ModelOpt NVFP4, fused": 2},
    "modelopt-gpt_oss": {"ModelOpt NVFP4": 4, "ModelOpt NVFP4, fused": 2},
    "modelopt-qwen3_5_moe-mixed": {"ModelOpt NVFP4": 2 * (12 + 3), "FP8": 3 + 4},
    "ct-qwen3_moe": {"compressed-tensors NVFP4": 4 + 12},
    "ct-mixtral": {"compressed-tensors NVFP4": 4 + 12},
    "ct-gpt_oss": {"compressed-tensors NVFP4": 4 + 12},
    "ct-qwen3_moe-int4": {"compressed-tensors INT4": 12},
    "mxfp4-gpt_oss": {"MXFP4": 2},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_of_directories(name: str) -> None:
    """By a weight's own tensors, whatever the method. Their numbers: `test_to_float32_without_loss`
    in test_convert.py.
    """
    directory, weights = weights_of(MADE / name)
    assert Counter(w.scheme.name for w in weights.values()) == SCHEMES[name]
    for weight in weights.values():
        if weight.scheme.encoding is not None:
            q = weight.quantized(directory.read)
            assert (q.shape, q.encoding) == (weight.shape, weight.scheme.encoding)
    for method in METHODS:
        assert stored_weights(directory.tensors, method) == weights


ENCODED = [d.name for d in sorted(MADE.iterdir()) if not d.name.startswith("bf16")]


@pytest.mark.parametrize("name", ENCODED)
def test_a_part_becomes_the_stored_tensor_again(name: str) -> None:
    """Bit by bit, but for the dtype of scales that are read in another one, and for divisors, each
    of which is 1 over a multiplier.
    """
    directory, weights = weights_of(MADE / name)
    assert weights
    for weight in weights.values():
        parts = weight.parts(directory.read)
        for part, t in zip(weight.scheme.parts, parts, strict=True):
            stored = directory.read(weight.entries[part.part].name)
            each = t if part.direction is None else t.reshape(-1)[:1]
            again = part.from_part(each).reshape(stored.shape)
            stored = stored.to(again.dtype) if again.is_floating_point() else stored
            if part.direction is Direction.DIVISOR:
                torch.testing.assert_close(again, stored, rtol=2e-7, atol=0)
                continue
            bytes_of = [one.contiguous().flatten().view(torch.uint8) for one in (again, stored)]
            assert torch.equal(*bytes_of), (weight.name, part.part)


def _rename(old: str, new: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


BROKEN: dict[str, Callable[[Tensors], object]] = {
    "no block scale": lambda tensors: tensors.pop(f"{GATE}.weight_scale"),
    "no decode scale": lambda tensors: tensors.pop(f"{GATE}.weight_scale_2"),
    "no codes": lambda tensors: tensors.pop(f"{GATE}.weight"),
    "decode scales of rows": at(f"{GATE}.weight_scale_2", lambda t: t.repeat(32)),
    "k of no whole blocks": at(f"{GATE}.weight", lambda t: t[:, :-3]),
    "too few codes": at(f"{GATE}.weight", lambda t: t[:, :-8]),
    "codes of one dimension": at(f"{GATE}.weight", lambda t: t.flatten()),
    "swizzled block scales": at(
        f"{GATE}.weight_scale", lambda t: t.view(torch.uint8).repeat(4, 1).view(t.dtype)
    ),
    "in two formats": lambda tensors: tensors.update(
        {
            f"{GATE}.weight_packed": tensors[f"{GATE}.weight"].clone(),
            f"{GATE}.weight_global_scale": torch.ones(1),
        }
    ),
}


@pytest.mark.parametrize("how", BROKEN.values(), ids=BROKEN)
def test_what_is_missing_or_does_not_fit(
    how: Callable[[Tensors], object], tmp_path: Path, golden: Callable[..., None]
) -> None:
    path = change(copied("modelopt-qwen3_moe", tmp_path), how)
    golden(message(lambda: weights_of(path)))


OTHER_FORMATS: dict[str, Callable[[Tensors], object]] = {
    "block scale as bytes": at(f"{GATE}.weight_scale", lambda t: t.view(torch.uint8)),
    "codes in float": at(f"{GATE}.weight", lambda t: t.float()),
    "codes in int8": at(f"{GATE}.weight", lambda t: t.view(torch.int8)),
    "scales of inputs for AWQ": _rename(f"{GATE}.input_scale", f"{GATE}.pre_quant_scale"),
    "packed by another package": _rename("lm_head.weight", "lm_head.qweight"),
    "bytes of a name that nobody knows": lambda tensors: tensors.update(
        {f"{GATE}.table": torch.zeros(3, dtype=torch.uint8)}
    ),
    "8-bit integers": lambda tensors: tensors.update(
        {
            "lm_head.weight": tensors["lm_head.weight"].to(torch.int8),
            "lm_head.weight_scale": torch.ones(256, 1),
        }
    ),
    "FP8 in other blocks": lambda tensors: tensors.update(
        {
            "lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn),
            "lm_head.weight_scale": torch.ones(32, 2),
        }
    ),
}


@pytest.mark.parametrize("how", OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_other_formats_are_not_supported_rather_than_broken(
    how: Callable[[Tensors], object], tmp_path: Path, golden: Callable[..., None]
) -> None:
    path = change(copied("modelopt-qwen3_moe", tmp_path), how)
    golden(message(lambda: weights_of(path)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_matrices_in_any_float(dtype: torch.dtype, tmp_path: Path) -> None:
    path = change(
        copied("modelopt-qwen3_moe", tmp_path),
        at(f"{GATE}.weight_scale_2", lambda t: t.to(dtype)),
    )
    directory, weights = weights_of(path)
    scale = weights[GATE].quantized(directory.read).decode_scale
    assert (scale.dtype, scale) == (torch.float32, directory.read(f"{GATE}.weight_scale_2").float())


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1.0), (torch.float16, 1.01), (torch.float32, 1.01)]
)
def test_scales_of_integers_in_other_floats(
    dtype: torch.dtype, factor: float, tmp_path: Path
) -> None:
    """Those of float16 are kept; those of float32 are those of bfloat16, or refused."""
    path = change(
        copied("ct-qwen3_moe-int4", tmp_path),
        at(f"{GATE}.weight_scale", lambda t: (t.float() * factor).to(dtype)),
    )
    directory, weights = weights_of(path)
    if dtype == torch.float32 and factor != 1:
        with pytest.raises(
            UnsupportedError,
            match=r"gate_proj.weight_scale \(float32 .*, which bfloat16 does not hold",
        ):
            weights[GATE].quantized(directory.read)
        return
    was, original = weights_of(MADE / "ct-qwen3_moe-int4")
    (found, want) = (
        w[GATE].quantized(d.read).block_scale for d, w in ((directory, weights), (was, original))
    )
    assert torch.equal(found, (want.float() * factor).to(found.dtype))
    assert found.dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (1,), (160,), (160, 1), (2, 1)])
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv", "scale"])
def test_fp8_with_scales_of_matrices_rows_and_blocks(
    suffix: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    rand = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(160, 64, generator=rand).to(torch.float8_e4m3fn),
        f"a.{suffix}": torch.rand(shape, generator=rand),
    }
    path = change(copied("modelopt-qwen3_moe", tmp_path), lambda found: found.update(tensors))
    directory, weights = weights_of(path)
    values, scale = (raw(path)[name].astype(np.float32) for name in tensors)
    want = values * (scale.repeat(128, 0)[:160] if shape == (2, 1) else scale.reshape(-1, 1))
    assert same(weights["a"].floats(directory.read), want)


def test_fused_weights_say_what_does_not_fit_as_it_is_stored(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    path = change(
        copied("modelopt-gpt_oss", tmp_path), at(f"{name}_weight_scale", lambda t: t[:, :3])
    )
    with pytest.raises(
        CheckpointError,
        match=r"\[4, 3, 128\]\); expected \[4, 4, 128\] for "
        r".*gate_up_proj \(uint8 \[4, 32, 128\]\)",
    ):
        weights_of(path)


def test_known_scales_are_no_error(tmp_path: Path) -> None:
    one = torch.ones(())
    path = change(
        copied("modelopt-qwen3_moe", tmp_path),
        lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.k_scale": one}),
    )
    assert len(weights_of(path)[1]) == 16


def test_tensors_decide_and_not_what_is_said_to_be_left_out(tmp_path: Path) -> None:
    """ModelOpt's names of what it left out hold a sentinel,
    "lm_head.\\0backbone.pt_name_sentinel".
    """
    directory, weights = weights_of(MADE / "modelopt-nemotron_h")
    assert any("\0" in name for name in directory.quantization["ignore"])
    assert "lm_head" not in weights
    assert "backbone.layers.0.mixer.experts.3.up_proj" in weights


def test_scales_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"belongs to no weight; expected plain floats; "
        r"config.json has no quantization_config",
    ):
        stored_weights(Directory.open(MADE / "modelopt-qwen3_moe").tensors, "")


REFUSED = [
    {"quant_method": "awq", "version": "gemv"},
    {"quant_method": "gptq", "checkpoint_format": "marlin"},
    {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"},
    {"quant_method": "bitsandbytes"},
    {"quant_method": "gguf"},
    {"quant_method": "quanto"},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6_e3m2"}}},
    {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "int4"}]}},
    {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    {"quant_method": "modelopt"},
    {"bits": 4},
    {"quant_method": "compressed-tensors", "format": "marlin-24"},
    {"quant_method": "fp8", "weight_block_size": [1, 32]},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"type": "int", "num_bits": 8, "group_size": 128, "symmetric": False}
            }
        },
    },
]


def test_methods_that_are_refused(golden: Callable[..., None]) -> None:
    golden(messages({str(said): partial(method_of, said, "DIR") for said in REFUSED}))
    assert method_of({}) == ""


MX = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


def _transforms(*locations: str) -> dict[str, Any]:
    """As llm-compressor writes them."""
    apply = [{"targets": ["Linear"], "location": where, "inverse": False} for where in locations]
    return {"transform_config": {"config_groups": {"v": {"type": "hadamard", "apply": apply}}}}


@pytest.mark.parametrize(
    ("entries", "rotates"),
    [
        (MX | _transforms("input", "weight_input"), True),
        (MX | _transforms("weight_output", "output"), True),
        (MX | _transforms("weight_input", "weight_output"), False),
        (MX | {"transform_config": {}}, False),
        ({"quant_method": "quark", "algo_config": [{"name": "rotation", "r1": True}]}, False),
        ({"quant_method": "quark", "algo_config": [{"name": "gptq"}, {"r4": True}]}, True),
        ({"quant_method": "quark", "algo_config": [{"online_r1_rotation": True}]}, True),
        (MX | {"rotation_config": {"algorithm": "spinquant", "r1": True, "r3": True}}, True),
        (MX | {"rotation_config": {"hadamard_type": "random_hadamard"}}, True),
    ],
)
def test_activations_that_are_rotated(entries: dict[str, Any], rotates: bool) -> None:
    """Whose weights are rotated the other way: without that, all numbers would be wrong."""
    if not rotates:
        assert method_of(entries) == entries["quant_method"]
        return
    with pytest.raises(UnsupportedError, match="_config .*; expected no rotation of activations"):
        method_of(entries)


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"quant_method": "modelopt_fp4", "quant_algo": "nvfp4"}, "modelopt"),
        ({"quant_method": "modelopt_mixed", "quant_algo": "mixed_precision"}, "modelopt"),
        ({"quant_method": "compressed_tensors", "format": "pack-quantized"}, "compressed-tensors"),
    ],
)
def test_other_spellings_of_methods(said: dict[str, str], method: str) -> None:
    assert method_of(said) == method
