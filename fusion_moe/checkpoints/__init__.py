"""Checkpoints on disk: the tensors in a directory of safetensors files, and which of them are the
parts of an encoded weight.

This package knows files, names and encodings, but no models and no framework classes. It reads only
headers until a tensor is requested. `convert` and `quantize` write directories.

directory.py, headers.py, gguf.py, gguf_models.py
                 files
schemes.py, stored.py
                 which tensors are the parts of which weight
experts.py, fused.py, families.py, layers.py
                 which weights belong to a layer's experts, and what a class reads in floats
source.py        weights read one by one; values.py, integers.py, fp8.py, nf4.py, words.py: decoded
conversion.py, quantization.py
                 `convert` and `quantize`; shard.py, writing.py, unfinished.py: how they write
methods.py, configurations.py
                 config.json
"""

from .configurations import TEXT_MODEL, own_entries
from .conversion import convert
from .directory import Directory
from .experts import (
    PER_EXPERT,
    LayerExperts,
    expert_of,
    experts_of,
    layers_of_experts,
    number,
    predicts_further_tokens,
)
from .headers import Entry, Read, Unread, read_json, shown
from .integers import Packing
from .methods import method_of, packing_of
from .quantization import quantize
from .schemes import (
    FP8_OF_MATRIX,
    KNOWN,
    MODELOPT,
    MODELOPT_FUSED,
    PACKED_INT4,
    PACKED_MXFP4,
    PACKED_NVFP4,
    SCHEMES,
    Direction,
    Scheme,
    StoredPart,
)
from .source import Source
from .stored import StoredWeight, all_eight_bits, stored_weights, weights_in
from .values import check_scale, check_scales, check_scales_of, check_weight

__all__ = [
    "FP8_OF_MATRIX",
    "KNOWN",
    "MODELOPT",
    "MODELOPT_FUSED",
    "PACKED_INT4",
    "PACKED_MXFP4",
    "PACKED_NVFP4",
    "PER_EXPERT",
    "SCHEMES",
    "TEXT_MODEL",
    "Direction",
    "Directory",
    "Entry",
    "LayerExperts",
    "Packing",
    "Read",
    "Scheme",
    "Source",
    "StoredPart",
    "StoredWeight",
    "Unread",
    "all_eight_bits",
    "check_scale",
    "check_scales",
    "check_scales_of",
    "check_weight",
    "convert",
    "expert_of",
    "experts_of",
    "layers_of_experts",
    "method_of",
    "number",
    "own_entries",
    "packing_of",
    "predicts_further_tokens",
    "quantize",
    "read_json",
    "shown",
    "stored_weights",
    "weights_in",
]
