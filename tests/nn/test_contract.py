"""Modules of experts that are described as transformers' decorator describes them, and what takes
their place. No transformers here.
"""

from __future__ import annotations

import copy
import io
import weakref

import loops
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusion_moe.encodings import BF16, MXFP4, NVFP4, Encoding, Quantized, quantize
from fusion_moe.errors import ShapeError, UnsupportedError
from fusion_moe.nn import (
    CustomExperts,
    Experts,
    NVFP4Experts,
    contract_of,
    convert,
    experts_from,
    quantize_,
)
from fusion_moe.nn.conversion import traced_activation

pytestmark = pytest.mark.usefixtures("meaning_without_all")

E, K, H, I, T = 4, 2, 64, 64, 11


class Described(nn.Module):
    """Experts in the order of one family."""

    (
        has_gate,
        has_bias,
        has_post_expert_norm,
        is_transposed,
        is_concatenated,
        _is_expert_parallel,
    ) = True, False, False, False, True, False
    act_fn = staticmethod(F.silu)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        n = 2 * I if self.has_gate else I
        self.up_name = "gate_up_proj" if self.has_gate else "up_proj"
        for name, shape in {self.up_name: (n, H), "down_proj": (H, I)}.items():
            order = shape[::-1] if self.is_transposed else shape
            setattr(self, name, nn.Parameter(torch.randn(E, *order) * 0.2))
            if self.has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, shape[0])))

    def _apply_gate(self, y):
        gate, up = y.chunk(2, -1) if self.is_concatenated else (y[..., ::2], y[..., 1::2])
        return self.act_fn(gate) * up

    def forward(self, x, ids, w):
        y = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            a = self._linear(x[token], self.up_name, e)
            a = self._linear(
                self._apply_gate(a) if self.has_gate else self.act_fn(a), "down_proj", e
            )
            y.index_add_(
                0,
                token,
                (self.post_expert_norm(a) if self.has_post_expert_norm else a)
                * w[token, slot, None],
            )
        return y

    def _linear(self, x, name, e):
        weight = getattr(self, name)[e]
        return F.linear(
            x,
            weight.mT if self.is_transposed else weight,
            getattr(self, f"{name}_bias")[e] if self.has_bias else None,
        )


class GptOss(Described):
    has_bias, is_transposed, is_concatenated, alpha, limit = True, True, False, 1.702, 7.0

    def _apply_gate(self, y):
        gate, up = y[..., ::2].clamp(max=self.limit), y[..., 1::2].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


class GeluInTurns(GptOss):
    _apply_gate, act_fn = Described._apply_gate, staticmethod(F.gelu)


class Ungated(Described):
    has_gate = False

    def act_fn(self, y):
        return F.relu(y).square()


class Normed(Described):
    has_post_expert_norm = True

    def __init__(self):
        super().__init__()
        self.post_expert_norm = nn.RMSNorm(H)
        nn.init.normal_(self.post_expert_norm.weight)


FAMILIES = [Described, GptOss, GeluInTurns, Ungated, Normed]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    w, ids = torch.randn(T, E, generator=torch.Generator().manual_seed(1)).softmax(-1).topk(K)
    return torch.randn(T, H, generator=torch.Generator().manual_seed(2)).to(dtype), ids, w.to(dtype)


def meant(made: nn.Module, module: nn.Module) -> nn.Module:
    """A copy of the module with the weights that its replacement has."""
    other = copy.deepcopy(module)
    up, down = (
        loops.decoded(*(part.detach() for part in made.weight_of(name))).float()
        for name in made.projections
    )
    if not module.is_concatenated:
        up = torch.stack(up.chunk(2, 1), 2).flatten(1, 2)
    for name, t in ((module.up_name, up), ("down_proj", down)):
        getattr(other, name).data = t.mT if module.is_transposed else t
    return other


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_takes_its_place_computes_the_same(family):
    """Results, and gradients of tokens and router weights."""
    module = family()
    made = convert(module)
    for a, b in zip(*(gradients(m) for m in (made, meant(made, module))), strict=True):
        near(a, b)


def gradients(experts: nn.Module) -> list[torch.Tensor]:
    x, ids, w = inputs()
    y = experts(x.requires_grad_(), ids, w.requires_grad_())
    return [
        y,
        *torch.autograd.grad(
            y, [x, w], torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        ),
    ]


@pytest.mark.compiler
@pytest.mark.parametrize("family", [GeluInTurns, Normed])
@torch.no_grad()
def test_compiled_without_a_graph_break(family):
    made, x = convert(family()), inputs()
    near(torch.compile(made, backend="fusion_moe", fullgraph=True)(*x), made(*x))


def test_which_class_it_is_and_that_its_numbers_are_arguments():
    made = [convert(family()) for family in FAMILIES]
    assert [type(m) for m in made] == [
        NVFP4Experts,
        NVFP4Experts,
        NVFP4Experts,
        NVFP4Experts,
        CustomExperts,
    ]
    assert made[1].interleave == 0
    assert "minimum(gate, 7.0)" in repr(made[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_kept_of_the_weights(family):
    module = family()
    made = convert(module)
    held = {
        name
        for name, p in made.named_parameters()
        if p.dim() == 3 and p.is_floating_point() and p.element_size() > 1
    }
    up, norm = (
        module.up_name.removesuffix("_proj"),
        {"post_expert_norm.weight"} if module.has_post_expert_norm else set(),
    )
    biases = {f"{up}_proj_bias", "down_proj_bias"} if module.has_bias else set()
    parts = {f"{n}{s}" for n in (up, "down") for s in ("_proj", "_proj_scale", "_decode_scale")}
    assert not held
    assert set(made.state_dict()) == parts | biases | norm
    assert not any(p.requires_grad for p in made.parameters(recurse=False))
    if isinstance(made, CustomExperts):
        assert not list(made.function.parameters(recurse=False))
    # the original is as it was
    assert len(list(module.parameters())) == 2 + len(biases) + len(norm)
    weights = [weakref.ref(p) for p in module.parameters() if p.dim() == 3]
    del module
    assert not any(weight() for weight in weights)


def test_a_norm_is_saved_moved_and_copied_with_the_module():
    made, x = convert(Normed()), inputs()
    torch.save(made, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(made), torch.load(file, weights_only=False)):
        assert torch.equal(other(*x), made(*x))
        other.post_expert_norm = nn.RMSNorm(H)
        assert not torch.equal(other(*x), made(*x))
    norms = made.double().post_expert_norm, made.function.post_expert_norm
    assert [norm.weight.dtype for norm in norms] == [torch.float64] * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", [BF16, MXFP4])
def test_weights_in_other_encodings(family, encoding: Encoding):
    module = family()
    contract = contract_of(module)
    floats = contract.up(getattr(module, contract.up_name)), contract.down(module.down_proj)
    up, down = (quantize(t.detach(), encoding=encoding) for t in floats)
    biases = (
        [contract.up(module.gate_up_proj_bias), module.down_proj_bias] if module.has_bias else []
    )
    made, x = experts_from(module, up, down, *biases), inputs()
    assert isinstance(made, Experts | CustomExperts)
    assert made.encoding == encoding
    with torch.no_grad():
        want = module(*x)
        assert (made(*x) - want).norm() <= (0.01 if encoding == BF16 else 0.3) * want.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_meta_device(family):
    with torch.device("meta"):
        module = family()
    made = convert(module)
    real = convert(family())
    assert type(made) is type(real)
    assert {n: (p.shape, p.dtype) for n, p in made.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in real.named_parameters()
    }
    made.load_state_dict(real.state_dict(), assign=True)
    torch.testing.assert_close(made(*inputs()), real(*inputs()), rtol=0, atol=0)


def weights(n: int = 2 * I) -> list[Quantized]:
    return [quantize(torch.randn(E, *shape), encoding=NVFP4) for shape in ((n, H), (H, I))]


def test_refusals(golden):
    def said(module, *args):
        with pytest.raises((ShapeError, UnsupportedError)) as error:
            experts_from(module, *(args or weights()))
        return str(error.value)

    parallel, more = Described(), Described()
    parallel._is_expert_parallel = True
    more.per_expert_scale = nn.Parameter(torch.ones(E))
    bias = torch.zeros(E, 2 * I)
    cases = (
        (nn.Linear(2, 2),),
        (parallel,),
        (more,),
        (Described(), *weights(I)),
        (Described(), *weights(), bias),
        (GptOss(),),
        (GptOss(), *weights(), bias[:, :I], torch.zeros(E, H)),
    )
    golden("\n".join(said(*case) for case in cases))


def test_what_has_no_such_description_is_none():
    assert contract_of(nn.Linear(2, 2)) is None
    assert contract_of(convert(Described())) is None
    assert contract_of(convert(Normed())) is None


def test_an_activation_is_traced_once_of_each_module(monkeypatch):
    """And not again of the copy that is checked before."""
    traced, columns = [], traced_activation._columns
    monkeypatch.setattr(
        traced_activation, "_columns", lambda *args: traced.append(args) or columns(*args)
    )
    model = nn.Sequential(Described(), Described())
    quantize_(model)
    assert len(traced) == len(model) == 2
