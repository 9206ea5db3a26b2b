"""Directories that hold weights of several schemes, as DeepSeek, nvidia, Unsloth and RedHat publish
them: each weight is read by its own tensors. Weights have random codes; the same model in plain
floats is what they mean, by numpy and ml_dtypes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from decoded import E2M1, logits, plain_model, relative, same_bytes, same_parameters
from files import MADE, change, copied
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV4Config, PreTrainedModel, Qwen3MoeConfig
from transformers.modeling_outputs import CausalLMOutput

from fusion_moe.checkpoints import (
    Directory,
    check_scales,
    convert,
    method_of,
    quantize,
    stored_weights,
    weights_in,
)
from fusion_moe.errors import CheckpointError, UnsupportedError
from fusion_moe.nn import QuantizedLinear
from fusion_moe.nn.frozen.packed import PackedModule
from fusion_moe.transformers import NVFP4Config, from_pretrained
from tests.families.tiny import FAMILIES, tiny

pytestmark = pytest.mark.usefixtures("meaning_without_all")

QWEN = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
)
V4 = DeepseekV4Config(
    vocab_size=96,
    hidden_size=64,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    q_lora_rank=32,
    o_lora_rank=32,
    o_groups=2,
    qk_rope_head_dim=16,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=8,
    sliding_window=8,
    n_shared_experts=1,
)
PUBLISHED = {
    "embed_tokens.weight": "embed.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
QUARK = {
    "quant_method": "quark",
    "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    },
}
# a name, N and K -> tensors, and the weight that they mean
Encode = Callable[[str, int, int], tuple[dict[str, Tensor], Tensor]]


def e2m1(n: int, k: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Random codes, and the numbers that they mean with these scales of blocks."""
    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    values = torch.from_numpy(E2M1)[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(1)
    return codes, values * scale.float().repeat_interleave(k // scale.shape[1], 1)


def nvfp4(*suffixes: str, divides: bool = False) -> Encode:
    def encode(name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        scale, matrix = (torch.rand(n, k // 16) + 0.5).to(torch.float8_e4m3fn), torch.tensor(0.0625)
        codes, values = e2m1(n, k, scale.float() * matrix)
        parts = codes, scale, (1 / matrix).reshape(1) if divides else matrix
        return {name + suffix: part for suffix, part in zip(suffixes, parts, strict=True)}, values

    return encode


MODELOPT = nvfp4(".weight", ".weight_scale", ".weight_scale_2")
CT = nvfp4(".weight_packed", ".weight_scale", ".weight_global_scale", divides=True)


def mxfp4(name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    scale = (2.0 ** torch.randint(-5, -2, (n, k // 32))).to(torch.float8_e8m0fnu)
    codes, values = e2m1(n, k, scale)
    return {f"{name}.weight": codes.view(torch.int8), f"{name}.scale": scale}, values


def quark(name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    """MXFP4 of AMD's Quark, with scales as bytes."""
    tensors, values = mxfp4(name, n, k)
    codes, scale = (t.view(torch.uint8) for t in tensors.values())
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, values


def int4(dtype: torch.dtype = torch.bfloat16) -> Encode:
    def encode(name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        words, scale = (
            torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32),
            (torch.rand(n, k // 32) / 16).bfloat16(),
        )
        values = ((words[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(1) - 8
        parts = {"packed": words, "scale": scale.to(dtype), "shape": torch.tensor([n, k])}
        return {
            f"{name}.weight_{part}": t for part, t in parts.items()
        }, values * scale.float().repeat_interleave(32, 1)

    return encode


def fp8(
    suffix: str, shape: Callable[[int, int], tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> Encode:
    def encode(name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        values, scale = (
            torch.randn(n, k).to(torch.float8_e4m3fn),
            (2.0 ** torch.randint(-4, -1, shape(n, k)).float()).to(dtype),
        )
        return {
            f"{name}.weight": values,
            f"{name}.{suffix}": scale,
        }, values.float() * scale.float().reshape(-1, 1)

    return encode


def fp8_blocks(suffix: str, dtype: torch.dtype = torch.float32) -> Encode:
    """The last blocks may be short."""

    def encode(name: str, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        values, scale = (
            torch.randn(n, k).to(torch.float8_e4m3fn),
            torch.rand(-(-n // 128), -(-k // 128)) / 8,
        )
        scale = (2.0 ** scale.log2().ceil() if dtype == torch.float8_e8m0fnu else scale).to(dtype)
        of_all = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        parts = {f"{name}.weight": values, f"{name}.{suffix}": scale}
        return parts, values.float() * of_all

    return encode


E8M0 = fp8("scale", lambda n, k: (1, 1), torch.float8_e8m0fnu)


def floats(config: Any, where: Path) -> dict[str, Tensor]:
    """The tensors that transformers saves for a random model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.2)
    model.save_pretrained(where)
    return load_file(where / "model.safetensors")


def write(
    where: Path, config: Any, tensors: dict[str, Tensor], quantization: dict[str, Any] | None = None
) -> Path:
    where.mkdir()
    said = json.loads(config.to_json_string(use_diff=False))
    said.pop("quantization_config", None)
    (where / "config.json").write_text(
        json.dumps(said | ({"quantization_config": quantization} if quantization else {}))
    )
    save_file(
        {name: t.contiguous() for name, t in tensors.items()},
        where / "model.safetensors",
        metadata={"format": "pt"},
    )
    return where


def pair(
    tmp_path: Path,
    config: Any,
    quantization: dict[str, Any],
    rules: dict[str, Encode],
    published: bool = False,
) -> tuple[Path, Path]:
    """A directory whose matrices are encoded by the first rule whose pattern is in their name, and
    one with the floats that they mean.
    """
    files, plain = {}, {}
    for name, t in floats(config, tmp_path / "floats").items():
        known = (
            PUBLISHED.get(name.removeprefix("model."), name.removeprefix("model."))
            if published
            else name
        )
        encode = next(
            (rule for pattern, rule in rules.items() if t.dim() == 2 and re.search(pattern, known)),
            None,
        )
        if encode is None or not known.endswith(".weight"):
            files[known] = plain[known] = t
        else:
            made, plain[known] = encode(known.removesuffix(".weight"), *t.shape)
            files |= made
    return write(tmp_path / "encoded", config, files, quantization), write(
        tmp_path / "plain", config, plain
    )


def assert_loads(encoded: Path, plain: Path) -> Any:
    model = from_pretrained(encoded, dtype=torch.float32)
    assert (
        relative(
            logits(model), logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
        )
        <= 1e-5
    )
    return model


def test_deepseek_v4_as_published(tmp_path):
    """Experts in MXFP4, attention in FP8 with E8M0; `wo_a` is a subclass of nn.Linear, and
    `hc_attn_scale` a parameter called `scale`.
    """
    rules = {r"\.experts\.": mxfp4, r"wq_|attn\.wkv|wo_|shared_experts": E8M0}
    model = assert_loads(*pair(tmp_path, V4, BLOCKS, rules, published=True))
    layer = model.model.layers[2]
    assert (type(layer.self_attn.o_a_proj).__name__, type(layer.self_attn.o_b_proj)) == (
        "DeepseekV4GroupedLinear",
        nn.Linear,
    )
    assert isinstance(layer.mlp.experts, PackedModule)


@pytest.mark.slow
@pytest.mark.parametrize("said", [BLOCKS, MIXED], ids=["fp8", "modelopt"])
@pytest.mark.parametrize("suffix", ["scale", "weight_scale_inv"])
def test_nvfp4_experts_beside_fp8_in_blocks(suffix, said, tmp_path):
    rules = {r"\.experts\.": MODELOPT, r"self_attn\..*proj": fp8(suffix, lambda n, k: (1, 1))}
    assert_loads(*pair(tmp_path, QWEN, said, rules))


@pytest.mark.parametrize(
    ("shape", "dtype"), [(lambda n, k: (n, 1), torch.bfloat16), (lambda n, k: (1,), torch.float32)]
)
def test_compressed_tensors_in_mixed_precision(shape, dtype, tmp_path):
    rules = {r"\.experts\.": CT, r"self_attn\..*proj": fp8("weight_scale", shape, dtype)}
    encoded, plain = pair(tmp_path, QWEN, COMPRESSED, rules)
    assert_loads(encoded, plain)
    assert (
        relative(
            *(
                logits(from_pretrained(d, dtype=torch.float32))
                for d in (convert(encoded, tmp_path / "modelopt"), plain)
            )
        )
        <= 1e-5
    )


WHOLE = Qwen3MoeConfig(
    **{**QWEN.to_dict(), "hidden_size": 256, "moe_intermediate_size": 128, "num_key_value_heads": 1}
    | {"head_dim": 64, "num_attention_heads": 4}
)
FLOAT_QUANTIZED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FP8_OF = {
    "DeepSeek-V3": (fp8_blocks("weight_scale_inv"), BLOCKS, "fp8"),
    "Qwen": (fp8_blocks("weight_scale_inv", torch.bfloat16), BLOCKS, "fp8"),
    "DeepSeek-V4": (fp8_blocks("scale", torch.float8_e8m0fnu), BLOCKS, "fp8_e8m0"),
    "channels": (fp8("weight_scale", lambda n, k: (n, 1)), FLOAT_QUANTIZED, "fp8_channel"),
    "rows": (fp8("weight_scale", lambda n, k: (n,)), FLOAT_QUANTIZED, "fp8_channel"),
    "compressed-tensors": (fp8("weight_scale", lambda n, k: (1,)), FLOAT_QUANTIZED, "fp8_tensor"),
    "ModelOpt": (
        fp8("weight_scale", lambda n, k: ()),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "fp8_tensor",
    ),
}


@pytest.mark.parametrize("which", FP8_OF)
def test_fp8_as_it_is(which, tmp_path):
    """Experts and linear layers, of which k_proj has 64 rows; saved, all bytes are those of the
    files.
    """
    encode, said, encoding = FP8_OF[which]
    encoded, plain = pair(tmp_path, WHOLE, said, {r"\.experts\.|self_attn\..*proj": encode})
    model = assert_loads(encoded, plain)
    layer = model.model.layers[1]
    for module in (layer.mlp.experts, layer.self_attn.k_proj, layer.self_attn.o_proj):
        assert module.encoding.name == encoding
    model.save_pretrained(tmp_path / "saved")
    want, got = (load_file(d / "model.safetensors") for d in (encoded, tmp_path / "saved"))
    assert want.keys() == got.keys()
    assert all(same_bytes(t, got[name]) for name, t in want.items())
    assert_loads(tmp_path / "saved", plain)
    made = from_pretrained(encoded, quantization_config=NVFP4Config())
    assert made.model.layers[1].mlp.experts.encoding.name == "nvfp4"


def test_fp8_whose_last_block_is_short(tmp_path):
    """Of K: it is read as it is, or rounded to NVFP4 on request."""
    rules = {r"self_attn\..*proj": fp8_blocks("weight_scale_inv")}
    assert_loads(*pair(tmp_path, QWEN, BLOCKS, rules))
    with_experts = {r"\.experts\.": fp8_blocks("weight_scale_inv")}
    (tmp_path / "more").mkdir()
    config = Qwen3MoeConfig(**{**WHOLE.to_dict(), "moe_intermediate_size": 192})
    encoded, plain = pair(tmp_path / "more", config, BLOCKS, with_experts)
    made = assert_loads(encoded, plain)
    assert made.model.layers[0].mlp.experts.encoding.name == "fp8"
    from_pretrained(encoded, quantization_config=NVFP4Config())


def test_mxfp4_of_compressed_tensors(tmp_path):
    def packed(name, n, k):
        tensors, values = mxfp4(name, n, k)
        codes, scale = (t.view(torch.uint8) for t in tensors.values())
        return {f"{name}.weight_packed": codes, f"{name}.weight_scale": scale}, values

    rules = {r"\.experts\.|self_attn\..*proj": packed}
    said = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    model = assert_loads(*pair(tmp_path, QWEN, said, rules))
    model.save_pretrained(tmp_path / "saved")
    want, again = (
        load_file(tmp_path / name / "model.safetensors") for name in ("encoded", "saved")
    )
    assert {name: t.shape for name, t in want.items()} == {n: t.shape for n, t in again.items()}


def test_mxfp4_of_quark(tmp_path):
    """With attention in it too, and as ModelOpt's form and its own write it again."""
    encoded, plain = pair(tmp_path, QWEN, QUARK, {r"\.experts\.|self_attn": quark})
    model = assert_loads(encoded, plain)
    model.save_pretrained(tmp_path / "saved")
    assert_loads(tmp_path / "saved", plain)
    before, after = (
        load_file(where / "model.safetensors") for where in (encoded, tmp_path / "saved")
    )
    assert all(same_bytes(after[name], t) for name, t in before.items() if t.dtype == torch.uint8)
    for to in ("modelopt", "compressed-tensors", "dense"):
        assert_loads(convert(encoded, tmp_path / to, to), plain)


def test_layers_of_one_name_in_several_schemes(tmp_path):
    rules = {
        r"\.experts\.": MODELOPT,
        r"layers\.0\.self_attn": CT,
        r"layers\.1\.self_attn\.[qk]_proj": int4(),
        r"o_proj": mxfp4,
    }
    model = assert_loads(*pair(tmp_path, QWEN, MIXED, rules))
    first, second = (layer.self_attn for layer in model.model.layers)
    assert (type(first.q_proj), type(second.q_proj), type(second.v_proj)) == (
        QuantizedLinear,
        QuantizedLinear,
        nn.Linear,
    )
    assert (second.q_proj.encoding.name, second.o_proj.encoding.name) == ("int4", "mxfp4")


class ListOfExperts(nn.Module):
    """Experts as the code of repositories has them: one module after the other, in a list."""

    def __init__(self, config: Any):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({n: self._layer(config, n) for n in PROJECTIONS})
            for _ in range(config.num_experts)
        )

    def _layer(self, config: Any, name: str) -> nn.Linear:
        sizes = config.hidden_size, config.moe_intermediate_size
        return nn.Linear(*(sizes[::-1] if name == "down_proj" else sizes), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        made = [
            e["down_proj"](nn.functional.silu(e["gate_proj"](x)) * e["up_proj"](x))
            for e in self.experts
        ]
        return sum(w[..., None] * y for w, y in zip(weights.unbind(-1), made, strict=True))


class RemoteModel(PreTrainedModel):
    config_class = Qwen3MoeConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: Any):
        super().__init__(config)
        self.embed, self.mlp = (
            nn.Embedding(config.vocab_size, config.hidden_size),
            ListOfExperts(config),
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Any:
        return CausalLMOutput(logits=self.head(self.mlp(self.embed(input_ids))))


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("rule", "said"),
    [(int4(), COMPRESSED), (mxfp4, BLOCKS), (MODELOPT, MIXED)],
    ids=["int4", "mxfp4", "nvfp4"],
)
def test_experts_in_a_list_of_modules(rule, said, tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=96, hidden_size=64, moe_intermediate_size=32, num_experts=4)
    files, plain = {}, {}
    for name, t in RemoteModel(config).state_dict().items():
        made, plain[name] = (
            rule(name.removesuffix(".weight"), *t.shape) if ".experts." in name else ({name: t}, t)
        )
        files |= made
    encoded, floats = (
        write(tmp_path / "encoded", config, files, said),
        write(tmp_path / "plain", config, plain),
    )
    model = from_pretrained(encoded, auto_class=RemoteModel, dtype=torch.float32)
    assert all(
        isinstance(layer, QuantizedLinear) for e in model.mlp.experts for layer in e.values()
    )
    assert (
        relative(logits(model), logits(RemoteModel.from_pretrained(floats, dtype=torch.float32)))
        <= 1e-5
    )
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(same_bytes(saved[name], t) for name, t in files.items())
    assert same_parameters(
        from_pretrained(tmp_path / "saved", auto_class=RemoteModel, dtype=torch.float32), model
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_of_integers_in_other_floats(dtype, tmp_path, caplog):
    """Those of float16 are kept; others are rounded to bfloat16, as transformers does in a model in
    bfloat16.
    """
    rules = {r"\.experts\.": int4(dtype), r"q_proj": int4(dtype)}
    encoded, plain = pair(tmp_path, QWEN, COMPRESSED, rules)
    assert_loads(encoded, plain)
    assert ("are rounded to bfloat16" in caplog.text) == (dtype == torch.float32)


def test_matrices_of_other_modules_become_floats(tmp_path):
    """A router is no linear layer: it computes with the numbers of its encoded weight."""
    model = assert_loads(
        *pair(tmp_path, QWEN, MIXED, {r"\.experts\.": MODELOPT, r"mlp\.gate\.": MODELOPT})
    )
    assert type(model.model.layers[0].mlp.gate).__name__ == "Qwen3MoeTopKRouter"


def test_an_encoded_embedding_is_not_supported(tmp_path):
    encoded, _ = pair(tmp_path, QWEN, MIXED, {r"\.experts\.": MODELOPT, "embed_tokens": MODELOPT})
    with pytest.raises(
        UnsupportedError,
        match=r"model.embed_tokens in ModelOpt NVFP4, of a "
        r"Embedding; expected experts of a known class",
    ):
        from_pretrained(encoded)


# Within a layer -----------------------------------------------------------------------------------

FP8_ROWS = fp8("weight_scale", lambda n, k: (n, 1))
WITHIN: dict[str, dict[str, Encode]] = {
    "an expert in floats": {r"\.experts\.[012]\.": MODELOPT},
    "the first expert in floats": {r"\.experts\.[123]\.": MODELOPT},
    "one matrix in floats": {r"experts\.(?!2\.up)": MODELOPT},
    "a projection in floats": {r"experts\.\d\.(gate|up)": MODELOPT},
    "a projection in FP8": {r"experts\.\d\.down": FP8_ROWS, r"\.experts\.": MODELOPT},
    "a matrix in INT4": {r"experts\.1\.gate": int4(), r"\.experts\.": MODELOPT},
    "gate and up in two formats": {r"gate_proj": CT, r"up_proj": mxfp4, r"\.experts\.": MODELOPT},
    "scales of matrices and of rows": {
        r"experts\.1\.": FP8_ROWS,
        r"\.experts\.": fp8("weight_scale", lambda n, k: ()),
    },
}


@pytest.mark.parametrize("rules", WITHIN.values(), ids=WITHIN)
def test_several_formats_within_a_layer(rules, tmp_path, caplog):
    """Each matrix by its own parts. Layers in one format stay encoded."""
    rules = {rf"layers\.0.*{pattern}": rule for pattern, rule in rules.items()}
    encoded, plain = pair(tmp_path, QWEN, MIXED, rules | {r"layers\.1.*\.experts\.": MODELOPT})
    model = assert_loads(encoded, plain)
    assert [isinstance(layer.mlp.experts, PackedModule) for layer in model.model.layers] == [
        False,
        True,
    ]
    assert "layers.0.mlp.experts: experts in several formats become float32" in caplog.text
    again = from_pretrained(plain, dtype=torch.float32).model.layers[0].mlp.experts
    for name, p in model.model.layers[0].mlp.experts.named_parameters():
        assert torch.equal(p, again.get_parameter(name))
    model.save_pretrained(tmp_path / "saved")
    assert same_parameters(from_pretrained(tmp_path / "saved", dtype=torch.float32), model)
    dense = convert(encoded, tmp_path / "dense", "dense")
    assert all(
        torch.equal(t.float(), load_file(plain / "model.safetensors")[name])
        for name, t in load_file(dense / "model.safetensors").items()
    )


@pytest.mark.parametrize("name", ["an expert in floats", "a projection in FP8"])
def test_all_of_a_layer_in_the_format_that_is_asked_for(name, tmp_path):
    """What has it keeps its bytes."""
    encoded, _ = pair(tmp_path, QWEN, MIXED, WITHIN[name])
    model = from_pretrained(encoded, dtype=torch.float32, quantization_config=NVFP4Config())
    written = quantize(encoded, tmp_path / "written")
    source, found = (load_file(where / "model.safetensors") for where in (encoded, written))
    assert all(
        same_bytes(found[n], t) for n, t in source.items() if n.endswith(("scale_2", "norm.weight"))
    )
    kept = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert same_bytes(found[kept], source[kept])
    quantized = from_pretrained(written, dtype=torch.float32)
    assert all(isinstance(layer.mlp.experts, PackedModule) for layer in model.model.layers)
    assert same_parameters(model, quantized)


def test_one_expert_in_floats_of_a_family_with_rows_in_turns_and_biases(tmp_path):
    path = copied("ct-gpt_oss", tmp_path)
    opened = Directory.open(path)
    weights = weights_in(opened)

    def in_floats(tensors):
        for name in [name for name in weights if ".experts.1." in name]:
            for entry in weights[name].entries.values():
                del tensors[entry.name]
            tensors[f"{name}.weight"] = weights[name].floats(opened.read)

    change(path, in_floats)
    model = from_pretrained(path, dtype=torch.float32)
    assert not isinstance(model.model.layers[0].mlp.experts, PackedModule)
    assert relative(logits(model), logits(plain_model(MADE / "ct-gpt_oss"))) <= 1e-5


# Parts of several weights -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "rule", "suffix", "at"),
    [
        (r"\.experts\.", MODELOPT, "weight_scale_2", r"\.\d+(?=\.\w+_proj$)"),
        (r"\.experts\.", MODELOPT, "weight_scale_2", r"\.\d+\.\w+_proj$"),
        (r"\.experts\.", CT, "weight_global_scale", r"\.\d+\.\w+_proj$"),
        (r"self_attn\.[qkv]_proj", MODELOPT, "weight_scale_2", r"\.[qkv]_proj$"),
    ],
)
def test_one_scale_of_several_weights(pattern, rule, suffix, at, tmp_path):
    encoded, plain = pair(tmp_path, QWEN, MIXED, {pattern: rule})
    names = list(weights_in(Directory.open(encoded)))

    def share(tensors):
        for name in names:
            tensors[f"{re.sub(at, '', name)}.{suffix}"] = tensors.pop(f"{name}.{suffix}")

    assert_loads(change(encoded, share), plain)
    assert list(weights_in(Directory.open(encoded))) == names
    for to in ("dense", "modelopt"):
        assert_loads(convert(encoded, tmp_path / to, to), plain)


def test_a_table_in_shards_with_one_scale(tmp_path, monkeypatch):
    """As n-gram embeddings are published: transformers joins the shards."""
    text = {
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 200,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
    }
    for key, value in text.items():
        monkeypatch.setitem(FAMILIES["qwen4_exp"][1]["text_config"], key, value)
    model = tiny("qwen4_exp")
    model.save_pretrained(tmp_path / "floats")
    tensors = load_file(tmp_path / "floats" / "model.safetensors")
    shards = [name for name in tensors if ".ngram_embedding.shard_" in name]
    assert len(shards) == 4
    scale = torch.tensor([0.0078125 / 3])
    files, plain = dict(tensors), dict(tensors)
    for name in shards:
        files[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        plain[name] = files[name].float() * scale
    files[shards[0].partition(".shard_")[0] + ".weight_scale"] = scale
    encoded = write(tmp_path / "encoded", model.config, files, MIXED)
    want = write(tmp_path / "plain", model.config, plain)
    loaded, of_plain = (from_pretrained(p, dtype=torch.float32) for p in (encoded, want))
    assert same_parameters(loaded, of_plain)
    loaded.save_pretrained(tmp_path / "saved")
    assert same_parameters(from_pretrained(tmp_path / "saved", dtype=torch.float32), loaded)


# Scales that are the wrong way round --------------------------------------------------------------


DIVISOR = (
    ".weight_global_scale",
    "as a divisor makes the largest weight .* expected at most 2688; is it stored as a multiplier",
)
MULTIPLIER = (
    ".weight_scale_2",
    "as a multiplier makes the largest weight .* expected at most 2688; is it stored as a divisor",
)
EIGHT_BIT = (
    ".weight_scale",
    "as a multiplier makes the largest weight .* expected at most 448; is it stored as a divisor",
)


@pytest.mark.parametrize(
    ("where", "said", "rule", "inverted"),
    [
        (r"\.experts\.", COMPRESSED, CT, DIVISOR),
        (r"\.experts\.", MIXED, MODELOPT, MULTIPLIER),
        ("self_attn", COMPRESSED, CT, DIVISOR),
        ("self_attn", MIXED, MODELOPT, MULTIPLIER),
        ("self_attn", MIXED, fp8("weight_scale", lambda n, k: (1,)), EIGHT_BIT),
    ],
)
def test_a_divisor_for_a_multiplier_is_found_by_whatever_reads_it(
    where, said, rule, inverted, tmp_path
):
    suffix, found = inverted
    encoded, _ = pair(tmp_path, QWEN, said, {where: rule})
    tensors = load_file(encoded / "model.safetensors")
    name = next(name for name in tensors if re.search(where, name) and name.endswith(suffix))
    tensors[name] = 1 / tensors[name]
    save_file(tensors, encoded / "model.safetensors", metadata={"format": "pt"})
    opened = Directory.open(encoded)
    reads = {
        "check_scales": lambda: check_scales(
            opened, stored_weights(opened.tensors, method_of(opened.quantization))
        ),
        "from_pretrained": lambda: from_pretrained(encoded),
        "convert": lambda: convert(encoded, tmp_path / "converted"),
        "dense": lambda: convert(encoded, tmp_path / "converted", "dense"),
        "quantize": lambda: quantize(encoded, tmp_path / "quantized"),
    }
    for what, read in reads.items():
        # it refuses experts that are quantized already
        if what != "quantize" or where == "self_attn":
            with pytest.raises(CheckpointError, match=found):
                read()
