"""The option `check`: whether passes and segmentation keep a program's results bit for bit, and
whether kernels compute what their segments mean, on the inputs at hand.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import options
from ..encodings import Encoding, find, real_tensors
from ..errors import FusionError, UnsupportedError
from ..ir import DTYPES, Fusion, Op, Value
from ..ir.text import text
from ..schedule.plan import REFERENCE
from ..schedule.segment import Segment
from . import cuda, store
from .kernel import Kernel

_SHOWN = 4  # how many operations of a segment an error names
_SCRIPT = '''"""{title}, run on inputs for which its kernel is wrong. Raises that error."""

import torch

from fusion_moe import options
from fusion_moe.compile import program_of

# import here what registers your own operations, encodings and readers

PROGRAM = """
{program}
"""

if __name__ == "__main__":
    inputs = torch.load({inputs!r}, weights_only=True)
    with options.using(options.from_key({options!r}).replace(check=True)):
        program_of(PROGRAM, torch.device("{device}"))(inputs, {sizes})
    print("no difference")
'''


def check_stages(
    stages: Sequence[tuple[str, Fusion]],
    segments: Sequence[Segment],
    tensors: Sequence[Any],
    env: Mapping[str, int],
) -> None:
    """Evaluates a program after each pass, and its segments, on real tensors. FusionError names the
    first stage whose results are not those of the first one, bit for bit.

    stages: (name, Fusion) in order; env: the values of size symbols.
    """
    want = stages[0][1].evaluate(*tensors, sizes=env)
    for name, fusion in stages[1:]:
        _compare(name, fusion.evaluate(*tensors, sizes=env), want)
    _compare("split", _run(segments, stages[-1][1], tensors, env), want)


def refuse_capture(device: torch.device) -> None:
    """UnsupportedError while a CUDA graph is captured: the check reads results."""
    if device.type == "cuda" and cuda.capturing():
        todo = "call it outside of torch.cuda.graph, or without FUSION_MOE_CHECK"
        raise UnsupportedError(
            "the option check while a CUDA graph is captured",
            expected="calls whose results can be read",
            todo=todo,
        )


def checked(
    i: int, kernel: Kernel, inputs: list[Any], env: Mapping[str, int], folder: Path | None
) -> tuple[Any, ...]:
    """What the kernel of segment i computes from these inputs, if that is what the segment means.

    FusionError if it is not, with the largest difference, and with a script that raises it again:
    it is written to `folder`, or else to the cache folder.
    """
    if kernel.backend == REFERENCE:
        return kernel(inputs, env)
    # a kernel at fault may write anywhere
    fusion, arguments = kernel.segment.plan.fusion, [t.clone() for t in inputs]
    outputs, want = kernel(inputs, env), fusion.evaluate(*arguments, sizes=env)
    for actual in differences(fusion, arguments, outputs, want, kernel.backend):
        names = list(dict.fromkeys(op.kind.name for op in fusion.ops if not op.kind.view))
        segment = f"segment {i}, `{' '.join(names[:_SHOWN])}{' ...' * (len(names) > _SHOWN)}`"
        path = _reproduction(
            segment, kernel.segment.fusion, arguments, env, folder or store.folder()
        )
        raise FusionError(
            f"{segment}: its kernel [{kernel.segment.kind}, {kernel.backend}] {actual}",
            expected="what the segment means, but for the order of sums and roundings",
            where="check",
            todo=f"python {path} raises this again; it is a bug in fusion_moe, unless a reader of "
            "yours is at fault",
        )
    return outputs


def check_joined(
    fusion: Fusion,
    inputs: Sequence[Any],
    joined: Sequence[Any],
    one_by_one: Sequence[Any],
    backend: str,
) -> None:
    """FusionError if the call of all kernels at once (`joined`) differs from the results of the
    kernels called one by one, by more than the order of sums and roundings explains.
    """
    for actual in differences(fusion, inputs, joined, one_by_one, backend):
        expected = (
            "the results of the same kernels one by one, but for the order of sums and roundings"
        )
        raise FusionError(
            f"all kernels in one call: it {actual}",
            expected=expected,
            todo="this is a bug in fusion_moe",
            where="check",
        )


def differences(
    fusion: Fusion, inputs: Sequence[Any], results: Sequence[Any], want: Sequence[Any], backend: str
) -> Iterator[str]:
    """For each output that differs by more than its arithmetic explains, a sentence with the
    largest difference.

    results: what a kernel of `backend` makes of the inputs; want: what the Fusion means.
    """
    for i, (a, b) in enumerate(zip(results, want, strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield (
                f"returns {a.dtype} {list(a.shape)} as output {i} in place of {b.dtype} "
                f"{list(b.shape)}"
            )
            continue
        off = _beyond(a, b, *_tolerance(fusion, inputs, b, backend))
        if wrong := int((off > 0).sum()):
            at = tuple(int(n) for n in (off == off.max()).nonzero()[0])
            x, y = a[at].item(), b[at].item()
            worst = f"the worst at {list(at)}, off by {abs(x - y):.4g}: {x:.6g} in place of {y:.6g}"
            yield f"gets {wrong} of {b.numel()} elements of output {i} wrong, {worst}"


def _beyond(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """How far each element of a is from b's, if further than tolerated, else 0; infinity where only
    one of them is finite.
    """
    a, b = a.double(), b.double()
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(math.inf))
    return torch.where(off <= rtol * b.abs().nan_to_num(0, 0, 0) + atol, 0.0, off)


def _tolerance(
    fusion: Fusion, inputs: Sequence[Any], want: torch.Tensor, backend: str
) -> tuple[float, float]:
    """rtol and atol of a result, from the arithmetic that makes it. Integers are exact.

    A unit in its last place, and 32 of float32 before, for functions of sums. n terms in another
    order move a sum by about sqrt(n) units of the largest sums, and on tensor cores, which round
    down, by up to n; none has more than twice as many as the largest tensor has in a dimension
    (codes lie in pairs). What is rounded on the way to sums may be rounded the other way.
    """
    if not want.dtype.is_floating_point:
        return 0.0, 0.0
    unit = torch.finfo(torch.float64 if want.dtype == torch.float64 else torch.float32).eps
    terms = 2 * max((n for t in inputs for n in t.shape), default=1)
    of_sums = unit * math.sqrt(terms) if backend == "cpu" else min(unit * terms, 2.0**-8)
    finite = want.double().nan_to_num(0, 0, 0).abs()
    largest = finite.max().item() if want.numel() else 0.0
    return max(torch.finfo(want.dtype).eps, 32 * unit), largest * (
        of_sums + _rounding_inside(fusion, backend)
    )


def _rounding_inside(fusion: Fusion, backend: str) -> float:
    """A unit of the narrowest numbers to which values are rounded on the way to a Fusion's outputs,
    relative to these; 0 if none are.
    """
    inside = [op for op in fusion.ops if not set(op.outputs) & set(fusion.outputs)]
    units = [
        torch.finfo(DTYPES[op.attrs["dtype"]]).eps
        for op in inside
        if op.kind.name == "cast" and op.attrs["dtype"] in ("bf16", "f16")
    ]
    units += [2.0**-5 for op in inside if op.kind.name == "quantize"]
    if backend != "cpu":
        products = (op for op in fusion.ops if op.kind.role == "grouped")
        units += [_rounding_of_weights(op, backend) for op in products]
    return max(units, default=0.0)


def _rounding_of_weights(product: Op, backend: str) -> float:
    """A unit of the activations, to whose dtype tensor cores' weights are converted; 0 if it holds
    every code times its scale. Backends of packages may round all to 16 bits.
    """
    activations, weights = (DTYPES.get(v.type.dtype) for v in product.values[:2])
    if backend not in ("cuda", "reference"):
        return 2.0**-7
    if weights is not None or activations is None or not activations.is_floating_point:
        return 0.0  # both operands are numbers as they are stored
    unit = torch.finfo(activations).eps
    return unit if _digits(find(product.values[1].type.dtype)) > 1 - math.log2(unit) else 0.0


@cache
@real_tensors()
def _digits(encoding: Encoding) -> float:
    """How many significant binary digits a code times its first scale may have."""
    element, scale = encoding.element, encoding.scales[0].dtype
    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    numbers = element.decode(codes) if element.decode else codes.view(element.dtype).float()
    whole = numbers[numbers.isfinite() & (numbers != 0)].frexp().mantissa.mul(2**24).int()
    return 24 - math.log2((whole & -whole).min().item()) + 1 - math.log2(torch.finfo(scale).eps)


def _reproduction(
    title: str, fusion: Fusion, inputs: Sequence[Any], env: Mapping[str, int], folder: Path
) -> Path:
    """Writes a script that compiles a segment by itself, and its inputs beside it. Returns its
    path.
    """
    program, device = text(fusion), inputs[0].device.type if inputs else "cpu"
    stem = f"check-{store.key_of(program, title)[:12]}"
    script, saved = folder / f"{stem}.py", folder / f"{stem}.pt"
    sizes, held = {s: env[s] for s in fusion.symbols}, io.BytesIO()
    torch.save(inputs, held)
    content = _SCRIPT.format(
        title=title,
        program=program,
        inputs=str(saved),
        options=options.current().key(),
        device=device,
        sizes=sizes,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for path, data in (saved, held.getvalue()), (script, content.encode()):
        path.touch(mode=0o600)  # what a model computes is this user's
        path.write_bytes(data)
    return script


def _run(
    segments: Sequence[Segment], fusion: Fusion, tensors: Sequence[Any], env: Mapping[str, int]
) -> tuple[Any, ...]:
    results: dict[Value, Any] = dict(zip(fusion.inputs, tensors, strict=True))
    for s in segments:
        results.update(
            zip(
                s.fusion.outputs,
                s.fusion.evaluate(*(results[v] for v in s.fusion.inputs), sizes=env),
                strict=True,
            )
        )
    return tuple(results[v] for v in fusion.outputs)


def _compare(stage: str, got: Sequence[Any], want: Sequence[Any]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if not torch.equal(_bits(a), _bits(b)):
            raise FusionError(
                f"output {i} after {stage} differs",
                expected="the same bits as before it",
                todo="this is a bug in fusion_moe",
                where=stage,
            )


def _bits(x: torch.Tensor) -> torch.Tensor:
    """x as bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    return x.contiguous().unsqueeze(-1).view(torch.uint8)
