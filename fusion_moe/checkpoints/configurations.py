"""The entries of configurations that say how weights are stored, in ModelOpt's form and in that of
compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..encodings import MXFP4, Encoding

# the entry of a configuration, and its older name
QUANTIZATION = ("quantization_config", "compression_config")
# parts of a multimodal model's configuration, which may have the entry instead
TEXT_MODEL = ("text_config", "llm_config")
PRODUCER = {"name": "fusion_moe"}
_OWN = ("activation_format", "weights", "scales")
_EXPERT = re.compile(r"(.*\bexperts)\.\d+\..*")


def modelopt_config(algorithms: Mapping[str, str], plain: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. algorithms: "NVFP4", "W4A16_NVFP4" or "FP8" for each
    quantized weight; plain: other weights.
    """
    layers = {layer_of(name): algorithm for name, algorithm in algorithms.items()}
    used = sorted(set(layers.values()))
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": used[0] if len(used) == 1 else "MIXED_PRECISION",
    }
    targets = {used[0]: ["Linear"]}
    if len(used) > 1:
        config["quantized_layers"] = {name: _ENTRIES[own] for name, own in layers.items()}
        targets = {name: sorted(k for k, entry in layers.items() if entry == name) for name in used}
    return config | {
        "config_groups": {
            f"group_{i}": _GROUPS[name] | {"targets": parts}
            for i, (name, parts) in enumerate(targets.items())
        },
        "ignore": sorted({layer_of(name) for name in plain}),
        "producer": PRODUCER,
    }


def own_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `quantization_config` that only this library writes and reads: how experts are
    computed, fields of `QuantizationConfig`.
    """
    return {key: config[key] for key in _OWN if key in config}


def older_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent for hf_quant_config.json."""
    layers = "quantized_layers"
    entries = {layers: config[layers]} if layers in config else _ENTRIES[config["quant_algo"]]
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        **entries,
        "exclude_modules": config["ignore"],
    }
    return {"producer": config["producer"], "quantization": quantization}


_NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_GROUPS: dict[str, dict[str, Any]] = {
    "NVFP4": {"input_activations": _NVFP4, "weights": _NVFP4},
    "W4A16_NVFP4": {"weights": _NVFP4},
    "FP8": {"input_activations": _FP8, "weights": _FP8},
}
_ENTRIES: dict[str, dict[str, Any]] = {
    "NVFP4": {"quant_algo": "NVFP4", "group_size": 16},
    "W4A16_NVFP4": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "FP8": {"quant_algo": "FP8"},
}


def layer_of(name: str) -> str:
    """The layer of a module's name; all experts of a layer count as one."""
    expert = _EXPERT.fullmatch(name)
    return expert[1] if expert else name


# compressed-tensors -------------------------------------------------------------------------------


def compressed_config(encodings: Mapping[str, Encoding], plain: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. encodings: of each quantized weight; plain: others, and
    modules of experts in floats.
    """
    of = {e.name: e for e in encodings.values()}
    groups: dict[str, Any] = {}
    for i, encoding in enumerate(of[name] for name in sorted(of)):
        targets = sorted(weight for weight, own in encodings.items() if own is encoding)
        groups[f"group_{i}"] = {
            "format": "mxfp4-pack-quantized" if encoding is MXFP4 else "pack-quantized",
            "targets": ["Linear"] if len(of) == 1 else targets,
            "weights": _weights(encoding),
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [
            rf"re:{re.escape(name)}\..*" if name.endswith("experts") else name
            for name in sorted(set(map(layer_of, plain)))
        ],
        "quantization_status": "compressed",
        "producer": PRODUCER,
    }


def _weights(encoding: Encoding) -> dict[str, Any]:
    block = encoding.block_scales[0].block
    if encoding is MXFP4:
        kind = {"type": "float", "scale_dtype": "torch.uint8"}
    else:
        kind = {"type": "int", "strategy": "group" if block > 0 else "channel"}
    return {
        "num_bits": encoding.element.bits,
        "strategy": "group",
        "group_size": block if block > 0 else None,
        "symmetric": not encoding.zero_points,
        "dynamic": False,
        **kind,
    }
