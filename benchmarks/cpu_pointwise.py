"""Fused is never slower than what it replaces, on a CPU: every pointwise operation of the IR after
a product, and the activations of all families of models between the products of experts.

    python benchmarks/cpu_pointwise.py                   all; exits with 1 if one takes more than
                                                         1.05 of the time of eager torch
    python benchmarks/cpu_pointwise.py --only gelu       those whose label matches

Ratios are the least time of the fused program over the least of eager torch: of many rounds, in
turns, in one process.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

import fusion_moe
from fusion_moe import FusionDefinition
from fusion_moe.ir.core import Fusion, OpKind
from fusion_moe.ir.kinds.pointwise import TABLE
from fusion_moe.ir.types import DTYPES
from fusion_moe.nn import activation
from fusion_moe.nn.frozen.custom import in_steps

MOST = 1.05
ROWS, WIDTH = 512, 1024
E, H, I, T, K = 8, 512, 512, 64, 2  # of experts
Call = Callable[[], object]
ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], int]] = {  # with the number of its parts
    "swiglu": (lambda gate, up: F.silu(gate) * up, 2),
    "swiglu, clamped": (lambda gate, up: F.silu(gate.clamp(max=7)) * up.clamp(-7, 7), 2),
    "gpt-oss": (
        lambda gate, up: (
            (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid()
        ),
        2,
    ),
    "geglu, tanh": (lambda gate, up: F.gelu(gate, approximate="tanh") * up, 2),
    "geglu, erf": (lambda gate, up: F.gelu(gate) * up, 2),
    "mish": (lambda gate, up: F.mish(gate) * up, 2),
    "squared relu": (lambda up: F.relu(up).square(), 1),
    "situ": (
        lambda gate, up: 30 * torch.tanh(gate / 30) * gate.sigmoid() * (30 * torch.tanh(up / 30)),
        2,
    ),
}


def kinds() -> Iterator[tuple[str, Call, Call]]:
    """A product and each pointwise operation of its result: label, fused, eager."""
    x, w = torch.rand(ROWS, 64).bfloat16(), torch.rand(E, WIDTH, 64).bfloat16()
    offs = torch.arange(1, E + 1, dtype=torch.int32) * (ROWS // E)
    for kind in TABLE:
        for dtype in ("f32", "bf16"):
            product = partial(
                torch.ops.fusion_moe.grouped_mm,
                x,
                [w],
                offs,
                weight_format="bf16",
                out_dtype=DTYPES[dtype],
            )
            fused = partial(fusion_moe.run, _after_a_product(kind, dtype), [x, w, offs])
            yield f"{kind.name} {dtype}", fused, partial(_eager, kind, product, dtype)


def _after_a_product(kind: OpKind, dtype: str) -> Fusion:
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[ROWS, 64], dtype="bf16")
    w = fd.define_tensor(shape=[E, WIDTH, 64], dtype="bf16", role="weight")
    ends = fd.groups_of(fd.define_tensor(shape=[E], dtype="i32"), ROWS)
    y = fd.ops.cast(fd.ops.grouped_mm(fd.partition_by(x, ends), w, ends), dtype=dtype)
    operands = [fd.ops.gt(y, 16.0) if masked else y for masked in _masks(kind)]
    fd.add_output(fd.append(kind, operands, _attributes(kind, dtype))[0])
    return fd.fusion()


def _eager(kind: OpKind, product: Callable[[], Tensor], dtype: str) -> object:
    y = product()
    operands = [y > 16.0 if masked else y for masked in _masks(kind)]
    return kind.evaluate(*operands, **_attributes(kind, dtype))


def _masks(kind: OpKind) -> list[bool]:
    """For each operand, whether it is a mask."""
    count = kind.signature.operands or 1
    return [
        kind.name.startswith("logical") or (kind.name == "where" and i == 0) for i in range(count)
    ]


def _attributes(kind: OpKind, dtype: str) -> dict[str, str]:
    return {"dtype": "bf16" if dtype == "f32" else "f32"} if kind.name == "cast" else {}


def layers() -> Iterator[tuple[str, Call, Call]]:
    """Experts with each activation, as one program; eager: the function between two products."""
    ops = torch.ops.fusion_moe
    w, ids = torch.randn(T, E).softmax(-1).bfloat16().topk(K)
    x = torch.randn(T, H).bfloat16()
    for name, (function, parts) in ACTIVATIONS.items():
        up, down = ((torch.randn(E, *s) / 16).bfloat16() for s in ((parts * I, H), (H, I)))
        text = activation(function, parts)
        fused = partial(
            ops.fused_experts, x, ids, w, [up], [down], activation=text, weight_format="bf16"
        )
        products = (
            lambda rows, ends, weight=weight: ops.grouped_mm(
                rows, [weight], ends, weight_format="bf16"
            )
            for weight in (up, down)
        )
        module = SimpleNamespace(
            has_gate=True, _apply_gate=lambda y, f=function, n=parts: f(*y.chunk(n, 1))
        )
        yield f"experts {name}", fused, partial(in_steps, module, x, ids, w, E, *products)


def ratio(fused: Call, eager: Call, rounds: int) -> float:
    """The least time of the fused call over that of the eager one."""
    least = [float("inf"), float("inf")]
    for call in (fused, eager) * 2:
        call()
    for _ in range(rounds):
        for i, call in enumerate((fused, eager)):
            start = time.perf_counter()
            call()
            least[i] = min(least[i], time.perf_counter() - start)
    return least[0] / least[1]


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for labels")
    parser.add_argument("--rounds", type=int, default=200)
    told, slow = parser.parse_args(), []
    for cases in (kinds(), layers()):
        for label, fused, eager in cases:
            if re.search(told.only, label):
                found = ratio(fused, eager, told.rounds)
                print(f"{label:<40} {found:5.2f}x", flush=True)
                slow += [label] if found > MOST else []
    print(f"more than {MOST}x of eager torch: {', '.join(slow) or 'none'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
