"""Quantizes the experts of a directory in floats, without a model and with one matrix in memory at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..encodings import Quantized, check_finite, check_rule, quantize_weight
from ..encodings.search import usual_rule
from ..errors import CheckpointError, NonFiniteError, ShapeError, UnsupportedError
from ..messages import check_skip, fits
from .conversion import (
    dense_step,
    matrices_in_floats,
    modelopt_configs,
    modelopt_step,
    renamed,
    steps_beside,
    with_config,
)
from .directory import Directory
from .experts import LayerExperts, predicts_further_tokens
from .families import Family, known_family
from .fused import FusedOrder, matrices_of
from .headers import Entry, Read
from .layers import layers_in_floats, layers_of_floats, orders_of_floats
from .schemes import KNOWN, Scheme
from .shard import Planned, Step
from .source import Source
from .stored import StoredWeight, weights_in
from .writing import SHARD_BYTES, write
from .written import encoded_step, form_of


def quantize(
    src: str | Path,
    dst: str | Path,
    *,
    to: str = "nvfp4",
    scales: str | None = None,
    skip: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
    dry_run: Callable[[Directory], object] | None = None,
) -> Path:
    """Writes src with its experts in few bits as dst, which appears whole. Returns dst.

    src: in bfloat16, float16, float32, or FP8, which is rounded to bfloat16 first. to: "nvfp4", in
    ModelOpt's form; "mxfp4" or "int4", in that of compressed-tensors; "fp8", as DeepSeek-V3.
    scales: as in `QuantizationConfig`, None for the format's default; config.json says it if it is
    not "max". skip: names of layers' experts that stay as they are, `…layers.0.mlp.experts`, or of
    modules around them; `*` stands for any text. Each matrix of an expert gets the same bytes as
    from `quantize_`; gate and up are two matrices. Experts in one tensor are written one by one,
    also those of Llama-4 and gpt-oss, which are stored transposed. Layers for multi-token
    prediction stay in floats: transformers reads no others, and those in few bits stay as they are,
    beside others in floats too. Everything else stays the same, except
    that FP8 becomes bfloat16, unless it has one scale and the form is ModelOpt's. UnsupportedError
    if there are no such experts, ShapeError if K is not whole blocks, NonFiniteError for NaN and
    infinity, OptionError for other scales, CheckpointError as from `Directory.open`,
    `stored_weights` and `write`. dry_run: called with the Directory that there would be, and
    nothing is written.
    """
    form = form_of(to)
    rule = usual_rule(form.scheme.own_encoding) if scales is None else scales
    check_rule(rule, form.scheme.own_encoding)
    source = Source.open(src)
    family = known_family(source.directory)
    experts = dict(_experts(source, Rounding(form.scheme, rule, skip), family))
    if not experts:
        known = "…experts.0.up_proj.weight, w1, w3, w2, …experts.gate_up_proj"
        raise UnsupportedError(
            "experts that are quantized already" if source.weights else "no experts",
            expected="experts in bfloat16, float16, float32 or FP8",
            todo="convert writes them in another form"
            if source.weights
            else f"names that are known: {known}, and those of an installed class",
            where=str(src),
        )

    def becomes_floats(weight: StoredWeight) -> bool:
        in_form = weight.scheme.encoding == form.scheme.encoding and not weight.scheme.fused
        kept = to == "nvfp4" and (weight.of_matrix or not weight.scheme.eight_bits)
        return weight.name not in experts and not (in_form or kept)

    def of_weight(weight: StoredWeight) -> Step:
        if weight.name in experts:
            return experts[weight.name]
        if becomes_floats(weight):
            return dense_step(source, weight, torch.bfloat16, exact=not weight.scheme.eight_bits)
        if to == "nvfp4":
            return modelopt_step(source, weight)
        make = partial(source.quantized, weight)
        return encoded_step(form.scheme, weight.name, weight.shape, make)

    def of_other(source: Source, entry: Entry) -> Step | None:
        if (name := entry.name.removesuffix(".weight")) in experts:
            return experts[name]
        # FP8's scales of activations mean something else in NVFP4
        scale_of = (entry.name.removesuffix(suffix) for suffix in KNOWN)
        return None if any(name in experts for name in scale_of) else renamed(source, entry)

    floats = [
        layer
        for layer in layers_in_floats(source, becomes_floats, family)
        if not experts.keys() & {*layer.stored.names}
    ]
    steps = list(steps_beside(floats, source, of_weight, of_other))
    steps += (step for layer in floats for step in layer.steps(torch.bfloat16))
    if to == "nvfp4":
        config, older = modelopt_configs(source, steps)
    else:
        config, older = with_config(source, form.config(matrices_in_floats(steps)))
    quantization = {k: v for k, v in config["quantization_config"].items() if k != "scales"}
    if rule != "max":
        quantization["scales"] = rule
    return write(
        dst,
        source.directory,
        steps,
        ({**config, "quantization_config": quantization}, older),
        shard_bytes=shard_bytes,
        how=("quantize", to, rule, *skip),
        check=weights_in,
        dry_run=dry_run,
    )


@dataclass(frozen=True)
class Rounding:
    """How experts are quantized. skip: names of those that are not."""

    scheme: Scheme
    rule: str
    skip: Sequence[str]


def _experts(source: Source, how: Rounding, family: Family) -> Iterator[tuple[str, Step]]:
    """The steps that write experts, each with the name of the original weight or bias."""
    plain, config = source.plain, source.directory.config
    fp8 = {name: weight for name, weight in source.weights.items() if weight.scheme.eight_bits}
    wide: dict[str, Entry | StoredWeight] = {**plain, **fp8}  # all others have few bits already
    result, to = layers_of_floats(source, family)
    layers = {name: of for name, of in result.items() if any(n in wide for n in of.names)}
    check_skip(how.skip, [*layers], "quantize")
    for layer in layers.values():
        further = predicts_further_tokens(f"{layer.name}.", config)
        if further or fits(layer.name, how.skip):
            continue
        # its other sizes may be any
        for empty in (plain[n] for n in layer.names if n in plain and 0 in plain[n].shape):
            raise CheckpointError(
                f"{empty}", expected="experts with elements", where=str(empty.file)
            )
        if layer.fused:
            if all(name in plain for name in layer.names):
                yield from _fused(source, layer, how, family)
            continue
        for name in layer.names:
            if name in wide:
                read = partial(_matrix, source, name)
                yield name, _quantized(to[name], wide[name].shape, read, how)


def _matrix(source: Source, name: str) -> Tensor:
    if name not in source.weights:
        return source.directory.read(f"{name}.weight")
    (floats,) = source.matrices(source.weights[name])
    return floats.bfloat16()


def _fused(
    source: Source, layer: LayerExperts, how: Rounding, family: Family
) -> Iterator[tuple[str, Step]]:
    """Fused weights and biases of all experts, written as single experts, as ModelOpt writes
    them.
    """
    read, plain = source.directory.read, source.plain
    shapes = {projection: plain[name].shape for projection, (name,) in layer.projections.items()}
    orders = orders_of_floats(source, family, layer)
    for projection, (name,) in layer.projections.items():
        matrices, order = matrices_of(projection), orders[name]
        n, k = order.matrix_shape(shapes[projection])
        rows, count = n // len(matrices), len(matrices)
        places = [
            (e, at, f"{layer.name}.{e}.{matrix}")
            for e in range(shapes[projection][0])
            for at, matrix in enumerate(matrices)
        ]
        matrix = partial(order.matrix, read, plain[name].name)
        steps = [
            _quantized(to, (rows, k), partial(matrix, e, at, count), how) for e, at, to in places
        ]
        yield name, _joined(steps)
        if bias := plain.get(f"{name}_bias"):
            planned = tuple(Planned(f"{to}.bias", bias.dtype, (rows,)) for *_, to in places)
            yield bias.name, Step(planned, partial(_biases, order, read, bias.name, places, count))


def _biases(
    order: FusedOrder, read: Read, name: str, places: list[tuple[int, int, str]], count: int
) -> dict[str, Tensor]:
    biases = read(name)
    return {f"{to}.bias": order.rows(biases[e], at, count).contiguous() for e, at, to in places}


def _joined(steps: list[Step]) -> Step:
    return Step(
        tuple(p for step in steps for p in step.planned),
        lambda: {name: t for step in steps for name, t in step.make().items()},
    )


def _quantized(
    name: str, shape: tuple[int, ...], read: Callable[[], Tensor], how: Rounding
) -> Step:
    encoding = how.scheme.own_encoding
    try:
        encoding.packed(shape[1])
    except ShapeError as error:
        raise error.at(name).advise("--skip it") from None

    def make() -> Quantized:
        x = read()
        try:
            check_finite(x, encoding)
        except NonFiniteError as error:
            raise error.at(name) from None
        return quantize_weight(x, encoding, scales=how.rule)

    return encoded_step(how.scheme, name, shape, make)
