"""Directories in compressed-tensors' form: integers and MXFP4 under its names, and the entries of
the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from re import escape
from typing import Any

from ..encodings import INTEGERS, MXFP4, Encoding
from .integers import packed_scheme
from .modelopt import PRODUCER, layer_of
from .schemes import PACKED_MXFP4, Scheme

_INTEGERS, _MXFP4, _MIXED = "pack-quantized", "mxfp4-pack-quantized", "mixed-precision"


def compressed_scheme(encoding: Encoding | None) -> Scheme | None:
    """How compressed-tensors stores an encoding; None if this library does not write it so."""
    if encoding is MXFP4:
        return PACKED_MXFP4
    return packed_scheme(encoding) if encoding and encoding in INTEGERS.values() else None


def compressed_config(encodings: Mapping[str, Encoding], plain: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. encodings: of each quantized weight; plain: others, and
    modules of experts in floats.
    """
    of = {e.name: e for e in encodings.values()}
    groups: dict[str, Any] = {}
    for i, encoding in enumerate(of[name] for name in sorted(of)):
        targets = sorted(weight for weight, its in encodings.items() if its is encoding)
        groups[f"group_{i}"] = {
            "format": _MXFP4 if encoding is MXFP4 else _INTEGERS,
            "targets": ["Linear"] if len(of) == 1 else targets,
            "weights": _weights(encoding),
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "config_groups": groups,
        "ignore": [
            rf"re:{escape(name)}\..*" if name.endswith("experts") else name
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
