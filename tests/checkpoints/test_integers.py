"""Integers in words: AWQ, GPTQ, AutoRound, compressed-tensors, against the published layout
(raw_integers.py) and, where they are installed, the packages themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_calls import message
from files import MADE, Tensors, change, change_json, copied
from raw_integers import of_qweight
from safetensors.torch import save_file
from torch import Tensor

from fusion_moe.checkpoints import (
    Directory,
    Packing,
    StoredWeight,
    check_scales,
    convert,
    packing_of,
    stored_weights,
    weights_in,
)
from fusion_moe.checkpoints.integers import AWQ_ORDER
from fusion_moe.checkpoints.words import Words
from fusion_moe.encodings import INTEGERS, ROW, Quantized, dequantize, quantize
from fusion_moe.errors import CheckpointError, UnsupportedError

N, K = 32, 256
GROUPS = (32, 64, 128, ROW)
NAME = "layers.0.self_attn.o_proj"


def directory(folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def words(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) - 0.5


def qweight(
    by: str, bits: int = 4, group: int = 128, dtype: torch.dtype = torch.float16, **said: Any
) -> tuple[Tensors, dict[str, Any]]:
    """Random tensors of a weight, and the configuration. Zero points are 0 to 14 in files."""
    count = K // group if group > 0 else 1
    each = 32 // bits
    zeros = words(count, N // each, seed=1) & (0x0E0E0E0E if by == "gptq" else -1)
    made = {
        "qweight": words(K, N // each) if by == "awq" else words(K // each, N),
        "qzeros": zeros,
        "scales": scales(count, N).to(dtype),
    }
    if by == "gptq":
        made["g_idx"] = torch.arange(K, dtype=torch.int32) // (K // count)
    config = {"quant_method": by, "bits": bits, "group_size": group, "desc_act": False} | said
    return {f"{NAME}.{part}": t for part, t in made.items()}, config


def checked(path: Path) -> tuple[Directory, dict[str, StoredWeight]]:
    opened = Directory.open(path)
    weights = weights_in(opened)
    check_scales(opened, weights)
    return opened, weights


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("awq", {}),
        ("gptq", {}),
        ("gptq", {"checkpoint_format": "gptq_v2"}),
        ("auto-round", {"packing_format": "auto_round:auto_awq"}),
        ("auto-round", {"packing_format": "auto_round:auto_gptq"}),
        ("auto-round", {"packing_format": "auto_round"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x.values()),
)
def test_zero_points_in_every_packing(
    by: str, said: dict[str, Any], group: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The numbers of the published layout, from the file, and as compressed-tensors."""
    packed_by = "awq" if "awq" in str(said) or by == "awq" else "gptq"
    tensors, config = qweight(packed_by, 4, group, dtype, quant_method=by, **said)
    config["quant_method"] = by
    src = directory(tmp_path / "src", tensors, config)
    opened, weights = checked(src)
    (weight,) = weights.values()
    assert weight.scheme.encoding is INTEGERS["uint4", group, dtype]
    q = weight.quantized(opened.read)
    want = of_qweight(*(tensors[f"{NAME}.{p}"] for p in ("qweight", "qzeros", "scales")), config)
    assert torch.equal(dequantize(q), want)
    for part, t in zip(weight.scheme.parts, q, strict=True):
        assert torch.equal(part.from_part(t), tensors[NAME + part.suffix])
    written = Directory.open(convert(src, tmp_path / "dst", "compressed-tensors"))
    (again,) = weights_in(written).values()
    assert all(map(torch.equal, again.quantized(written.read), q))
    assert again.scheme.name.startswith("compressed-tensors INT4 with zero points")


@pytest.mark.parametrize(("bits", "middle"), [(4, 0x77777777), (8, 0x7F7F7F7F)])
def test_symmetric_ones_have_no_zero_points(bits: int, middle: int, tmp_path: Path) -> None:
    tensors, config = qweight("gptq", bits, sym=True)
    tensors[f"{NAME}.qzeros"].fill_(middle)
    opened, weights = checked(directory(tmp_path, tensors, config))
    (weight,) = weights.values()
    assert weight.scheme.encoding is INTEGERS[f"int{bits}", 128, torch.float16]
    want = of_qweight(*(tensors[f"{NAME}.{p}"] for p in ("qweight", "qzeros", "scales")), config)
    assert torch.equal(weight.floats(opened.read), want)


def test_words_are_packed_as_they_were() -> None:
    for packing in (
        Words(4),
        Words(8, along_rows=True),
        Words(4, order=AWQ_ORDER),
        Words(4, along_rows=True, less=1),
    ):
        t = words(16, 8)
        assert torch.equal(packing.words(packing.codes(t)), t)
    assert Words(4).words(torch.arange(9, dtype=torch.uint8)[None]).tolist() == [[0x76543210, 8]]


# Bad input ----------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[Tensors], object], dict[str, Any]]] = {
    "zero points of 16": (lambda t: t[f"{NAME}.qzeros"].fill_(-1), {}),
    "zero points that are not in the middle": (lambda t: None, {"sym": True}),
    "groups out of order": (lambda t: t[f"{NAME}.g_idx"].copy_(_shuffled(2)), {}),
    "a group that is missing": (lambda t: t[f"{NAME}.g_idx"].zero_(), {}),
    "a group beyond the last": (lambda t: t[f"{NAME}.g_idx"].add_(1), {}),
    "other bits": (lambda t: t.update(_replaced(3)), {"bits": 3}),
    "other groups": (lambda t: t.update(_groups(16)), {}),
    "scales of another weight": (lambda t: t.update({f"{NAME}.scales": scales(2, N + 8)}), {}),
    "zero points of other groups": (lambda t: t.update({f"{NAME}.qzeros": words(1, 3)}), {}),
    "no zero points": (lambda t: t.pop(f"{NAME}.qzeros"), {}),
    "infinite scales": (lambda t: t[f"{NAME}.scales"].fill_(torch.inf), {}),
    "codes of one dimension": (lambda t: t.update({f"{NAME}.qweight": words(64)}), {}),
}


def _shuffled(groups: int) -> Tensor:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    return (order * groups // K).to(torch.int32)


def _replaced(bits: int) -> Tensors:
    return {f"{NAME}.qweight": words(K * bits // 32, N), f"{NAME}.qzeros": words(2, N * bits // 32)}


def _groups(group: int) -> Tensors:
    return {
        f"{NAME}.scales": scales(K // group, N).half(),
        f"{NAME}.qzeros": words(K // group, N // 8),
    }


@pytest.mark.parametrize(("how", "said"), BAD.values(), ids=BAD)
def test_what_does_not_fit(
    how: Callable[[Tensors], object],
    said: dict[str, Any],
    tmp_path: Path,
    golden: Callable[..., None],
) -> None:
    tensors, config = qweight("gptq", **said)
    how(tensors)
    path = directory(tmp_path, tensors, config)
    golden(message(lambda: checked(path)))


def test_zero_points_of_more_rows_do_not_fit(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.0.gate_proj.weight_zero_point"
    path = change(
        copied("ct-qwen3_moe-w4a16_asym", tmp_path),
        lambda tensors: tensors.update({name: tensors[name].repeat(2, 1)}),
    )
    with pytest.raises(CheckpointError, match=rf"{name} .int32 \[32, 1\].; expected"):
        checked(path)


def test_bits_that_nothing_tells(tmp_path: Path) -> None:
    """compressed-tensors' words of 4 bits in groups of 128, or of 8 bits in groups of 64."""
    tensors = {f"{NAME}.weight_packed": words(8, 32), f"{NAME}.weight_scale": scales(8, 2).half()}
    opened = Directory.open(directory(tmp_path, tensors, {}))
    for groups, name in (
        (((4, 128),), "int4_128_f16"),
        (((8, 64),), "int8_64_f16"),
        (((4, 128), (8, 32)), "int4_128_f16"),
    ):
        found = stored_weights(opened.tensors, "compressed-tensors", Packing(groups))
        assert found[NAME].scheme.encoding.name == name
    with pytest.raises(CheckpointError, match="may have 4 or 8 bits; expected groups of sizes"):
        stored_weights(opened.tensors, "compressed-tensors", Packing(((4, 128), (8, 64))))


def test_what_configurations_say() -> None:
    groups = [
        {"weights": {"type": "int", "num_bits": 4, "group_size": 64}},
        {"weights": {"type": "int", "num_bits": 8, "strategy": "channel"}},
        {"weights": {"type": "float", "num_bits": 4}},
    ]
    said = {"quant_method": "compressed-tensors", "config_groups": dict(enumerate(groups))}
    assert packing_of(said).groups == ((4, 64), (8, ROW))
    said = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}
    assert packing_of(said) == Packing(((8, ROW),), True, 1, awq=False)


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("awq", {"quant_method": "gptq"}),
        ("gptq", {"quant_method": "awq"}),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}),
    ],
)
def test_words_of_another_packing(by: str, said: dict[str, Any], tmp_path: Path) -> None:
    """Both packings have matrices of such shapes, with other numbers."""
    tensors, config = qweight(by)
    wanted = "GPTQ's .K/8, N." if by == "awq" else "AWQ's .K, N/8."
    with pytest.raises(CheckpointError, match=f"expected {wanted}, with"):
        checked(directory(tmp_path, tensors, config | said))


def test_a_directory_of_awq_says_where_to_go(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match='to="compressed-tensors" writes integers'):
        convert(MADE / "awq-qwen3_moe", tmp_path / "dst")


def test_groups_that_do_not_follow_one_another_are_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("fusion_moe.transformers")
    path = copied("auto_round-gptq", tmp_path)
    base = "model.layers.0.mlp.experts.3.down_proj"
    one_group = torch.zeros(128, dtype=torch.int32)
    change(path, lambda tensors: tensors.update({f"{base}.g_idx": one_group + 1}))
    with pytest.raises(CheckpointError, match=r"g_idx: groups of columns \[128\], of 1 numbers"):
        transformers.from_pretrained(path)
    change(path, lambda tensors: tensors.update({f"{base}.g_idx": one_group}))
    assert transformers.from_pretrained(path)
    change_json(
        path / "config.json", lambda config: config["quantization_config"].update(sym=False)
    )
    model = transformers.from_pretrained(path)  # the same numbers, with zero points
    assert model.model.layers[0].mlp.experts.encoding is INTEGERS["uint4", 128, torch.float16]


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_out_of_order_become_floats(bits: int, tmp_path: Path) -> None:
    """desc_act: numbers are right, and there is no encoding of them."""
    tensors, config = qweight("gptq", bits, desc_act=True, sym=bits == 8)
    if bits == 8:
        tensors[f"{NAME}.qzeros"].fill_(0x7F7F7F7F)
    tensors[f"{NAME}.g_idx"] = order = _shuffled(2)
    path = directory(tmp_path / "src", tensors, config)
    written = Directory.open(convert(path, tmp_path / "dst", "dense"))
    parts = (tensors[f"{NAME}.{part}"] for part in ("qweight", "qzeros", "scales"))
    assert torch.equal(written.read(f"{NAME}.weight"), of_qweight(*parts, config, order))
    with pytest.raises(UnsupportedError, match="side by side .desc_act.; .* convert it to=.dense."):
        convert(path, tmp_path / "other", "compressed-tensors")


# The packages themselves --------------------------------------------------------------------------


@pytest.mark.judges
@pytest.mark.parametrize("name", ["ct-qwen3_moe-w4a16_asym", "ct-qwen3_moe-w8a16"])
def test_compressed_tensors_decodes_the_same(name: str, tmp_path: Path) -> None:
    """Its own decoder, of its files and of what `convert` writes."""
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    again = convert(MADE / name, tmp_path / "again", "compressed-tensors")
    for opened in map(Directory.open, (MADE / name, again)):
        config = quantization.QuantizationConfig(**opened.quantization)
        (scheme,) = config.config_groups.values()
        for weight in weights_in(opened).values():
            state = {
                part.removeprefix("."): opened.read(f"{weight.name}{part}")
                for part in (".weight_packed", ".weight_scale", ".weight_shape")
            }
            if weight.scheme.encoding.zero_points:
                state["weight_zero_point"] = opened.read(f"{weight.name}.weight_zero_point")
            theirs = base.PackedQuantizationCompressor.decompress(state, scheme)["weight"]
            assert torch.equal(weight.floats(opened.read).to(theirs.dtype), theirs)


@pytest.mark.judges
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["int4", "uint4", "int8"])
def test_quantizing_as_compressed_tensors(name: str, group: int) -> None:
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    args = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs(
        num_bits=int(name[-1]),
        type="int",
        symmetric=name[0] != "u",
        strategy="channel" if group == ROW else "group",
        group_size=None if group == ROW else group,
    )
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    groups = x.unflatten(-1, (-1, 256 if group == ROW else group))
    scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    q: Quantized = quantize(x, INTEGERS[name, group, torch.bfloat16])
    assert torch.equal(q.block_scale, scale)
    if name[0] == "u":
        assert ((q.zero_point.int() - 8 - zero.int()).abs() <= 1).all()


@pytest.mark.judges
@pytest.mark.parametrize("name", ["awq-qwen3_moe", "auto_round-awq"])
def test_autoawq_decodes_the_same(name: str) -> None:
    awq = pytest.importorskip("awq.utils.packing_utils")
    opened = Directory.open(MADE / name)
    for weight in weights_in(opened).values():
        parts = [opened.read(f"{weight.name}.{p}") for p in ("qweight", "qzeros", "scales")]
        group = weight.scheme.encoding.block
        theirs = awq.dequantize_gemm(*parts, 4, group).T
        assert torch.equal(weight.floats(opened.read).half(), theirs)


@pytest.mark.judges
def test_auto_round_decodes_the_same() -> None:
    """Its linear layer, with the identity as rows."""
    module = pytest.importorskip("auto_round_extension.torch.qlinear_torch_zp")
    opened = Directory.open(MADE / "auto_round-gptq")
    for weight in weights_in(opened).values():
        n, k = weight.shape
        layer = module.QuantLinear(4, 128, k, n, False)
        for part in ("qweight", "qzeros", "scales"):
            setattr(layer, part, opened.read(f"{weight.name}.{part}"))
        layer.post_init()
        theirs = layer(torch.eye(k).half())
        assert torch.equal(weight.floats(opened.read).half(), theirs.T)
