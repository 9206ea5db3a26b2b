"""Writes a directory in another form, without loss: ModelOpt's NVFP4, compressed-tensors, or plain
floats. Weight by weight, without a model.

    convert(src, dst)                          NVFP4 of any scheme, MXFP4, and FP8 with one scale,
                                               to ModelOpt's names
    convert(src, dst, to="compressed-tensors") integers of any scheme, and MXFP4 of single matrices
    convert(src, dst, to="dense")              float32, which holds every number of every encoding
    convert(src, dst, to="dense", dtype=torch.bfloat16)   rounded: NVFP4 has numbers with more than
                                                          the 8 bits of bfloat16

Before dst gets its name, it is read again completely and compared with src.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..encodings import FLOATS, NVFP4, Quantized, exactly
from ..errors import CheckpointError, Error, OptionError, UnsupportedError
from ..messages.progress import progress
from .configurations import compressed_config, modelopt_config, older_config, own_entries
from .directory import Directory, without_quantization
from .headers import Entry
from .layers import Layer, layers_in_floats, put
from .schemes import FP8_OF_MATRIX, KNOWN, MODELOPT, MODELOPT_FUSED
from .shard import Planned, Step
from .source import Source
from .stored import StoredWeight, weights_in
from .writing import SHARD_BYTES, Configs, write
from .written import compressed_scheme, encoded_step

FORMS = ("modelopt", "compressed-tensors", "dense")


def convert(
    src: str | Path,
    dst: str | Path,
    to: str = "modelopt",
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    dry_run: Callable[[Directory], object] | None = None,
) -> Path:
    """Writes src in another form as dst, which appears whole. Returns dst.

    to: "modelopt", "compressed-tensors" or "dense"; dtype: of dense weights, float32, bfloat16 or
    float16. OptionError for others; UnsupportedError for weights without an exact equivalent there
    (INT4 in NVFP4; MXFP4 whose scales span more than an e4m3 scale holds); CheckpointError as from
    `Directory.open`, `stored_weights` and `write`. dry_run: called with the Directory that there
    would be, and nothing is written.
    """
    if to not in FORMS:
        raise OptionError(f"to={to!r}", expected=f"one of {', '.join(FORMS)}", where="convert")
    if dtype not in FLOATS:
        raise OptionError(
            f"dtype={dtype}", expected=f"one of {', '.join(map(str, FLOATS))}", where="convert"
        )
    source = Source.open(src)
    if not source.weights:
        raise UnsupportedError(
            "no quantized weights",
            expected="weights to convert",
            todo="quantize makes NVFP4 of floats, and of other types of GGUF",
            where=str(src),
        )
    layers: list[Layer] = []
    if to == "dense":
        steps, layers = _dense_steps(source, dtype)
        config = without_quantization(source.directory.config)
        config.pop("torch_dtype", None)
        configs: Configs = config | {"dtype": str(dtype).removeprefix("torch.")}, None
    elif to == "compressed-tensors":
        steps = list(source.steps(lambda weight: _compressed_step(source, weight), _unless_known))
        encodings = {w.name: e for w in source.weights.values() if (e := w.scheme.encoding)}
        config = compressed_config(encodings, matrices_in_floats(steps))
        configs = with_config(source, config | own_entries(source.directory.quantization))
    else:
        layers = layers_in_floats(source, becomes_bfloat16)
        rest = steps_beside(layers, source, lambda weight: modelopt_step(source, weight), renamed)
        experts = (step for layer in layers for step in layer.steps(torch.bfloat16, exact=True))
        steps = [*rest, *experts]
        configs = modelopt_configs(source, steps)
    return write(
        dst,
        source.directory,
        steps,
        configs,
        shard_bytes=shard_bytes,
        how=("convert", to, str(dtype)),
        check=lambda written: _check(source, written, layers),
        dry_run=dry_run,
    )


def dense_tensors(src: str | Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """What `convert(src, dst, to="dense", dtype=dtype)` would write, in memory."""
    steps, _ = _dense_steps(Source.open(src), dtype)
    return {name: tensor for step in steps for name, tensor in step.make().items()}


# To ModelOpt's form -------------------------------------------------------------------------------


def becomes_bfloat16(weight: StoredWeight) -> bool:
    """Whether ModelOpt's form has no way to store a weight: 8-bit floats with several scales."""
    return (weight.scheme.encoding is None or weight.scheme.eight_bits) and not weight.of_matrix


def modelopt_step(source: Source, weight: StoredWeight) -> Step:
    """Writes a weight in ModelOpt's form, with equal values. UnsupportedError if it has no such
    form.
    """
    encoding = weight.scheme.encoding
    if becomes_bfloat16(weight):  # exact if scales are powers of two
        return dense_step(source, weight, torch.bfloat16, exact=True)
    if weight.of_matrix:
        return encoded_step(
            FP8_OF_MATRIX, weight.name, weight.shape, lambda: source.quantized(weight)
        )
    assert encoding is not None, "8-bit floats"
    if encoding is not NVFP4 and NVFP4.name not in encoding.equivalents:
        raise UnsupportedError(
            f"{weight.name} in {encoding.name}",
            expected="nvfp4 or mxfp4: others have no exact NVFP4",
            todo='to="compressed-tensors" writes integers; or convert it to dense, and quantize '
            "that, with its rounding",
            where="convert",
        )

    def make() -> Quantized:
        q = source.quantized(weight)
        return q if encoding is NVFP4 else _as_nvfp4(weight, q)

    scheme = MODELOPT_FUSED if len(weight.shape) == 3 else MODELOPT
    return encoded_step(scheme, weight.name, weight.shape, make)


def _as_nvfp4(weight: StoredWeight, q: Quantized) -> Quantized:
    """The same values in NVFP4, with one decode scale for all of them."""
    try:
        codes, block_scale, decode_scale = exactly(q.of(part.flatten(0, -2) for part in q), NVFP4)
    except Error as error:
        raise error.at(weight.name) from None
    if decode_scale.dim():
        raise UnsupportedError(
            f"{weight.name}: its scales span more octaves than one e4m3 scale holds",
            expected="at most 17: ModelOpt's files have one scale for the whole",
            todo="keep it in MXFP4, which is read as it is",
            where="convert",
        )
    lead = weight.shape[:-1]
    return Quantized(
        codes.view(*lead, -1),
        block_scale.view(*lead, -1),
        decode_scale.expand(lead[:-1]),
        encoding=NVFP4,
    )


def renamed(source: Source, entry: Entry) -> Step | None:
    """Scales of activations are multipliers in ModelOpt's form, and divisors in that of
    compressed-tensors.
    """
    if entry.name.endswith(".weight_shape"):
        return None
    if not entry.name.endswith(".input_global_scale"):
        return source.kept(entry)
    name = entry.name.removesuffix("global_scale") + "scale"
    return Step(
        (Planned(name, torch.float32, ()),),
        lambda: {name: 1.0 / source.directory.read(entry.name).float().reshape(())},
    )


def modelopt_configs(source: Source, steps: Sequence[Step]) -> Configs:
    """config.json and hf_quant_config.json for what is written in ModelOpt's form.

    A weight is NVFP4 if its activations have a scale. An lm_head that is tied to the embedding has
    no tensor, but counts as a plain matrix.
    """
    planned = {p.name: p for step in steps for p in step.planned}
    algorithms = dict[str, str]()
    for name, p in planned.items():
        of_weight = name.removesuffix(".weight")
        if name.endswith("weight_scale_2"):
            prefix = name.removesuffix("weight_scale_2")
            scaled = f"{prefix}input_scale" in planned
            algorithms[prefix[:-1]] = "NVFP4" if scaled else "W4A16_NVFP4"
        elif name != of_weight and p.dtype == torch.float8_e4m3fn:
            algorithms[of_weight] = "FP8"
    if not algorithms:
        raise UnsupportedError(
            f"{', '.join({weight.scheme.name: None for weight in source.weights.values()})} alone",
            expected="a weight in NVFP4, MXFP4, or FP8 with one scale",
            todo='convert it to="dense", or quantize it',
            where="convert",
        )
    config = modelopt_config(algorithms, matrices_in_floats(steps))
    return with_config(source, config | own_entries(source.directory.quantization))


def with_config(source: Source, config: Mapping[str, Any]) -> Configs:
    """config.json with a `quantization_config`, and hf_quant_config.json in ModelOpt's form."""
    older = older_config(config) if config["quant_method"] == "modelopt" else None
    return without_quantization(source.directory.config) | {"quantization_config": config}, older


def matrices_in_floats(steps: Iterable[Step]) -> list[str]:
    """The names of matrices that are written in floats."""
    planned = [p for step in steps for p in step.planned]
    plain = [
        p.name.removesuffix(".weight")
        for p in planned
        if p.name.endswith(".weight") and p.dtype in FLOATS and len(p.shape) == 2
    ]
    return plain if any("lm_head." in p.name for p in planned) else [*plain, "lm_head"]


# To compressed-tensors' form ----------------------------------------------------------------------


def _compressed_step(source: Source, weight: StoredWeight) -> Step:
    scheme = compressed_scheme(weight.scheme.encoding)
    if scheme is None or weight.scheme.fused:
        actual = weight.scheme.encoding.name if weight.scheme.encoding else weight.scheme.name
        raise UnsupportedError(
            f"{weight.name} in {actual}{', all experts in one tensor' if scheme else ''}",
            expected="single matrices in integers or MXFP4",
            todo="modelopt's form has NVFP4, and MXFP4 of any kind",
            where="convert",
        )
    return encoded_step(scheme, weight.name, weight.shape, lambda: source.quantized(weight))


# To floats ----------------------------------------------------------------------------------------


def _dense_steps(source: Source, dtype: torch.dtype) -> tuple[list[Step], list[Layer]]:
    """Writes all in floats, and experts as their class reads them: these layers."""
    layers = layers_in_floats(source, lambda weight: True)
    steps = steps_beside(
        layers, source, lambda weight: dense_step(source, weight, dtype), _unless_known
    )
    return [*steps, *(step for layer in layers for step in layer.steps(dtype))], layers


def steps_beside(
    layers: Sequence[Layer],
    source: Source,
    of_weight: Callable[[StoredWeight], Step],
    of_other: Callable[[Source, Entry], Step | None],
) -> Iterator[Step]:
    """`Source.steps`, but for the tensors of layers."""
    tensors = {name for layer in layers for name in layer.tensors}

    def unless_of_layers(weight: StoredWeight) -> Step | None:
        return None if weight.elements.name in tensors else of_weight(weight)

    return source.steps(
        unless_of_layers, lambda s, entry: None if entry.name in tensors else of_other(s, entry)
    )


def dense_step(
    source: Source, weight: StoredWeight, dtype: torch.dtype, exact: bool = False
) -> Step:
    """Writes a weight in plain floats: [N, K]; for all experts in one tensor, [E, K, N], as the
    families do that store it so. exact: UnsupportedError, when the step runs, for numbers that
    dtype does not hold.
    """
    *lead, n, k = weight.shape
    name, shape = (weight.name, (*lead, k, n)) if lead else (f"{weight.name}.weight", (n, k))

    def make() -> dict[str, Tensor]:
        whole = torch.empty(shape, dtype=dtype)
        for into, matrix in zip(whole if lead else [whole], source.matrices(weight), strict=True):
            why = "FP8 whose scales are no powers of two"
            text = f": {why}" if weight.scheme.eight_bits else f" in {weight.scheme.name}"
            exactly_what = weight.name + text if exact else ""
            put(into, matrix.mT if lead else matrix, exactly_what, weight.name)
        return {name: whole}

    return Step((Planned(name, dtype, shape),), make)


def _unless_known(source: Source, entry: Entry) -> Step | None:
    """Plain floats have no scales of activations: leaves them out."""
    return None if entry.name.endswith(KNOWN) else source.kept(entry)


# Comparing ----------------------------------------------------------------------------------------


def _check(source: Source, written: Directory, layers: Sequence[Layer]) -> None:
    """CheckpointError unless what was written has the numbers of the source: those of weights, in
    the dtype that they are written in, and the bytes of all other tensors. layers: that have other
    tensors than in the source.
    """
    target, of_layers = Source(written, weights_in(written)), {n for a in layers for n in a.tensors}
    for layer in progress(layers, "comparing experts", len(layers)):
        for name, a, b in layer.compared(written.read):
            _check_equal(a, b, name)
    weights = [w for w in source.weights.values() if w.elements.name not in of_layers]
    for weight in progress(weights, "comparing", len(weights)):
        for a, b in zip(source.matrices(weight), _written(target, weight), strict=True):
            _check_equal(a.to(b.dtype), b, weight.name)
    parts = {entry.name for weight in source.weights.values() for entry in weight.entries.values()}
    for name in source.directory.tensors.keys() & written.tensors.keys() - parts:
        tensors = (d.read(name).contiguous() for d in (source.directory, written))
        a, b = (t.reshape(-1).view(torch.uint8) for t in tensors)
        _check_equal(a, b, name)


def _written(target: Source, weight: StoredWeight) -> Iterator[Tensor]:
    """The matrices of a weight of the source, [N, K], as they were written."""
    if weight.name in target.weights:
        yield from target.matrices(target.weights[weight.name])
    elif weight.scheme.fused:
        yield from target.directory.read(weight.name).mT
    else:
        yield target.directory.read(f"{weight.name}.weight")


def _check_equal(a: Tensor, b: Tensor, name: str) -> None:
    if not torch.equal(a, b):
        raise CheckpointError(
            f"{name} was written with other numbers",
            expected="those of the source",
            todo="is the disk sound?",
            where="convert",
        )
