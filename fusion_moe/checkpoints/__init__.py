"""Checkpoints on disk: the tensors in a directory of safetensors files, and which of them are the
parts of an encoded weight.

This package knows files, names and encodings, but no models and no framework classes. It reads only
headers until a tensor is requested. `convert` and `quantize` write directories.
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
