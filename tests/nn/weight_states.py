"""Modules of each kind, and what they keep of their weights: state dicts, bytes in memory, results.

`made/states.pt` has these, as of the release before weights became values of their own. To make it
again: `python tests/nn/weight_states.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusion_moe
from fusion_moe.encodings import INT4, MXFP4, NVFP4, Encoding, Quantized, find, quantize
from fusion_moe.integrations.distributed.shares import keep_experts, keep_features
from fusion_moe.nn import Experts, NVFP4GroupedLinear, QuantizedLinear, swiglu
from fusion_moe.nn.frozen.packed import PackedModule

FILE = Path(__file__).parent / "made" / "states.pt"
E, H, I, T = 2, 80, 48, 5  # no whole tiles of CUDA's layout


def _weight(encoding: Encoding, *shape: int, runs: int = 1) -> Quantized:
    """Random numbers; with as many scales of a matrix as runs, if it has any."""
    *lead, n, k = shape
    numbers = torch.randn(*lead, runs, n // runs, k, generator=torch.Generator().manual_seed(n))
    made = quantize(numbers, encoding)
    if runs == 1:
        return made.of(t[..., 0] if p.of_matrix else t.flatten(-3, -2) for p, t in made.named())
    return made.of(t if p.of_matrix else t.flatten(-3, -2) for p, t in made.named())


def _experts(encoding: str, h: int = H, i: int = I, **more: Any) -> Experts:
    of = find(encoding)
    return Experts(_weight(of, E, 2 * i, h, runs=2), _weight(of, E, h, i), **more)


def _with_biases() -> Experts:
    up, down = torch.arange(4.0 * I).view(E, -1), torch.arange(2.0 * H).view(E, -1)
    return _experts(
        "nvfp4", gate_up_bias=up, down_bias=down, activation=swiglu(16, 7.0, up_offset=1.0)
    )


def _ungated() -> Experts:
    relu = fusion_moe.nn.activation(lambda up: up.relu(), 1)
    return Experts(_weight(NVFP4, E, I, H), _weight(NVFP4, E, H, I), activation=relu)


KINDS: dict[str, Callable[[], PackedModule]] = {
    "nvfp4": lambda: _experts("nvfp4"),
    "mxfp4": lambda: _experts("mxfp4", 64, 96),
    "int4": lambda: _experts("int4", 128, 128),
    "nf4": lambda: _experts("nf4", 64, 64),
    "fp8": lambda: _experts("fp8", 32, 64),
    "tiles": lambda: _experts("nvfp4", 64, 64),
    "fp8_e8m0": lambda: _experts("fp8_e8m0", 32, 256),
    "bf16": lambda: _experts("bf16", 32, 32),
    "biases": _with_biases,
    "ungated": _ungated,
    "grouped": lambda: NVFP4GroupedLinear(_weight(NVFP4, E, 40, H), torch.ones(E, 40)),
    "linear": lambda: QuantizedLinear(_weight(NVFP4, 40, H), torch.ones(40)),
    "linear_mxfp4": lambda: QuantizedLinear(_weight(MXFP4, 40, 96)),
    "linear_int4": lambda: QuantizedLinear(_weight(INT4, 40, 128)),
}
SHARES: dict[str, Callable[[Any], None]] = {
    "": lambda module: None,
    "experts": lambda module: keep_experts(module, 1, 2),
    "features": lambda module: keep_features(module, 1, 2),
}
WEIGHTS = "packed", "fp8", "both"
TARGETS = "cpu", "cuda"


def cases() -> Iterator[tuple[str, PackedModule]]:
    """Each kind of module, with all of its weights or a share of them."""
    for kind, make in KINDS.items():
        for share, keep in SHARES.items():
            module = make()
            if not share or isinstance(module, Experts):
                if share == "features" and module.encoding.block * 2 > module.shape_of("down")[2]:
                    continue  # of one block
                keep(module)
                yield f"{kind} {share}".strip(), module


def plain(t: Any) -> Tensor:
    """A tensor of a state dict; of a share of features, what is here."""
    t = getattr(t, "of_rank", t)
    return t.detach().as_subclass(Tensor).clone()


def state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict, as tensors in files."""
    return {name: plain(t) for name, t in module.state_dict().items()}


def stored(module: nn.Module) -> dict[str, str]:
    """What is in memory: a hash of each parameter and buffer."""
    own = {**module._parameters, **module._buffers}
    return {name: _hash(t) for name, t in own.items() if t is not None}


def result(module: PackedModule) -> str:
    """A hash of what the reference computes."""
    k = module.matrix_shape(next(iter(module.part_names)))[1]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(T, k, generator=g).bfloat16()
    first = getattr(module, "first_expert", None) or 0
    args: tuple[Tensor, ...] = ()
    if isinstance(module, Experts):
        ids = torch.randint(0, E, (T, 2), generator=g) + first
        args = ids, torch.rand(T, 2, generator=g)
    elif isinstance(module, NVFP4GroupedLinear):
        args = (torch.tensor([2, T], dtype=torch.int32),)
    with fusion_moe.options.override(target="reference"):
        return _hash(module(x, *args))


def prepared(module: PackedModule, weights: str) -> dict[str, Any]:
    """What is in memory of a module that reads its weights so, for each target, and the result."""
    found: dict[str, Any] = {}
    for target in TARGETS:
        fusion_moe.prepare_(module, target, weights=weights)
        found[target] = stored(module)
    return found | {"result": result(module)}


def _hash(t: Tensor) -> str:
    t = t.detach().as_subclass(Tensor).contiguous().reshape(-1)
    return hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Writes the file."""
    found = {
        name: {"state": state(module)} | {weights: prepared(module, weights) for weights in WEIGHTS}
        for name, module in cases()
    }
    FILE.parent.mkdir(exist_ok=True)
    torch.save(found, FILE)
    print(f"{len(found)} modules, {FILE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
