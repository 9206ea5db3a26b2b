"""Writes the directories of tests/checkpoints/made: tiny random models, quantized and saved by
other people's packages.

    .venv/bin/python tools/make_checkpoints.py modelopt            nvidia-modelopt's
        export_hf_checkpoint
    .venv/bin/python tools/make_checkpoints.py transformers        save_pretrained: bf16, MXFP4 of
        gpt-oss
    /tmp/ct/bin/python tools/make_checkpoints.py llm-compressor    compressed-tensors; in an
        environment of its own:
        python -m venv /tmp/ct && /tmp/ct/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
            transformers==5.17.0

    /tmp/others/bin/python tools/make_checkpoints.py others        auto-round's quantize_and_save;
        matrices packed by autoawq, compressed-tensors and bitsandbytes; in an environment of its
        own: transformers, auto-round==0.16.1, autoawq==0.2.9, bitsandbytes==0.50.2,
        compressed-tensors==0.20.1

`--out DIR` writes elsewhere, `--only NAME` one directory. Not reproducible to the byte: calibration
and safetensors' order are theirs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 32,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"],
        "sliding_window": 16,
    },
    "qwen3_5_moe_text": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "gemma4_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "enable_moe_block": True,
        "layer_types": ["full_attention"],
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 32,
        "num_kv_shared_layers": 0,
    },
    "nemotron_h": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "hybrid_override_pattern": "E*",
        "layers_block_type": ["moe", "attention"],
        "num_hidden_layers": 2,
        "mamba_num_heads": 2,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def model_of(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A random causal language model of a family, with weights as large as trained ones have.
    changes: of its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **changes}), dtype=dtype
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.1)
    model.config.architectures = [type(model).__name__]
    return model.eval()


# nvidia-modelopt ----------------------------------------------------------------------------------


def modelopt(family: str, config: str | dict[str, Any]) -> Callable[[Path], None]:
    """What export_hf_checkpoint writes of a calibrated model."""

    def write(out: Path) -> None:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        model = model_of(family)
        inputs = [torch.randint(3, SMALL["vocab_size"], (2, 16)) for _ in range(8)]

        def calibrate(model: Any) -> None:
            with torch.no_grad():
                for x in inputs:
                    model(x)

        chosen = getattr(mtq, config) if isinstance(config, str) else config
        with torch.no_grad():
            export_hf_checkpoint(
                mtq.quantize(model, chosen, calibrate), dtype=torch.bfloat16, export_dir=out
            )

    return write


def mixed() -> dict[str, Any]:
    """NVFP4 weights, and attention in FP8 per tensor: what ModelOpt calls MIXED_PRECISION."""
    import copy

    import modelopt.torch.quantization as mtq

    made = copy.deepcopy(mtq.W4A16_NVFP4_CFG)
    fp8 = {"num_bits": (4, 3), "axis": None}
    made["quant_cfg"][2:2] = [
        {"quantizer_name": f"*{part}*{of}_quantizer", "cfg": fp8}
        for part in ("linear_attn", "self_attn")
        for of in ("weight", "input")
    ]
    return made


def modelopt_mixed(out: Path) -> None:
    """Its configuration needs ModelOpt, so it is made when it is asked for."""
    modelopt("qwen3_5_moe_text", mixed())(out)


# transformers -------------------------------------------------------------------------------------


def bf16(family: str, **options: Any) -> Callable[[Path], None]:
    """What save_pretrained writes."""
    return lambda out: model_of(family).save_pretrained(out, **options)


def mxfp4_gpt_oss(out: Path) -> None:
    """The experts of gpt-oss as OpenAI published them, `_blocks` and `_scales`, by numpy:
    transformers quantizes to MXFP4 on GPUs only.
    """
    import ml_dtypes
    import numpy as np
    from safetensors.torch import load_file, save_file

    model_of("gpt_oss").save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        w = tensors.pop(name).float().mT.contiguous().numpy()  # [E, N, K]
        blocks = w.reshape(*w.shape[:2], -1, 32)
        exponent = np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2
        codes = np.clip(blocks / 2**exponent, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(
            np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)
        )
        tensors[f"{name}_scales"] = torch.from_numpy((exponent[..., 0] + 127).astype(np.uint8))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    plain = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# llm-compressor -----------------------------------------------------------------------------------


def compressed(family: str, **recipe: Any) -> Callable[[Path], None]:
    """What llm-compressor's oneshot leads save_pretrained to write. It wants a model that came from
    a directory.
    """

    def write(out: Path) -> None:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as plain:
            model_of(family).save_pretrained(plain)
            model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
            ignore = ["lm_head", "re:.*mlp.gate$", "re:.*router.*", "re:.*block_sparse_moe.gate$"]
            oneshot(model=model, recipe=QuantizationModifier(ignore=ignore, **recipe))
            model.save_pretrained(out, save_compressed=True)

    return write


NVFP4A16: dict[str, Any] = {"targets": "Linear", "scheme": "NVFP4A16"}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
# as Kimi-K2-Thinking has it
INT4: dict[str, Any] = {
    "config_groups": {"group_0": {"targets": ["re:.*experts.*"], "weights": _INT4}}
}

# others -------------------------------------------------------------------------------------------

# attention and experts with matrices of at least one group of 128
_OF_GROUPS = {"hidden_size": 128, "num_attention_heads": 4, "moe_intermediate_size": 128}


def auto_round(**options: Any) -> Callable[[Path], None]:
    """What AutoRound writes that rounds to nearest."""

    def write(out: Path) -> None:
        from auto_round import AutoRound
        from tokenizers import Tokenizer, models
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        words = {f"t{i}": i for i in range(SMALL["vocab_size"])}
        of_words = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_words, unk_token="t0")
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as written:
            model_of("qwen3_moe", **_OF_GROUPS).save_pretrained(plain)
            model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
            made = AutoRound(model, tokenizer, bits=4, iters=0, disable_opt_rtn=True, **options)
            made.quantize_and_save(written, format="auto_round")
            (folder,) = (file.parent for file in Path(written).rglob("config.json"))
            for name in ("config.json", "generation_config.json", "model.safetensors"):
                shutil.copy(folder / name, out / name)

    return write


Packed = dict[str, torch.Tensor]  # the tensors of a weight, by suffix


def packed_by(
    pack: Callable[[torch.Tensor], Packed], config: dict[str, Any]
) -> Callable[[Path], None]:
    """A model whose linear layers, but for routers and the head, are packed one by one."""

    def write(out: Path) -> None:
        from safetensors.torch import load_file, save_file

        model_of("qwen3_moe", **_OF_GROUPS).save_pretrained(out)
        tensors = load_file(out / "model.safetensors")
        for name in [name for name in tensors if "_proj.weight" in name]:
            packed = pack(tensors.pop(name))
            base = name.removesuffix(".weight")
            tensors |= {base + suffix: t.contiguous() for suffix, t in packed.items()}
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        said = json.loads((out / "config.json").read_text()) | {"quantization_config": config}
        (out / "config.json").write_text(json.dumps(said, indent=2) + "\n")

    return write


def by_autoawq(weight: torch.Tensor) -> Packed:
    """AWQ without its search for scales of activations."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer

    rounding = AwqQuantizer.__new__(AwqQuantizer)
    rounding.group_size, rounding.w_bit, rounding.zero_point = 128, 4, True
    linear = torch.nn.Linear(*weight.shape[::-1], bias=False)
    linear.weight.data, scales, zeros = rounding.pseudo_quantize_tensor(weight.float())
    made = WQLinear_GEMM.from_linear(linear, 4, 128, False, scales.t(), zeros.t())
    return {f".{name}": t for name, t in made.state_dict().items()}


def by_bitsandbytes(weight: torch.Tensor) -> Packed:
    """NF4 with scales that are quantized themselves."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    parts = {f".weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    return {".weight": codes, **parts}


def bitsandbytes(out: Path) -> None:
    """What save_pretrained writes of a model that transformers loaded in NF4: linear layers alone
    are quantized, experts are not.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as plain:
        model_of("qwen3_moe", **_OF_GROUPS).save_pretrained(plain)
        config = BitsAndBytesConfig(load_in_4bit=True, **NF4)
        AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=config, device_map="cpu", dtype=torch.bfloat16
        ).save_pretrained(out)


def by_compressed_tensors(**weights: Any) -> Callable[[torch.Tensor], Packed]:
    """compressed-tensors' `pack-quantized`."""

    def pack(weight: torch.Tensor) -> Packed:
        from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(**weights)
        groups = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        made = PackedQuantizationCompressor.compress(state, scheme)
        return {f".{name}": t for name, t in made.items()}

    return pack


def compressed_config(**weights: Any) -> dict[str, Any]:
    """What llm-compressor's config.json says of such a model."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


W4A16_ASYM: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": False,
    "strategy": "group",
    "group_size": 128,
}
W8A16: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["gate"],
}

NF4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}

MADE: dict[str, dict[str, Callable[[Path], None]]] = {
    "modelopt": {
        "modelopt-qwen3_moe": modelopt("qwen3_moe", "NVFP4_DEFAULT_CFG"),
        "modelopt-mixtral": modelopt("mixtral", "NVFP4_DEFAULT_CFG"),
        "modelopt-deepseek_v3-w4a16": modelopt("deepseek_v3", "W4A16_NVFP4_CFG"),
        "modelopt-llama4_text": modelopt("llama4_text", "NVFP4_DEFAULT_CFG"),
        "modelopt-gpt_oss": modelopt("gpt_oss", "NVFP4_DEFAULT_CFG"),
        "modelopt-nemotron_h": modelopt("nemotron_h", "NVFP4_DEFAULT_CFG"),
        "modelopt-qwen3_5_moe-mixed": modelopt_mixed,
    },
    "transformers": {
        "bf16-qwen3_moe": bf16("qwen3_moe", max_shard_size="30KB"),
        "mxfp4-gpt_oss": mxfp4_gpt_oss,
    },
    "llm-compressor": {
        "ct-qwen3_moe": compressed("qwen3_moe", **NVFP4A16),
        "ct-mixtral": compressed("mixtral", **NVFP4A16),
        "ct-gpt_oss": compressed("gpt_oss", **NVFP4A16),
        "ct-qwen3_moe-int4": compressed("qwen3_moe", **INT4),
    },
    "others": {
        "auto_round-gptq": auto_round(group_size=128, sym=True),
        "auto_round-awq": auto_round(group_size=64, sym=False),
        "awq-qwen3_moe": packed_by(by_autoawq, AWQ),
        "bnb-qwen3_moe": packed_by(
            by_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True, **NF4}
        ),
        "bnb-qwen3_moe-linear": bitsandbytes,
        "ct-qwen3_moe-w4a16_asym": packed_by(
            by_compressed_tensors(**W4A16_ASYM), compressed_config(**W4A16_ASYM)
        ),
        "ct-qwen3_moe-w8a16": packed_by(by_compressed_tensors(**W8A16), compressed_config(**W8A16)),
    },
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("by", choices=list(MADE))
    parser.add_argument("--out", type=Path, default=Path("tests/checkpoints/made"))
    parser.add_argument("--only")
    given = parser.parse_args()
    for name, write in MADE[given.by].items():
        if given.only in (None, name):
            shutil.rmtree(given.out / name, ignore_errors=True)
            (given.out / name).mkdir(parents=True)
            write(given.out / name)
            print(
                f"{name}: {sum(f.stat().st_size for f in (given.out / name).iterdir())} bytes",
                flush=True,
            )


if __name__ == "__main__":
    main()
