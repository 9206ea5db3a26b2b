"""The form in which weights of an encoding are written: their tensors, and the
`quantization_config` that says so.

    nvfp4        as nvidia-modelopt
    mxfp4, int4  as compressed-tensors; GPT_OSS is mxfp4 as gpt-oss has it, all experts in a tensor
    fp8          as DeepSeek-V3, `quant_method` fp8
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..encodings import FP8, INT4, INTEGERS, MXFP4, NVFP4, Encoding, Quantized
from ..errors import need_one_of
from .configurations import compressed_config, layer_of, modelopt_config
from .integers import packed_scheme
from .schemes import (
    FP8_INVERSE,
    MODELOPT,
    MXFP4_FUSED,
    PACKED_MXFP4,
    Scheme,
    of_encoding,
)
from .shard import Planned, Step


@dataclass(frozen=True)
class Form:
    """config(plain): `quantization_config` of a directory; plain: the names of matrices in floats,
    and of modules whose experts are.
    """

    scheme: Scheme
    config: Callable[[Iterable[str]], dict[str, Any]]


def compressed_scheme(encoding: Encoding | None) -> Scheme | None:
    """How compressed-tensors stores an encoding; None if this library does not write it so."""
    if encoding is MXFP4:
        return PACKED_MXFP4
    return packed_scheme(encoding) if encoding and encoding in INTEGERS.values() else None


def form_of(encoding: str) -> Form:
    """OptionError for an encoding that is not written."""
    need_one_of("to", encoding, _FORMS)
    return _FORMS[encoding]


def encoded_step(
    scheme: Scheme, name: str, shape: tuple[int, ...], make: Callable[[], Quantized]
) -> Step:
    """Writes a weight: [N, K], or [E, N, K] in a scheme with one tensor for all experts."""
    *lead, n, k = shape
    encoding = scheme.own_encoding

    def tensors(parts: Iterable[Tensor]) -> dict[str, Tensor]:
        stored = {
            name + part.suffix: part.from_part(t)
            for part, t in zip(scheme.parts, parts, strict=True)
        }
        return stored | {name + f.suffix: f.made(n, k, encoding) for f in scheme.fixed}

    empty = tensors(
        torch.empty(encoding.part_shape(part, lead, n, k), dtype=part.dtype, device="meta")
        for part in encoding.parts
    )
    planned = (Planned(key, t.dtype, (*t.shape,)) for key, t in empty.items())
    return Step(tuple(planned), lambda: tensors(make()))


def _fp8(plain: Iterable[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": sorted(set(map(layer_of, plain))),
    }


def _mxfp4(plain: Iterable[str]) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": sorted(set(plain))}


GPT_OSS = Form(MXFP4_FUSED, _mxfp4)
_FORMS = {
    NVFP4.name: Form(MODELOPT, partial(modelopt_config, {"": "W4A16_NVFP4"})),
    MXFP4.name: Form(PACKED_MXFP4, partial(compressed_config, {"": MXFP4})),
    INT4.name: Form(packed_scheme(INT4), partial(compressed_config, {"": INT4})),
    FP8.name: Form(of_encoding(FP8_INVERSE, FP8, torch.float32, ()), _fp8),
}
