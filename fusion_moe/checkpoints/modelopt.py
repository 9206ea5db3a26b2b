"""Directories in ModelOpt's form: the tensors of a weight under ModelOpt's names, and the entries
of the configurations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..encodings import Quantized
from .schemes import MODELOPT, MODELOPT_FUSED, Scheme
from .shard import Planned, Step

_OWN = ("activation_format",)
_EXPERT = re.compile(r"(.*\bexperts)\.\d+\..*")


def nvfp4_step(name: str, shape: tuple[int, ...], make: Callable[[], Quantized]) -> Step:
    """Writes an NVFP4 weight: [N, K], or [E, N, K] for all experts with one scale."""
    scheme = MODELOPT_FUSED if len(shape) == 3 else MODELOPT
    return Step(planned(scheme, name, shape), lambda: tensors(scheme, name, make()))


def planned(scheme: Scheme, name: str, shape: tuple[int, ...]) -> tuple[Planned, ...]:
    """The tensors that a weight will be written as."""
    assert scheme.encoding is not None
    *lead, n, k = shape
    made = []
    for stored, part in zip(scheme.parts, scheme.encoding.parts, strict=True):
        *outer, a, b = size = (
            (*scheme.encoding.part_shape(part, lead, n, k),) if not part.of_matrix else (1, 1)
        )
        wanted = () if part.of_matrix else (*outer, b, a) if stored.transposed else size
        made.append(Planned(name + stored.suffix, part.dtype, wanted))
    return tuple(made)


def tensors(scheme: Scheme, name: str, q: Quantized) -> dict[str, Any]:
    """The tensors of a weight."""
    return {
        name + stored.suffix: stored.from_part(t) for stored, t in zip(scheme.parts, q, strict=True)
    }


# Configurations -----------------------------------------------------------------------------------


def quantization_config(algorithms: Mapping[str, str], plain: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. algorithms: "NVFP4", "W4A16_NVFP4" or "FP8" for each
    quantized weight; plain: other weights.
    """
    layers = {_layer(name): algorithm for name, algorithm in algorithms.items()}
    used = sorted(set(layers.values()))
    made: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": used[0] if len(used) == 1 else "MIXED_PRECISION",
    }
    targets = {
        algorithm: sorted(name for name, its in layers.items() if its == algorithm)
        for algorithm in used
    }
    if len(used) == 1:
        targets = {used[0]: ["Linear"]}
    else:
        made["quantized_layers"] = {
            name: _algorithm(algorithm) for name, algorithm in layers.items()
        }
    made["config_groups"] = {
        f"group_{i}": _GROUPS[name] | {"targets": its}
        for i, (name, its) in enumerate(targets.items())
    }
    return made | {
        "ignore": sorted({_layer(name) for name in plain}),
        "producer": {"name": "fusion_moe"},
    }


def own_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `quantization_config` that only this library writes and reads: how experts are
    computed, the fields of NVFP4Config.
    """
    return {key: config[key] for key in _OWN if key in config}


def older_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent for hf_quant_config.json."""
    said = {"quant_algo": config["quant_algo"], "kv_cache_quant_algo": None}
    if "quantized_layers" in config:
        said["quantized_layers"] = config["quantized_layers"]
    else:
        said |= _algorithm(config["quant_algo"])
    return {
        "producer": config["producer"],
        "quantization": said | {"exclude_modules": config["ignore"]},
    }


_NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_GROUPS: dict[str, dict[str, Any]] = {
    "NVFP4": {"input_activations": _NVFP4, "weights": _NVFP4},
    "W4A16_NVFP4": {"weights": _NVFP4},
    "FP8": {"input_activations": _FP8, "weights": _FP8},
}


def _algorithm(name: str) -> dict[str, Any]:
    return {"quant_algo": name} if name == "FP8" else {"quant_algo": name, "group_size": 16}


def _layer(name: str) -> str:
    """The layer of a module's name; all experts of a layer count as one."""
    found = _EXPERT.fullmatch(name)
    return found[1] if found else name
