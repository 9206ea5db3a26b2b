"""transformers' models with experts_implementation="fusion_moe", beside their own experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

transformers = pytest.importorskip("transformers")

import fusion_moe.transformers  # noqa: E402
from fusion_moe import options  # noqa: E402
from fusion_moe.ir.activation import read  # noqa: E402
from fusion_moe.nn.conversion.traced_activation import activation_of  # noqa: E402
from fusion_moe.recipe import MXFP8BlockScaling  # noqa: E402
from tests.families.models import AnyConfig, E, K, class_of, decorated, randomized  # noqa: E402
from tests.families.tiny import tiny  # noqa: E402

H, I, T = 32, 24, 26
# older tracers take no module as the argument of assume_constant_result
IN_ONE_GRAPH = torch.__version__ >= "2.13"
FAMILIES = {  # name: the class of its experts, an operation of its activation
    "qwen3": ("qwen3_moe.Qwen3MoeExperts", "silu(gate)"),
    "mixtral": ("mixtral.MixtralExperts", "silu(gate)"),
    "deepseek_v3": ("deepseek_v3.DeepseekV3Experts", "silu(gate)"),
    "gpt_oss": ("gpt_oss.GptOssExperts", "minimum(gate, 7.0)"),
    "qwen3_gelu": ("qwen3_moe.Qwen3MoeExperts", "tanh("),
    "nemotron_h": ("nemotron_h.NemotronHExperts", "relu(up)"),
}


def experts_of(family: str, intermediate: int = I) -> torch.nn.Module:
    """Small random experts."""
    config = AnyConfig(H, intermediate)
    if family == "qwen3_gelu":
        config.hidden_act = "gelu_pytorch_tanh"
    torch.manual_seed(0)
    return randomized(class_of(*FAMILIES[family][0].split("."))(config))


@contextmanager
def implementation(module: torch.nn.Module, name: str) -> Iterator[None]:
    before, module.config._experts_implementation = module.config._experts_implementation, name
    yield
    module.config._experts_implementation = before


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def step(model: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The logits and all gradients."""
    model.set_experts_implementation(name)
    model.zero_grad()
    logits = model(
        input_ids=torch.randint(3, 64, (2, T // 2), generator=torch.Generator().manual_seed(1))
    ).logits
    logits.square().sum().backward()
    return {
        "logits": logits.detach(),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_logits_and_all_gradients_are_those_of_eager(family):
    model = tiny(family)
    want = step(model, "eager")
    with options.override(target="reference"):
        got = step(model, "fusion_moe")
    assert got.keys() == want.keys()
    far = {n: ((got[n] - want[n]).norm() / want[n].norm()).item() for n in want if want[n].norm()}
    assert max(far.values()) < 1e-6, far


def test_the_activation_is_traced(family):
    module = experts_of(family)
    activation = read(activation_of(module, as_stored=True))
    assert FAMILIES[family][1] in activation.formula
    assert activation.interleave == (module.has_gate and not module.is_concatenated)


def inputs(dtype: torch.dtype, w_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Tokens, ids and weights for experts."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(T, H, generator=generator).bfloat16().to(dtype)
    w, ids = torch.randn(T, E, generator=generator).softmax(-1).topk(K)
    return x.requires_grad_(), ids, w.to(w_dtype).requires_grad_()


def gradients(
    experts: torch.nn.Module, name: str, args: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """The result and its gradients: of tokens, of weights, of all parameters; for a gradient that
    is the same for every implementation.
    """
    x, ids, w = args
    with implementation(experts, name):
        y = experts(x, ids, w)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, w, *experts.parameters()], seed)]


def test_bf16_is_as_near_to_float64_as_torchs(family):
    check_bf16(family, torch.bfloat16)


def test_so_is_bf16_by_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        check_bf16("qwen3", torch.float32)


def check_bf16(family: str, dtype: torch.dtype) -> None:
    """Errors of the result and of all gradients. dtype: of tokens and parameters, whose values are
    bf16's.
    """
    experts = experts_of(family).bfloat16()
    ours, theirs = (
        gradients(experts.to(dtype), name, inputs(dtype)) for name in ("fusion_moe", "eager")
    )
    with torch.autocast("cpu", enabled=False):
        exact = gradients(experts.double(), "eager", inputs(torch.float64, torch.float64))
    for got, reference, want in zip(ours, theirs, exact, strict=True):
        assert got.dtype == reference.dtype
        assert (got - want).norm() <= 1.1 * (reference - want).norm()


def test_weights_are_saved_as_they_are(family):
    experts, saved = experts_of(family).bfloat16(), []
    weights = {p.data_ptr() for p in experts.parameters() if p.dim() == 3}
    with (
        implementation(experts, "fusion_moe"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        experts(*inputs(torch.bfloat16))
    assert weights == {t.data_ptr() for t in saved if t.dim() == 3 and t.shape[0] == E}


def experts_in_blocks(family):
    """Experts in bfloat16 whose features come in blocks of 32, and their arguments."""
    experts = experts_of(family, 32).bfloat16()
    experts.config._experts_implementation = "fusion_moe"
    return experts, (
        torch.randn(T, H).bfloat16(),
        torch.randint(E, (T, K)),
        torch.rand(T, K).bfloat16(),
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_gelu"])
def test_a_recipe(family):
    """Experts compute by the recipe in force, and without one as before."""
    experts, args = experts_in_blocks(family)
    plain = experts(*args)
    for recipe in (MXFP8BlockScaling(), None):
        with fusion_moe.autocast(recipe=recipe):
            y = experts(*args)
        assert torch.equal(y, plain) == (recipe is None)
        assert (y - plain).norm() < 0.15 * plain.norm()


@pytest.mark.compiler
def test_a_recipe_compiled():
    """Another recipe is another graph."""
    experts, args = experts_in_blocks("qwen3")
    compiled = torch.compile(experts, fullgraph=IN_ONE_GRAPH)
    for recipe in (MXFP8BlockScaling(), None, MXFP8BlockScaling()):
        with fusion_moe.autocast(recipe=recipe):
            y, traced = experts(*args), compiled(*args)
        assert (y - traced).norm() <= 0.02 * y.norm()


def test_experts_of_other_ranks_add_nothing():
    experts = experts_of("qwen3")
    x, ids, w = inputs(torch.float32)
    with torch.no_grad(), implementation(experts, "fusion_moe"):
        here = torch.where(ids == 1, 0.0, w)
        want = experts(x, ids, here)
        experts._is_expert_parallel = True
        torch.testing.assert_close(experts(x, torch.where(ids == 1, E, ids), w), want)


@pytest.mark.compiler
def test_compiled():
    experts, args = experts_of("qwen3_gelu"), inputs(torch.float32)
    want = gradients(experts, "fusion_moe", args)
    with implementation(experts, "fusion_moe"):
        y = torch.compile(experts, backend="fusion_moe", fullgraph=IN_ONE_GRAPH)(*args)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(y.dtype)
    torch.testing.assert_close(
        [y, *torch.autograd.grad(y, [args[0], args[2], *experts.parameters()], seed)], want
    )


@pytest.mark.slow
@pytest.mark.once
def test_experts_of_every_family():
    for family, name in decorated():
        torch.manual_seed(0)
        experts = randomized(class_of(family, name)(AnyConfig(H, I)))
        want = gradients(experts, "eager", inputs(torch.float32))
        with options.override(target="reference"):
            got = gradients(experts, "fusion_moe", inputs(torch.float32))
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm(), name


def test_its_name_is_known_to_transformers():
    assert (
        fusion_moe.transformers.experts_forward
        is transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS["fusion_moe"]
    )
