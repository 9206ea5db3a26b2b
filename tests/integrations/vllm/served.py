"""Directories to serve, the environment of vLLM's processes, and the judge: transformers' model of
what a directory's bytes mean.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from files import MADE
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusion_moe import encodings
from fusion_moe.checkpoints import convert, quantize

DEMO = Path(__file__).resolve().parents[3] / "examples" / "tiny_qwen3_moe"
ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def float_demo(folder: Path) -> Path:
    """The demo model, which nobody quantized; in the folder "dense", the same."""
    shutil.copytree(DEMO, folder / "dense")
    return DEMO


def float_gpt_oss(folder: Path) -> Path:
    """A small gpt-oss in floats, whose rows of gate and up take turns."""
    return convert(MADE / "mxfp4-gpt_oss", folder / "dense", to="dense", dtype=torch.bfloat16)


def modelopt_demo(folder: Path) -> Path:
    """The demo model with experts in ModelOpt's NVFP4."""
    return quantize(DEMO, folder / "modelopt")


def mixed_demo(folder: Path) -> Path:
    """The same, where ModelOpt names a format for each layer that has one."""
    made = modelopt_demo(folder)
    config = json.loads((made / "config.json").read_text())
    names = load_file(made / "model.safetensors")
    held = [name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")]
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {name: {"quant_algo": "NVFP4", "group_size": 16} for name in held},
        "ignore": config["quantization_config"]["ignore"],
    }
    (made / "config.json").write_text(json.dumps(config))
    (made / "hf_quant_config.json").unlink()
    return made


def compressed_tensors_demo(folder: Path) -> Path:
    """The same in the form of compressed-tensors: other names, and a divisor in place of the decode
    scale.
    """
    made = folder / "compressed-tensors"
    shutil.copytree(modelopt_demo(folder), made)
    tensors = load_file(made / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
        layer = name.removesuffix(".weight_scale_2")
        tensors[f"{layer}.weight_global_scale"] = tensors.pop(name).reciprocal().reshape(1)
        tensors[f"{layer}.weight_packed"] = tensors.pop(f"{layer}.weight")
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    (made / "hf_quant_config.json").unlink()
    config = json.loads((made / "config.json").read_text())
    written = json.loads((MADE / "ct-qwen3_moe" / "config.json").read_text())["quantization_config"]
    config["quantization_config"] = written | {"ignore": config["quantization_config"]["ignore"]}
    (made / "config.json").write_text(json.dumps(config))
    return made


def mixed_precision_demo(folder: Path) -> Path:
    """The same with attention in FP8, a scale for each row, and the last layer's experts in INT8;
    beside it "dense", what it means in bfloat16.
    """
    made = compressed_tensors_demo(folder)
    dense = convert(made, folder / "dense", to="dense")
    meant, tensors = load_file(dense / "model.safetensors"), load_file(made / "model.safetensors")
    for name in [name for name in meant if re.search(r"_proj\.weight$", name)]:
        last = ".layers.3.mlp.experts." in name
        if not last and "self_attn" not in name:
            continue
        dtype, largest = (torch.int8, 127) if last else (torch.float8_e4m3fn, 448)
        scale = (meant[name].float().abs().amax(1, keepdim=True) / largest).bfloat16()
        values = meant[name].float() / scale.float()
        values = (values.round() if last else values).clamp(-largest, largest).to(dtype)
        for part in ("packed", "global_scale", "scale"):
            tensors.pop(f"{name}_{part}", None)
        tensors |= {name: values, f"{name}_scale": scale}
        meant[name] = (values.float() * scale.float()).bfloat16()
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    save_file(meant, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    written = config["quantization_config"]
    (group,) = written["config_groups"].values()
    rows = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    tokens = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    groups = {
        "group_0": _group("re:.*self_attn.*_proj$", "float", "float-quantized", rows, tokens),
        "group_1": _group(r"re:.*layers\.3\.mlp\.experts.*", "int", "int-quantized", rows, tokens),
        "group_2": group | {"targets": ["re:.*mlp.experts.*"], "format": written["format"]},
    }
    written |= {"format": "mixed-precision", "config_groups": groups}
    written["ignore"] = ["lm_head", "re:.*mlp.gate$"]
    (made / "config.json").write_text(json.dumps(config))
    return made


def _group(target: str, kind: str, named: str, rows: Any, tokens: Any) -> dict[str, Any]:
    weights, activations = rows | {"type": kind}, tokens | {"type": kind}
    return {
        "targets": [target],
        "weights": weights,
        "input_activations": activations,
        "format": named,
    }


def mxfp4_demo(folder: Path) -> Path:
    """The demo model with experts in the MXFP4 of compressed-tensors; beside it "dense", the same
    numbers in bfloat16.
    """
    made, dense = folder / "mxfp4", folder / "dense"
    shutil.copytree(DEMO, dense)
    tensors = load_file(dense / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        weight = encodings.quantize(packed.pop(name), encoding=encodings.MXFP4)
        tensors[name] = encodings.dequantize(weight).bfloat16()
        packed[f"{name}_packed"], packed[f"{name}_scale"] = (
            part.view(torch.uint8) for part in weight
        )
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    shutil.copytree(dense, made)
    save_file(packed, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
    }
    written = {
        "format": "mxfp4-pack-quantized",
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights | {"scale_dtype": "torch.uint8"},
        "format": written["format"],
    }
    written |= {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": written}))
    return made


def mxfp4_alone_demo(folder: Path) -> Path:
    """The same by `quant_method: mxfp4`, as vLLM reads it of other models than gpt-oss."""
    made = mxfp4_demo(folder)
    tensors = load_file(made / "model.safetensors")
    save_file(
        {name.replace(".weight_packed", ".weight"): t for name, t in tensors.items()},
        made / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    return made


_OTHERS = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]


def fp8_demo(folder: Path) -> Path:
    """The demo model with experts in FP8 of `quant_method: fp8`, with scales for 128 x 128; beside
    it "dense", what they mean.
    """
    names = [f"model.layers.{i}.{at}" for i in range(4) for at in ("self_attn", "mlp.gate")]
    names = [f"{n}.{p}_proj" for n in names if "attn" in n for p in "qkvo"] + names[1::2]
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    said |= {"activation_scheme": "dynamic", "modules_to_not_convert": [*names, "lm_head"]}
    return _fp8(folder, encodings.FP8, "weight_scale_inv", said)


def fp8_modelopt_demo(folder: Path) -> Path:
    """The same in ModelOpt's FP8: a scale for each matrix, and one for its activations."""
    said = {"quant_method": "modelopt", "quant_algo": "FP8"}
    said |= {"ignore": ["lm_head", "*self_attn*", "*mlp.gate"]}
    return _fp8(folder, encodings.FP8_TENSOR, "weight_scale", said, "input_scale")


def fp8_channels_demo(folder: Path) -> Path:
    """The same in compressed-tensors' FP8: a scale for each row."""
    rows = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    tokens = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    said |= {"quantization_status": "compressed", "ignore": _OTHERS}
    group = _group("Linear", "float", "float-quantized", rows, tokens)
    return _fp8(
        folder, encodings.FP8_CHANNEL, "weight_scale", said | {"config_groups": {"group_0": group}}
    )


def _fp8(
    folder: Path, encoding: encodings.Encoding, suffix: str, said: dict[str, Any], *inputs: str
) -> Path:
    made, dense = folder / "fp8", folder / "dense"
    shutil.copytree(DEMO, dense)
    tensors = load_file(dense / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        weight = encodings.quantize(tensors[name], encoding=encoding)
        tensors[name], (packed[name], scale) = encodings.dequantize(weight), weight
        below = name.removesuffix("weight")
        packed[below + suffix] = scale[::128] if encoding == encodings.FP8 else scale
        packed |= {below + one: torch.tensor(0.5) for one in inputs}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    shutil.copytree(dense, made)
    save_file(
        {n: t.contiguous() for n, t in packed.items()}, made / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return made


def gemma4(folder: Path) -> Path:
    """A small Gemma 4, whose experts have GELU by tanh, in ModelOpt's NVFP4, which has all of their
    numbers; beside it "dense".
    """
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=32,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=64,
    )
    model = Gemma4ForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape) * 0.1
        if ".experts." in name:
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(8, values.shape)]
            values[..., ::16] = -6  # the largest of each block
            values /= 32
        parameter.data.copy_(values if parameter.dim() > 1 else 1 + values)
    model.save_pretrained(folder / "dense")
    return quantize(folder / "dense", folder / "gemma4")


def gpt_oss_between_two(folder: Path) -> Path:
    """gpt-oss with each head of keys and values twice, since vLLM gives each rank heads of its own;
    and with three blocks of features.
    """
    made = folder / "gpt-oss"
    shutil.copytree(MADE / "mxfp4-gpt_oss", made)
    tensors = load_file(made / "model.safetensors")
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            tensors[name] = tensors[name].repeat(2, *[1] * (tensors[name].dim() - 1))
        elif ".experts.gate_up_proj_" in name:
            # rows of gate and up interleaved
            tensors[name] = torch.cat([tensors[name], tensors[name][:, :64]], 1)
        elif name.endswith((".experts.down_proj_blocks", ".experts.down_proj_scales")):
            tensors[name] = torch.cat([tensors[name], tensors[name][:, :, :1]], 2)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(
        json.dumps(config | {"num_key_value_heads": 2, "intermediate_size": 96})
    )
    return made


def deepseek_v3(folder: Path) -> Path:
    """DeepSeek-V3 with all linear layers in ModelOpt's W4A16_NVFP4, as transformers writes its
    configuration: without `topk_method`. vLLM's attention takes only this rank of keys and values
    on CPUs, and only some widths of heads on GPUs.
    """
    import transformers

    made, dense = folder / "v3", folder / "dense"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes |= {"num_hidden_layers": 2, "first_k_dense_replace": 1, "q_lora_rank": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 512}
    sizes |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 96}
    config = transformers.DeepseekV3Config(**sizes, max_position_embeddings=64)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, t in model.state_dict().items():
        if t.dim() > 1 or "bias" in name:
            t.normal_(std=0.1)
    model.save_pretrained(dense)
    tensors, files = load_file(dense / "model.safetensors"), {}
    for name, weight in tensors.items():
        if name.endswith(("_proj.weight", "_with_mqa.weight")):
            encoded = encodings.quantize(weight, encoding=encodings.NVFP4)
            for suffix, part in zip(("", "_scale", "_scale_2"), encoded, strict=True):
                files[name + suffix] = part
            tensors[name] = encodings.dequantize(encoded)
        else:
            files[name] = weight.bfloat16()
            tensors[name] = files[name].float()
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    made.mkdir()
    save_file(files, made / "model.safetensors", {"format": "pt"})
    entries = json.loads((dense / "config.json").read_text())
    written = json.loads((MADE / "modelopt-deepseek_v3-w4a16" / "config.json").read_text())
    quantization = written["quantization_config"] | {
        "ignore": ["lm_head", "model.layers.1.mlp.gate"]
    }
    entries |= {"quantization_config": quantization, "dtype": "bfloat16"}
    (made / "config.json").write_text(json.dumps(entries))
    return made


def with_mtp(directory: Path) -> Path:
    """The same with a layer for multi-token prediction: the last one again, with what goes in
    before it, and the embeddings and the output layer once more, in floats.
    """
    config = json.loads((directory / "config.json").read_text())
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    tensors, added = load_file(directory / "model.safetensors"), f"model.layers.{last + 1}."
    for name in [name for name in tensors if name.startswith(f"model.layers.{last}.")]:
        tensors[name.replace(f"model.layers.{last}.", added)] = tensors[name].clone()
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors |= {f"{added}{norm}.weight": ones.clone() for norm in ("enorm", "hnorm")}
    tensors[f"{added}shared_head.norm.weight"] = ones
    tensors[f"{added}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{added}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    joined = torch.eye(hidden).repeat(1, 2) * 0.5
    tensors[f"{added}eh_proj.weight"] = joined.bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    floats = [f"{added}{name}" for name in ("mlp.gate", "eh_proj", "shared_head.head")]
    config["quantization_config"]["ignore"] += floats
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    return directory


_V4_LINEAR = re.compile(r"(wq_[ab]|attn\.wkv|wo_[ab]|shared_experts\.w[123])\.weight$")


def deepseek_v4(folder: Path) -> Path:
    """DeepSeek-V4 as published: experts in MXFP4, FP8 in blocks of 128 x 128, the published names
    and entries of config.json; with the only numbers of experts that vLLM's kernels for CPUs take.
    A hash chooses the experts of the first layer, and most values reach the limit.
    """
    import transformers

    made, dense = folder / "v4", folder / "dense"
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128, "vocab_size": 96}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2, "o_groups": 2, "o_lora_rank": 128}
    sizes |= {"n_routed_experts": 256, "num_experts_per_tok": 6, "index_n_heads": 2}
    entries = sizes | {"num_hash_layers": 1, "compress_ratios": [0, 4, 128], "sliding_window": 8}
    entries |= {"qk_rope_head_dim": 64, "swiglu_limit": 1.0, "max_position_embeddings": 4096}
    config = transformers.DeepseekV4Config(**entries)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    table = model.get_buffer("model.layers.0.mlp.gate.tid2eid")
    table.copy_(torch.rand(table.shape[0], 256).argsort(1)[:, : table.shape[1]])
    model.save_pretrained(dense)
    tensors, files = load_file(dense / "model.safetensors"), {}
    for full, weight in tensors.items():
        # transformers calls these otherwise than the published files
        name = full.removeprefix("model.").replace("attn.norm.", "attn.kv_norm.")
        name = name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        scale = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            codes, files[scale] = encoded = encodings.quantize(weight, encoding=encodings.MXFP4)
            files[name], tensors[full] = codes.view(torch.int8), encodings.dequantize(encoded)
        elif _V4_LINEAR.search(name):
            files[name], files[scale], tensors[full] = _fp8_blocks(weight)
        elif "hc_" in name or weight.dtype != torch.float32 or "weight" not in name:
            files[name] = weight
        else:
            files[name] = weight.bfloat16()
            tensors[full] = files[name].float()
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    made.mkdir()
    save_file(files, made / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    quantization |= {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    entries = config.to_dict() | entries | {"topk_method": "noaux_tc", "expert_dtype": "fp4"}
    for name in ("layer_types", "mlp_layer_types", "compress_rates"):  # transformers' own
        del entries[name]
    entries |= {"rope_scaling": {"rope_type": "default"}, "dtype": "bfloat16"}
    entries |= {"architectures": ["DeepseekV4ForCausalLM"], "quantization_config": quantization}
    (made / "config.json").write_text(json.dumps(entries))
    return made


def _fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 [N, K], a power of two for each block, and what they mean; N, K multiples of 128."""
    blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = 2.0 ** (blocks.abs().amax((1, 3), keepdim=True) / 448).log2().ceil()
    values = (blocks / scale).to(torch.float8_e4m3fn)
    meant = (values.float() * scale).reshape(weight.shape)
    return values.reshape(weight.shape), scale[:, 0, :, 0].to(torch.float8_e8m0fnu), meant


def adapter_of(model: Any, folder: Path, seed: int, attention: bool = False, rank: int = 8) -> Path:
    """A random adapter of experts, of attention too if asked, in PEFT's files, with factors for
    each expert as vLLM wants them; merged into the model, which is transformers'.
    """
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()

    def add(weight: torch.Tensor, name: str) -> None:
        (n, k), where = weight.shape, f"base_model.model.{name}"
        a = tensors[f"{where}.lora_A.weight"] = torch.randn(rank, k, generator=generator) * k**-0.5
        b = tensors[f"{where}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * 0.2
        weight += 0.5 * b @ a

    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            at = f"model.layers.{i}"
            for name in ("q_proj", "o_proj") if attention else ():
                add(getattr(layer.self_attn, name).weight, f"{at}.self_attn.{name}")
            experts = layer.mlp.experts
            for e, (up, down) in enumerate(
                zip(experts.gate_up_proj, experts.down_proj, strict=True)
            ):
                gate, value = up.chunk(2)
                for name, weight in ("gate", gate), ("up", value), ("down", down):
                    add(weight, f"{at}.mlp.experts.{e}.{name}_proj")
    made = folder / f"adapter-{seed}"
    made.mkdir()
    save_file(tensors, made / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 2, "target_modules": ["experts"]}
    (made / "adapter_config.json").write_text(json.dumps(config))
    return made


def judged(
    directory: Path, folder: Path, prompts: list[list[int]], dtype: torch.dtype = torch.float32
) -> tuple[Any, list[list[float]]]:
    """transformers' model of a directory, and the log-probabilities of the tokens of prompts but
    the first.
    """
    import transformers

    import fusion_moe.transformers

    if directory.name == "ct-gpt_oss":  # its experts' names are not those of the model
        model = fusion_moe.transformers.from_pretrained(directory, dtype=dtype)
    else:
        dense = folder / "dense"
        if not dense.exists():
            convert(directory, dense, to="dense")
        model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=dtype)
    return model, [log_probabilities(model, prompt) for prompt in prompts]


def log_probabilities(model: Any, tokens: list[int]) -> list[float]:
    """Of each token but the first, given those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def greedy(model: Any, tokens: list[int], answer: list[int], slack: float = 1e-3) -> bool:
    """Whether each token of an answer is the most probable one, or as good as it."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens + answer])).logits[0, len(tokens) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((logits.amax(1) - chosen <= slack).all())
