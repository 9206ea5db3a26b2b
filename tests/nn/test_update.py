"""update_weights_: new weights at the old addresses, in every layout, and what an error leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from experts import copied, experts, float_weights, routed, same_state
from test_quantize import qwen3_moe
from torch import Tensor, nn

import fusion_moe
from fusion_moe import update_weights_
from fusion_moe.encodings import (
    BF16,
    FP8,
    FP8_E8M0,
    INT4,
    MXFP4,
    NVFP4,
    Encoding,
    dequantize,
    quantize,
)
from fusion_moe.errors import (
    CheckpointError,
    DtypeError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
)
from fusion_moe.nn import (
    Experts,
    GroupedSwiGLU,
    NVFP4Experts,
    QuantizedLinear,
    add_lora_,
    merge_lora_,
    swiglu,
)
from fusion_moe.nn.frozen import weight as conversion
from fusion_moe.nn.frozen.weight import rounded

E, H, I = 3, 64, 96
NAMES = ("gate_up_proj", "down_proj")


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> dict[str, Tensor]:
    made = float_weights(E, H, I, seed)
    return {name: t.to(dtype) for name, t in zip(NAMES, made, strict=True)}


def addresses(module: nn.Module) -> list[int]:
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


def equal(module: nn.Module, fresh: nn.Module, *args: Tensor) -> bool:
    """The same state, and the same results in the same layout."""
    layout = next(m.weight_layout for m in module.modules() if hasattr(m, "weight_layout"))
    fusion_moe.prepare_(fresh, "cuda" if layout == "w16x64" else "cpu")
    return same_state(module.state_dict(), fresh.state_dict()) and torch.equal(
        module(*args), fresh(*args)
    )


@pytest.mark.parametrize("layout", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("panel", [1, 2**24])
def test_numbers(layout, dtype, panel, monkeypatch):
    monkeypatch.setattr(conversion, "_PANEL", panel)
    module, new = experts(E, H, I), weights(dtype)
    fusion_moe.prepare_(module, layout)
    before = addresses(module)
    module(*routed(E, H))
    update_weights_(module, new)
    assert addresses(module) == before
    assert equal(module, NVFP4Experts.from_float(*new.values()), *routed(E, H))


@pytest.mark.parametrize("layout", ["cpu", "cuda"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_parts(layout, as_bytes):
    module, fresh = experts(E, H, I), experts(E, H, I, seed=7)
    fusion_moe.prepare_(module, layout)
    before = addresses(module)
    state = {
        name: t.view(torch.uint8) if as_bytes and t.dtype.itemsize == 1 else t
        for name, t in fresh.state_dict().items()
    }
    update_weights_(module, state)
    assert addresses(module) == before
    assert equal(module, fresh, *routed(E, H))


@pytest.mark.parametrize("encoding", [MXFP4, INT4, BF16, NVFP4], ids=lambda e: e.name)
@pytest.mark.parametrize("layout", ["cpu", "cuda"])
@pytest.mark.parametrize("interleave", [0, 1])
def test_encodings_with_padding_biases_and_one_scale(
    encoding: Encoding, layout: str, interleave: int
) -> None:
    """Rows of gate and up may take turns, and one scale may be for both."""

    def made(seed: int) -> Experts:
        up, down = (quantize(t.bfloat16(), encoding) for t in float_weights(E, H, I, seed))
        g = torch.Generator().manual_seed(seed)
        biases = torch.randn(E, 2 * I, generator=g), torch.randn(E, H, generator=g)
        how = {"gate_up_bias": biases[0], "down_bias": biases[1]}
        return Experts(up, down, activation=swiglu(interleave, limit=7.0), **how)

    module, fresh = made(0), made(7)
    fusion_moe.prepare_(module, layout)
    before = addresses(module)
    biases = {
        name: t.bfloat16().float() for name, t in fresh.state_dict().items() if "bias" in name
    }
    fresh.load_state_dict(biases, strict=False)
    update_weights_(module, weights() | {name: t.bfloat16() for name, t in biases.items()})
    assert addresses(module) == before
    assert equal(module, fresh, *routed(E, H))


def model(seed: int) -> nn.Sequential:
    g = torch.Generator().manual_seed(seed)
    made = nn.Sequential(
        nn.Linear(H, 32),
        QuantizedLinear(quantize(torch.randn(48, 32, generator=g), NVFP4), torch.ones(48)),
        nn.BatchNorm1d(48),
    )
    with torch.no_grad():
        made[0].weight.copy_(torch.randn(32, H, generator=g))
    return made.eval()


def test_models_of_many_modules_from_pairs():
    module, fresh, x = model(0), model(7), torch.ones(5, H)
    fusion_moe.prepare_(module, "cuda")
    before = addresses(module)
    update_weights_(module, iter(fresh.state_dict().items()))
    assert addresses(module) == before
    assert equal(module, fresh, x)
    update_weights_(module, {"1.weight": torch.ones(48, 32), "1.bias": torch.zeros(48).bfloat16()})
    assert torch.equal(module[1](torch.ones(5, 32)), torch.full((5, 48), 32.0))


def test_a_model_of_transformers_from_one_in_floats():
    """Whose names are the same."""
    floats, served, fresh = (qwen3_moe(initializer_range=by) for by in (0.4, 0.2, 0.4))
    for m in (served, fresh):
        fusion_moe.quantize_(m)
    before = addresses(served)
    update_weights_(served, floats.state_dict())
    assert addresses(served) == before
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(served(tokens).logits, fresh(tokens).logits)


def test_grouped_layers():
    shapes = (E, I, H), (E, I, H), (E, H, I)

    def made(seed: int) -> tuple[GroupedSwiGLU, list[Tensor]]:
        g = torch.Generator().manual_seed(seed)
        floats = [torch.randn(shape, generator=g) for shape in shapes]
        return GroupedSwiGLU.from_float(*floats), floats

    (module, _), (fresh, (gate, up, down)) = made(0), made(7)
    update_weights_(
        module, {"gate_up_proj.weight": torch.cat([gate, up], 1), "down_proj.weight": down}
    )
    ends = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert equal(module, fresh, torch.ones(3, H), ends)


@pytest.mark.compiler
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_programs_read_the_new_ones(whole):
    module, new = experts(E, H, I), weights()
    with torch.no_grad():
        torch._dynamo.reset()
        f = torch.compile(module, backend="fusion_moe", fullgraph=True)
        f(*routed(E, H))
        update_weights_(f if whole else module, new)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = f(*routed(E, H))
        assert torch.equal(found, NVFP4Experts.from_float(*new.values())(*routed(E, H)))


def test_in_inference_mode_and_out_of_it():
    new = weights()
    with torch.inference_mode():
        module = experts(E, H, I)
    update_weights_(module, new)
    outside = experts(E, H, I)
    with torch.inference_mode():
        update_weights_(outside, {name: t.clone() for name, t in new.items()})
    fresh = NVFP4Experts.from_float(*new.values())
    for found in (module, outside):
        assert same_state(found.state_dict(), fresh.state_dict())


def bad(name: str, change: Any = None) -> dict[str, Tensor]:
    """New numbers, or the parts of new weights, with one of them changed or left out."""
    given = weights() if name in NAMES else copied(experts(E, H, I, seed=7))
    given = {"down_proj": given.pop("down_proj")} | given  # what is right comes first
    t = given.pop(name)
    return given if change is None else given | {name: change(t)}


def nan_at_the_end(t: Tensor) -> Tensor:
    t = t.clone()
    t.view(-1)[-1] = float("nan")
    return t


BAD = {
    "names": (
        lambda: weights() | {"gate_up_prj": torch.ones(1)},
        CheckpointError,
        "gate_up_prj, which the module does not have; .*; did you mean 'gate_up_proj'",
    ),
    "shape": (
        lambda: bad("gate_up_proj", lambda t: t.mT),
        ShapeError,
        r"gate_up_proj is \[3, 64, 192\]; expected \[3, 192, 64\], .* transpose",
    ),
    "dtype": (
        lambda: bad("gate_up_proj", lambda t: t.double()),
        DtypeError,
        "gate_up_proj is torch.float64; expected numbers in float32, bfloat16 or float16, or ",
    ),
    "nan": (lambda: bad("gate_up_proj", nan_at_the_end), NonFiniteError, "1 NaN .* gate_up_proj"),
    "a part is missing": (
        lambda: bad("gate_up_decode_scale"),
        CheckpointError,
        "without gate_up_decode_scale",
    ),
    "numbers beside scales": (
        lambda: copied(experts(E, H, I)) | weights(),
        CheckpointError,
        "gate_up_proj_scale, gate_up_decode_scale without gate_up_proj",
    ),
    "a scale's shape": (
        lambda: bad("gate_up_decode_scale", lambda t: t[:, 0]),
        ShapeError,
        r"gate_up_decode_scale is \[3\]; expected \[3, 2\]",
    ),
    "a scale's dtype": (
        lambda: bad("gate_up_proj_scale", lambda t: t.float()),
        DtypeError,
        "block_scale is torch.float32",
    ),
    "a scale's value": (
        lambda: bad("gate_up_proj_scale", nan_at_the_end),
        NonFiniteError,
        "1 NaN .* gate_up_proj_scale",
    ),
    "the number of experts": (
        lambda: {name: t[:2] for name, t in copied(experts(E, H, I)).items()},
        ShapeError,
        r"gate_up_proj is \[2, 192, 64\]; expected \[3, 192, 64\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_before_a_byte_changes(case):
    made, error, message = BAD[case]
    module = experts(E, H, I)
    before = copied(module)
    with pytest.raises(error, match=message):
        update_weights_(module, made())
    assert same_state(module.state_dict(), before)
    module(*routed(E, H))


def test_tensors_that_are_not_encoded_are_checked_too():
    module = model(0)
    before = copied(module)
    for name, t, error in (
        ("0.weight", torch.full((32, H), float("inf")), NonFiniteError),
        ("0.weight", torch.ones(32, H, dtype=torch.int32), DtypeError),
        ("2.num_batches_tracked", torch.tensor(1.0), DtypeError),
        ("2.running_mean", torch.ones(3), ShapeError),
    ):
        with pytest.raises(error, match=name):
            update_weights_(module, {"1.weight": torch.ones(48, 32), name: t})
    assert same_state(module.state_dict(), before)


def broken_off() -> Iterator[tuple[str, Tensor]]:
    yield from list(weights().items())[:1]
    raise ConnectionError("the trainer is gone")


@pytest.mark.compiler
def test_half_of_an_update_is_never_used():
    """By whoever calls the module, a compiled program, or a graph that reads the memory; until all
    is there.
    """
    module, args = experts(E, H, I), routed(E, H)
    torch._dynamo.reset()
    f = torch.compile(module, backend="fusion_moe")
    with torch.no_grad():
        f(*args)
        with pytest.raises(ConnectionError, match="the trainer is gone"):
            update_weights_(module, broken_off())
        call = "NVFP4Experts: weights that an update left unfinished; .*update_weights_ with all"
        with pytest.raises(UnsupportedError, match=call):
            module(*args)
        with pytest.raises(UnsupportedError, match=call):
            f(*args)
        assert NVFP4Experts.forward(module, *args).isnan().all()  # as a graph would compute
        update_weights_(module, {"gate_up_proj": weights()["gate_up_proj"]})
        with pytest.raises(UnsupportedError):
            module(*args)
        update_weights_(module, weights())
        fresh = NVFP4Experts.from_float(*weights().values())
        assert type(module) is NVFP4Experts
        assert torch.equal(module(*args), fresh(*args))
        assert torch.equal(f(*args), fresh(*args))


def test_an_error_of_the_first_pair_changes_nothing():
    module = experts(E, H, I)
    before = copied(module)
    with pytest.raises(ShapeError):
        update_weights_(module, iter([("down_proj", torch.ones(2, H, I))]))
    assert same_state(module.state_dict(), before)
    module(*routed(E, H))


@pytest.mark.parametrize("encoding", [FP8, FP8_E8M0], ids=lambda e: e.name)
def test_gate_and_up_share_no_block(encoding):
    """Of as many features as fill no whole blocks: new weights, and those with a merged adapter,
    are rounded as `quantize_` rounds them, so that files can hold them.
    """
    g = torch.Generator().manual_seed(0)
    old, new, down = (torch.randn(2, *s, generator=g) for s in ((144, 64), (144, 64), (64, 72)))
    module = Experts(rounded(old, encoding, 2), rounded(down, encoding))
    down = {"down_proj": down}
    update_weights_(module, {"gate_up_proj": new, **down})
    want = rounded(new, encoding, 2)
    assert equal(module, Experts(want, rounded(*down.values(), encoding)), *routed(2, 64))
    add_lora_(module, rank=4, alpha=4, targets="gate_up")
    torch.nn.init.normal_(module.gate_up_lora.B)
    with torch.no_grad():
        factors = zip(module.gate_up_lora.B, module.gate_up_lora.A, strict=True)
        merged = dequantize(want) + torch.stack([b @ a for b, a in factors])
    merge_lora_(module, requantize=True)
    want = Experts(rounded(merged, encoding, 2), rounded(*down.values(), encoding))
    assert equal(module, want, *routed(2, 64))
