"""Adapters of NVFP4GroupedLinear and GroupedSwiGLU: against whole weights in float64, saved, loaded
and merged.
"""

from __future__ import annotations

import loops
import pytest
import torch
from bad_calls import messages
from routings import Partition
from torch import Tensor, nn
from ways import HOW, every_way

from fusion_moe.encodings import dequantize
from fusion_moe.errors import CheckpointError
from fusion_moe.lora.files import load_lora_, save_lora
from fusion_moe.nn import GroupedLinear, GroupedSwiGLU, NVFP4GroupedLinear, add_lora_, merge_lora_

G, H, I = 3, 64, 32
SIZES = (4, 0, 7)
ENDS = Partition(SIZES, 0).ends


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(bias: bool = False) -> NVFP4GroupedLinear:
    return NVFP4GroupedLinear.from_float(drawn(G, I, H), drawn(G, I, seed=1) if bias else None)


def swiglu() -> GroupedSwiGLU:
    return GroupedSwiGLU.from_float(
        drawn(G, I, H) / 4, drawn(G, I, H, seed=1), drawn(G, H, I, seed=2)
    )


class Model(nn.Module):
    """One of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.experts = (
            NVFP4GroupedLinear.from_float(drawn(G, H, H)),
            nn.LayerNorm(H),
            swiglu(),
        )

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.experts(self.norm(self.first(x, offs)), offs)


def adapted(module: nn.Module, **how) -> nn.Module:
    """With numbers in its adapters, as if it was trained."""
    add_lora_(module, 4, 8, **how)
    g = torch.Generator().manual_seed(3)
    for name, p in module.named_parameters():
        if "_lora." in name:
            p.data.normal_(0, 0.2, generator=g)
    return module


def whole(module: NVFP4GroupedLinear) -> Tensor:
    """f64[G, N, K]: the weight with what its adapter adds, which gradients reach."""
    weight = loops.decoded(*(t.detach() for t in module.weight_of("weight")))
    adapter = module.adapter("weight")
    return (
        weight
        if adapter is None
        else weight + adapter.scale * adapter.B.double() @ adapter.A.double()
    )


def meant(module: nn.Module, x: Tensor) -> Tensor:
    """What a module computes, in float64."""
    if isinstance(module, GroupedSwiGLU):
        return loops.product(
            loops.swiglu(loops.product(x, whole(module.gate_up_proj), SIZES)),
            whole(module.down_proj),
            SIZES,
        )
    y = loops.product(x, whole(module), SIZES)
    return (
        y
        if module.bias is None
        else y + module.bias.detach().double().repeat_interleave(torch.tensor(SIZES), 0)
    )


def gradients(y: Tensor, dy: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [g.double() for g in torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("make", [lambda: linear(bias=True), swiglu], ids=["with a bias", "swiglu"])
def test_against_whole_weights(how, make):
    """Outputs, and gradients of rows and factors."""
    module, x = adapted(make()), drawn(sum(SIZES), H, seed=5).requires_grad_()
    found, want = HOW[how](module)(x, ENDS), meant(module, x.double())
    leaves, dy = (
        [x, *(p for p in module.parameters() if p.requires_grad)],
        drawn(*want.shape, seed=6),
    )
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    for ours, theirs in zip(gradients(found, dy, leaves), gradients(want, dy, leaves), strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (
            ("gate_up", "down", "linear"),
            ["first.weight", "experts.gate_up_proj.weight", "experts.down_proj.weight"],
        ),
        ("linear", ["first.weight"]),
        (["down"], ["experts.down_proj.weight"]),
    ],
    ids=str,
)
def test_targets(targets, names):
    model = Model()
    assert add_lora_(model, 4, targets=targets) == names
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        f"{n}_lora.{f}" for n in names for f in "AB"
    ]


def test_targets_that_are_not_there(golden):
    module = linear(bias=True)
    golden(
        messages(
            {
                "of other experts": lambda: add_lora_(module, targets=("gate_up", "down")),
                "of training": lambda: add_lora_(GroupedLinear(G, H, I)),
            }
        )
    )
    assert module.bias.requires_grad


# Merging ------------------------------------------------------------------------------------------


def added(module: NVFP4GroupedLinear) -> Tensor:
    return torch.stack([module.weight_lora.delta(g) for g in range(G)])


def test_quantized_again():
    """The bytes that quantizing the sum gives, gate and up with scales of their own."""
    module = adapted(swiglu())
    gate_up, down = (
        dequantize(m.weight_of("weight")) + added(m)
        for m in (module.gate_up_proj, module.down_proj)
    )
    assert merge_lora_(module, requantize=True) == ["gate_up_proj.weight", "down_proj.weight"]
    want = GroupedSwiGLU.from_float(*gate_up.chunk(2, 1), down).state_dict()
    found = module.state_dict()
    assert found.keys() == want.keys()
    assert all(
        torch.equal(t.view(torch.uint8), want[n].view(torch.uint8)) for n, t in found.items()
    )


# On disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{}, {"targets": "linear"}, {"targets": ("gate_up", "down")}], ids=str
)
def test_round_trip(how, tmp_path):
    model, other, x = adapted(Model(), **how), Model(), drawn(sum(SIZES), H)
    names = load_lora_(other, save_lora(model, tmp_path / "saved"))
    assert [f"{n}_lora.{f}" for n in names for f in "AB"] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    with torch.no_grad():
        assert torch.equal(other(x, ENDS), model(x, ENDS))


def test_adapters_of_another_model(tmp_path):
    saved = save_lora(adapted(Model()), tmp_path / "saved")
    with pytest.raises(
        CheckpointError,
        match="adapters of experts.down_proj; expected modules with experts: gate_up_proj",
    ):
        load_lora_(swiglu(), saved)
