"""State dicts changed at random. A module loads one and then holds its numbers, or refuses it with
an error of torch's or ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, note
from torch import Tensor, nn

from fusion_moe import encodings, options
from fusion_moe.errors import Error
from fusion_moe.nn import (
    Experts,
    GroupedLinear,
    NVFP4Experts,
    NVFP4GroupedLinear,
    QuantizedLinear,
    ScaledSwiGLU,
    Sequential,
    add_lora_,
)
from fusion_moe.nn.frozen.packed import PackedModule

from . import NUMBERS, examples
from .case import REFERENCE
from .compare import outcome

pytestmark = [pytest.mark.once, pytest.mark.slow]

State = dict[str, Any]
E, H, I = 2, 32, 32  # experts; columns of tokens; of what is between the products
_SCALES = {
    encodings.NVFP4: (16, torch.float8_e4m3fn, 40),
    encodings.MXFP4: (32, torch.float8_e8m0fnu, 120),
}
_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)


def _weight(encoding: encodings.Encoding, n: int, k: int) -> encodings.Quantized:
    """Any codes, with scales of a trained weight's size."""
    block, dtype, middle = _SCALES[encoding]
    codes = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8)
    scale = torch.randint(middle, middle + 6, (E, n, k // block), dtype=torch.uint8).view(dtype)
    return encodings.Quantized(
        codes, scale, *[torch.rand(E)] * (encoding is encodings.NVFP4), encoding=encoding
    )


def _with_lora() -> nn.Module:
    model = nn.ModuleDict({"experts": _experts()})
    add_lora_(model, rank=2)
    return model


def _experts() -> NVFP4Experts:
    return NVFP4Experts.from_float(torch.randn(E, 2 * I, H) / 6, torch.randn(E, H, I) / 6)


MODULES: tuple[Callable[[], nn.Module], ...] = (
    _experts,
    _with_lora,
    lambda: Experts(_weight(encodings.MXFP4, 2 * I, H), _weight(encodings.MXFP4, H, I)),
    lambda: Experts(
        *(
            encodings.Quantized(torch.randn(E, n, k), encoding=encodings.F32)
            for n, k in ((2 * I, H), (H, I))
        )
    ),
    lambda: QuantizedLinear(
        encodings.Quantized(
            *torch.ops.fusion_moe.nvfp4_quantize(torch.randn(I, H)), encoding=encodings.NVFP4
        )
    ),
    lambda: NVFP4GroupedLinear.from_float(torch.randn(E, I, H)),
    lambda: GroupedLinear(E, H, I),
    lambda: GroupedLinear(E, H, I, single_grouped_weight=True),
    lambda: Sequential(GroupedLinear(E, H, 2 * I), ScaledSwiGLU(), GroupedLinear(E, I, H)),
)


_SHAPES: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t.mT,
    lambda t: t[None],
    lambda t: t[:0],
    lambda t: t[:1],
    lambda t: t.flatten(),
    lambda t: t.reshape(-1)[0],
    lambda t: t[..., :-1],
    lambda t: torch.cat([t, t]),
    lambda t: t.unflatten(-1, (2, -1)),
    lambda t: t.new_empty(0, 2**40),
)
_OBJECTS: tuple[Callable[[Tensor], Any], ...] = (
    *((lambda t, v=v: v) for v in (None, 1, 1.5, "text", [1.0], {}, b"bytes")),
    lambda t: (t, t),
    lambda t: t.tolist() if t.numel() < 100 else 0,
)
_KINDS: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: t[:1].expand(t.shape),
    lambda t: nn.Parameter(t, requires_grad=t.is_floating_point()),
    lambda t: t.mT.contiguous().mT,
    lambda t: t.float().numpy(),
)


def changed(rng: Random, state: State) -> None:
    """Changes one entry."""
    key = rng.choice(sorted(state) or [""])
    t = state.pop(key, None)
    names = (f"{key}0", f"{key}_", key.upper(), f"{key}_decode_scale", "weight", "weight0", "", ".")
    ways: tuple[Callable[[], State], ...] = (
        dict,
        lambda: {key: t, rng.choice(names): t},
        lambda: {rng.choice(names): t},
        lambda: _swapped(key, t, rng.choice(sorted(state)), state),
        lambda: {key: t.view(rng.choice(_DTYPES))},
        lambda: {key: t.to(rng.choice(_DTYPES))},
        lambda: {key: _with_a_value(rng, t)},
        *(lambda some=some: {key: rng.choice(some)(t)} for some in (_SHAPES, _OBJECTS, _KINDS)),
    )
    if isinstance(t, Tensor):
        new = outcome(rng.choice(ways))
        state.update({key: t} if isinstance(new, Exception) else new)


def _swapped(key: str, t: Any, other: str, state: State) -> State:
    return {key: state[other], other: t}


def _with_a_value(rng: Random, t: Tensor) -> Tensor:
    """A tensor with one element changed."""
    new = t.clone(memory_format=torch.contiguous_format)
    at = rng.randrange(new.numel())
    if new.dtype.itemsize == 1:
        new.reshape(-1).view(torch.uint8)[at] = rng.choice((0, 127, 128, 255, 254))
    else:
        special = (float("nan"), float("inf"), -1.0, 0.0, 1e30)
        new.view(-1)[at] = rng.choice(special if new.is_floating_point() else (0, -1, 1))
    return new


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")  # as torch loads floats
@given(NUMBERS)
@examples(8)
def test_state_dicts_are_loaded_or_refused(rng):
    torch.manual_seed(rng.getrandbits(32))
    with options.using(REFERENCE), torch.no_grad():
        make = rng.choice(MODULES)
        module, state = make(), make().state_dict()
        for part in module.modules():
            if isinstance(part, PackedModule) and rng.random() < 0.4:
                outcome(lambda part=part: part.reform(layout="w16x64"))  # which some cannot have
        before = {key: _form(t) for key, t in module.state_dict().items()}
        plain = dict(state)
        for _ in range(rng.choice((1, 1, 2, 4))):
            changed(rng, state)
        how = {"strict": rng.random() < 0.8, "assign": rng.random() < 0.1}
        keys = [key for key in (*plain, *state) if state.get(key) is not plain.get(key)]
        note(f"{module} {how} {[(key, state.get(key)) for key in keys]}")
        check(module, state, how, before)


def check(module: nn.Module, state: State, how: dict[str, bool], before: Mapping[str, Any]) -> None:
    """Loads a state dict: the module keeps its form, and holds what it was given or refuses it."""
    loaded = outcome(lambda: module.load_state_dict(state, **how))
    if isinstance(loaded, Exception):
        assert isinstance(loaded, Error) or type(loaded) is RuntimeError, loaded
    after = module.state_dict()
    assert how["assign"] or {key: _form(t) for key, t in after.items()} == before
    if not isinstance(loaded, Exception) and how["strict"]:
        for key in after.keys() & state.keys():
            assert _same(after[key], state[key]), key


def _form(t: Any) -> Any:
    return (t.dtype, tuple(t.shape)) if isinstance(t, Tensor) else t


def _same(a: Tensor, b: Any) -> bool:
    """Whether a parameter holds what was given: the bytes, or the numbers as its dtype has them.
    torch takes [1] for [].
    """
    b = b[0] if isinstance(b, Tensor) and a.dim() == 0 and b.shape == (1,) else b
    if not isinstance(b, Tensor) or a.shape != b.shape or a.is_meta or b.is_meta:
        return isinstance(b, Tensor) and a.shape == b.shape
    a, b = (t.to_dense() if t.is_sparse else t for t in (a, b))
    if a.dtype.itemsize == 1 and b.dtype.itemsize == 1:
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return torch.equal(a.nan_to_num(7.0), b.to(a.dtype).nan_to_num(7.0))
