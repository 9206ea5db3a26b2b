"""What calibration on data saves of the loss of quantized experts, beside the search without data:
the small real model, on two held-out texts, calibrated on several texts.

    python benchmarks/calibration.py [--encoding nvfp4] [--texts NAMES] [-- METHODS]

One pass over a calibration text collects, for each expert and each projection, the sum H of x x^T
over its input rows x. Methods differ in how they use it; the bytes and the format stay:

    weighted     the scale of a block is that of least error weighted by H's diagonal
    gptq         columns are rounded one by one, and each error is made up for in the columns after
                 it (Frantar et al., "GPTQ"); scales by "mse", of the float weight
    all experts  by the sum of H over the experts of a layer
    routed       rows weighted by their routing weights
    as it goes   the scale of a block is that of what its weights are by then
    damped       by so many times the mean of H's diagonal, 0.01 otherwise
    decode       without data: scales of matrices are searched too

A change is against the search without data, "mse", by the difference of both losses of each token;
the interval holds 95 %. Calibration texts: three of CPython's library, of those files that the
model was trained on, about 100 kB each; this repository's documentation; and tokens at random.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quality import LAST, MODEL, _change, load_heldout, plain
from torch import Tensor, nn
from transformers import AutoTokenizer

from fusion_moe.encodings import (
    ENCODINGS,
    Encoding,
    Quantized,
    dequantize,
    matrix_scale_of,
    quantize as encode,
)
from fusion_moe.integrations.transformers.evaluation import Evaluation, evaluate, windows_of
from fusion_moe.nn.conversion.contract import contract_of, experts_from

BYTES = 100_000


# Calibration --------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Of a projection of a layer: H f32 [E, K, K], routed or not, and how many rows f32 [E]."""

    plain: Tensor
    routed: Tensor
    rows: Tensor

    @classmethod
    def none(cls, e: int, k: int) -> Inputs:
        return cls(torch.zeros(e, k, k), torch.zeros(e, k, k), torch.zeros(e))

    def add(self, e: int, x: Tensor, routing: Tensor) -> None:
        x = x.float()
        self.plain[e] += x.T @ x
        self.routed[e] += (x * routing[:, None].square()).T @ x
        self.rows[e] += len(x)


def experts_of(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, m) for name, m in model.named_modules() if contract_of(m)]


@torch.inference_mode()
def collected(windows: Sequence[Tensor]) -> list[tuple[Inputs, Inputs]]:
    """For each layer, of both projections, from one pass."""
    model, found = plain(), list[tuple[Inputs, Inputs]]()

    def hook(both: tuple[Inputs, Inputs], module: Any, args: Any) -> None:
        x, index, routing = args[0].flatten(0, -2), args[1], args[2]
        for e in range(len(module.gate_up_proj)):
            row, place = torch.where(index == e)
            if len(row):
                weight = routing[row, place].float()
                made = module._apply_gate(x[row] @ module.gate_up_proj[e].T)
                both[0].add(e, x[row], weight), both[1].add(e, made, weight)

    for _, m in experts_of(model):
        e, hidden, intermediate = m.down_proj.shape
        found.append((Inputs.none(e, hidden), Inputs.none(e, intermediate)))
        m.register_forward_pre_hook(functools.partial(hook, found[-1]))
    for window in windows:
        model(input_ids=window[None], use_cache=False)
    return found


def texts_of(seed: int) -> list[str]:
    """About 100 kB of files of the running interpreter's library, none of them held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    random.Random(seed).shuffle(files)
    found, size = list[str](), 0
    for file in files:
        held = int.from_bytes(hashlib.sha256(file.name.encode()).digest()) % 50 < 2
        if held or "site-packages" in file.parts or not 2000 < file.stat().st_size < 40_000:
            continue
        found.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(found[-1])
        if size > BYTES:
            break
    return found


def calibrations() -> Iterator[tuple[str, list[Tensor]]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def windows(texts: Sequence[str]) -> list[Tensor]:
        return [w[:-1] for text in texts for w, n in windows_of(tokenizer, text, 1024)][::2]

    for seed in range(3):
        yield f"library {seed + 1}", windows(texts_of(seed))
    docs = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
    yield "prose", windows([file.read_text()[:20_000] for file in docs])[:40]
    draw = torch.Generator().manual_seed(0)
    yield "random tokens", [torch.randint(1, 2048, (1024,), generator=draw) for _ in range(32)]


# Methods ------------------------------------------------------------------------------------------


def rounded_by(
    w: Tensor,
    h: Tensor | None,
    encoding: Encoding,
    *,
    weights: bool = False,
    feedback: bool = False,
    live: bool = False,
    searched: bool = True,
    damp: float = 0.01,
    decode: Tensor | None = None,
) -> Quantized:
    """w f32 [E, N, K], one run; h [E, K, K]."""
    scale, element = encoding.scales[0], encoding.element
    e, _, k = w.shape
    assert element.nearest
    assert element.encode
    if decode is None and len(encoding.scales) > 1:
        decode = matrix_scale_of(w, encoding)
    outer = torch.ones(e, 1) if decode is None else decode[:, None]
    w, made, codes = w.clone(), list[Tensor](), list[Tensor]()
    original = w.clone()
    upper = _upper(h, damp) if feedback and h is not None else None
    diagonal = None if h is None or not weights else h.diagonal(dim1=-2, dim2=-1)
    for start in range(0, k, scale.block):
        some = slice(start, start + scale.block)
        of = (w if live else original)[..., some]
        per = None if diagonal is None else diagonal[:, None, some]
        block = _chosen(of, outer, encoding, per, searched)
        step = block.float() * outer
        made.append(block)
        for j in range(start, start + scale.block):
            number = element.nearest(w[..., j] / step)
            codes.append(element.encode(number))
            if upper is not None:
                wrong = (w[..., j] - number * step) / upper[:, j, j, None]
                w[..., j + 1 :] -= wrong[..., None] * upper[:, j, None, j + 1 :]
    each = torch.stack(codes, -1)
    packed = each[..., ::2] | each[..., 1::2] << 4
    parts = [packed, torch.stack(made, -1)] + ([] if decode is None else [decode])
    return Quantized(*parts, encoding=encoding)


def _chosen(
    x: Tensor, outer: Tensor, encoding: Encoding, per: Tensor | None, searched: bool
) -> Tensor:
    """The scales [E, N] of blocks x [E, N, block] of least error, weighted by per [E, 1, block]."""
    scale, element = encoding.scales[0], encoding.element
    assert element.nearest
    kind = {1: torch.uint8, 2: torch.int16}[scale.dtype.itemsize]
    amax, best, least = x.abs().amax(-1), None, None
    for factor, offset in ((1.0, 0), *(scale.others["mse"] if searched else ())):
        bits = scale.rounded(amax * factor, outer).view(kind).short() + offset
        lowest, highest = (1, 126) if scale.dtype == torch.float8_e4m3fn else (1, 32000)
        made = bits.clamp(lowest, min(highest, 254) if kind == torch.uint8 else highest)
        made = made.to(kind).view(scale.dtype)
        step = (made.float() * outer)[..., None]
        error = (element.nearest(x / step) * step - x).square()
        error = (error if per is None else error * per).sum(-1)
        if best is None or least is None:
            best, least = made.view(kind), error
        else:
            best = torch.where(error < least, made.view(kind), best)
            least = torch.minimum(error, least)
    assert best is not None
    return best.view(scale.dtype)


def _upper(h: Tensor, damp: float) -> Tensor:
    """The upper factor of the inverse of h [E, K, K]; experts without rows: as without data."""
    h = h.double()
    mean = h.diagonal(dim1=-2, dim2=-1).mean(-1)
    mean = torch.where(mean == 0, 1.0, mean)
    h = h + torch.eye(h.shape[-1]).double() * (damp * mean)[:, None, None]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True).float()


def quantized_by(
    inputs: Sequence[tuple[Inputs, Inputs]] | None, encoding: Encoding, **how: Any
) -> Any:
    """The model with experts in an encoding."""
    model = plain()
    shared, routed = how.pop("shared", False), how.pop("routed", False)
    search = how.pop("search", False)
    for i, (name, m) in enumerate(experts_of(model)):
        found = []
        for j, parameter in enumerate((m.gate_up_proj, m.down_proj)):
            w, h = parameter.detach().float(), None
            if inputs is not None:
                h = inputs[i][j].routed if routed else inputs[i][j].plain
                h = h.sum(0, keepdim=True).expand_as(h) if shared else h
            runs = [
                rounded_by(
                    run,
                    h,
                    encoding,
                    decode=searched_decode(run, encoding) if search else None,
                    **how,
                )
                for run in w.chunk(2 - j, 1)
            ]
            parts = []
            for part, *tensors in zip(encoding.parts, *runs, strict=True):
                of_matrix = part.of_matrix
                parts.append(torch.stack(tensors, -1) if of_matrix else torch.cat(tensors, 1))
            found.append(Quantized(*parts, encoding=encoding))
        model.set_submodule(name, experts_from(m, *found))
    return model


def searched_decode(w: Tensor, encoding: Encoding) -> Tensor:
    """Of the scales of matrices w f32 [E, N, K] from 2^-1/2 to 2^1/2 times the usual one, those of
    least error, f32 [E].
    """
    usual = matrix_scale_of(w, encoding)
    tried = torch.stack([usual * 2 ** (i / 8) for i in (0, *range(-4, 0), *range(1, 5))])
    errors = [
        (dequantize(encode(w, encoding, scale, "mse")) - w).square().sum((1, 2)) for scale in tried
    ]
    return tried.gather(0, torch.stack(errors).argmin(0, keepdim=True))[0]


def share(inputs: Sequence[tuple[Inputs, Inputs]], encoding: Encoding, count: int) -> float:
    """How much of all error in projections' results so many experts have, those with the most."""
    found, rule = list[Tensor](), encoding.scales[0].usual
    for (_, m), both in zip(experts_of(plain()), inputs, strict=True):
        shares = torch.zeros(len(m.down_proj))
        for j, (parameter, of) in enumerate(zip((m.gate_up_proj, m.down_proj), both, strict=True)):
            w = parameter.detach().float()
            made = [dequantize(encode(run, encoding, scales=rule)) for run in w.chunk(2 - j, 1)]
            wrong = torch.cat(made, 1) - w
            shares += ((wrong @ of.plain) * wrong).sum((1, 2)) / ((w @ of.plain) * w).sum()
        found.append(shares)
    each = torch.cat(found)
    return float(each.topk(count).values.sum() / each.sum())


METHODS: dict[str, dict[str, Any]] = {
    "decode": {"search": True},
    "weighted": {"weights": True},
    "weighted, all experts": {"weights": True, "shared": True},
    "weighted, routed": {"weights": True, "routed": True},
    'gptq, scales="max"': {"feedback": True, "searched": False},
    "gptq": {"feedback": True},
    "gptq, all experts": {"feedback": True, "shared": True},
    "gptq, weighted": {"feedback": True, "weights": True},
    "gptq, as it goes": {"feedback": True, "live": True},
    "gptq, routed": {"feedback": True, "routed": True},
    "gptq, damped 0.1": {"feedback": True, "damp": 0.1},
    "gptq, damped 1": {"feedback": True, "damp": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="METHODS")
    parser.add_argument("--encoding", default="nvfp4")
    parser.add_argument("--texts", nargs="*")
    arguments = parser.parse_args()
    encoding = ENCODINGS[arguments.encoding]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    parts = [load_heldout(max_bytes=90_000), load_heldout()[-LAST:]]

    def scored(model: Any) -> list[Evaluation]:
        return [evaluate(model, tokenizer, texts) for texts in parts]

    base = scored(quantized_by(None, encoding))
    print("| calibrated on | method | first text | second text |\n| --- | --- | --- | --- |")
    for text, windows in calibrations():
        if arguments.texts and text not in arguments.texts:
            continue
        inputs = collected(windows)
        print(f"| {text} | error of 4 experts, of 9 | {share(inputs, encoding, 4):.0%} |", end=" ")
        print(f"{share(inputs, encoding, 9):.0%} |", flush=True)
        for name, how in METHODS.items():
            if arguments.names and name not in arguments.names:
                continue
            found = scored(quantized_by(inputs, encoding, **how))
            changes = (_change(a.losses, b.losses) for a, b in zip(found, base, strict=True))
            print(f"| {text} | {name} |", " | ".join(changes), "|", flush=True)


if __name__ == "__main__":
    main()
