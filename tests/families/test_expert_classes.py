"""Every class of experts that the installed transformers decorates: what `convert` makes of it
computes the same.

The judge is the class itself with the weights that the NVFP4 bytes mean. How classes run is in
RUNS; those that are not there are plain SwiGLU, unless they are newer than this table.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch

import fusion_moe
from fusion_moe.nn import CustomExperts, NVFP4Experts, convert
from tests.families.decoded import meant, relative
from tests.families.models import AnyConfig, E, H, K, class_of, decorated, occurrences, randomized

CLASSES = sorted(decorated())
NAMES = [f"{family}.{name}" for family, name in CLASSES]
LIMIT, GPT_OSS, CUSTOM = "minimum(gate, 7.0)", "1.702", "function="
TANH, SQUARED = "tanh(", "relu(up); t1 = mul(t0, t0)"
RUNS = {
    "DeepseekV4Experts": LIMIT,
    "HYV4Experts": LIMIT,
    "Glm5NextExperts": LIMIT,
    "GptOssExperts": GPT_OSS,
    "OpenAIPrivacyFilterExperts": GPT_OSS,
    "MiniMaxM3VLExperts": GPT_OSS,
    "Gemma4TextExperts": TANH,
    "DiffusionGemmaTextExperts": TANH,
    "Inkling2Experts": TANH,
    "NemotronHExperts": SQUARED,
    "Inkling2LoopExperts": TANH,
    "MuseSparkExperts": CUSTOM,
}
CANNOT_BE_BUILT: dict[str, str] = {}  # class: why its constructor fails here


def experts_of(family: str, name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return randomized(class_of(family, name)(AnyConfig())).eval()


def inputs(tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids, weights."""
    generator = torch.Generator().manual_seed(2)
    w, ids = torch.randn(tokens, E, generator=generator).softmax(-1).topk(K)
    return torch.randn(tokens, H, generator=generator), ids, w


def test_every_decorator_is_seen():
    assert len(CLASSES) == occurrences() > 40


@pytest.mark.parametrize(("family", "name"), CLASSES, ids=NAMES)
@torch.no_grad()
def test_class(family, name):
    if name in CANNOT_BE_BUILT:
        pytest.skip(CANNOT_BE_BUILT[name])
    original = experts_of(family, name)
    made, x = convert(original), inputs()
    assert relative(made(*x), meant(made, original)(*x)) <= 1e-5
    assert type(made) is (CustomExperts if RUNS.get(name) == CUSTOM else NVFP4Experts), made
    assert RUNS.get(name, "weight_layout='linear'") in repr(made)


@pytest.mark.parametrize("name", ["nemotron_h.NemotronHExperts", "gemma4.Gemma4TextExperts"])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_activation_of_its_own_is_fused_into_the_product(name, target):
    made = convert(experts_of(*name.split("."))).bfloat16()
    x, ids, w = inputs()
    (fusion,) = fusion_moe.explain(made, x.bfloat16(), ids, w.bfloat16(), target=target).fusions
    assert [s.kind for s in fusion.segments] == ["grouped_gemm", "grouped_gemm"]
