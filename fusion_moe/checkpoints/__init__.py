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

from .conversion import convert
from .directory import Directory
from .experts import LayerExperts, experts_of, layers_of_experts
from .headers import Entry
from .integers import Packing
from .methods import method_of, packing_of
from .quantization import quantize
from .schemes import KNOWN, SCHEMES, Direction, Scheme, StoredPart
from .stored import StoredWeight, all_eight_bits, stored_weights, weights_in
from .values import check_scales

__all__ = [
    "KNOWN",
    "SCHEMES",
    "Direction",
    "Directory",
    "Entry",
    "LayerExperts",
    "Packing",
    "Scheme",
    "StoredPart",
    "StoredWeight",
    "all_eight_bits",
    "check_scales",
    "convert",
    "experts_of",
    "layers_of_experts",
    "method_of",
    "packing_of",
    "quantize",
    "stored_weights",
    "weights_in",
]
