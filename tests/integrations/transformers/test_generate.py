"""`generate` of loaded models: dynamic and static caches, and compiled, with no more graphs than
Inductor has for bf16 weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from fusion_moe import options
from fusion_moe.nn import Experts
from fusion_moe.transformers import decoding, from_pretrained

MADE = Path(__file__).parents[2] / "checkpoints" / "made"
PROMPT = torch.arange(3, 12)[None]


def generated(model, **options) -> list[int]:
    found = model.generate(PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)
    return found[0, PROMPT.shape[1] :].tolist()


def compiled(model, backend: str) -> tuple[list[int], int]:
    """Tokens, and the count of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(backend=backend)
    config._compile_all_devices = True  # on CPUs too
    tokens = generated(model, cache_implementation="static", compile_config=config)
    return tokens, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_static_cache_gives_the_same_tokens():
    model = from_pretrained(MADE / "mxfp4-gpt_oss", dtype=torch.float32)
    assert model.hf_quantizer.is_compileable
    assert generated(model, cache_implementation="static") == generated(model)


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.compiler
@pytest.mark.exhaustive
def test_compiled_it_gives_the_same_tokens():
    name = "modelopt-gpt_oss"
    model = from_pretrained(MADE / name, dtype=torch.float32)
    tokens, graphs = compiled(model, "fusion_moe")
    assert tokens == generated(model)
    config = type(model.config).from_pretrained(MADE / name)
    del config.quantization_config
    _, of_inductor = compiled(
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), "inductor"
    )
    assert 0 < graphs <= of_inductor


def test_a_decoder_forgets_what_warming_up_and_other_prompts_wrote(monkeypatch):
    """Its steps as on a GPU, by a static cache, but for the graph."""

    def called_first(run):
        for _ in range(decoding.WARM):
            run()
        return run

    monkeypatch.setattr(decoding, "why_plain", lambda model: "")
    monkeypatch.setattr(decoding, "captured", called_first)
    model = from_pretrained(MADE / "modelopt-mixtral", dtype=torch.float32)
    told = generated(model)
    model.set_attn_implementation(decoding.SHARED_KEYS)
    decoder = decoding.Decoder(model, 32, backend="eager")
    decoder.prompt(PROMPT[:, 4:])
    decoder.step()
    found = [int(decoder.prompt(PROMPT)), *(int(decoder.step()) for _ in range(7))]
    assert found == told


def test_in_continuous_batches_no_row_changes_another_ones_experts():
    """What `fusion-moe serve --continuous-batching` runs, prompts of several lengths in a step: the
    tokens of each alone, and the bits of each row of experts alone, in row order.
    """
    model = from_pretrained(MADE / "modelopt-mixtral", dtype=torch.float32)
    prompts = [list(range(3, 3 + n)) for n in (9, 2, 5)]
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    alone = [
        model.generate(torch.tensor([p]), generation_config=greedy)[0, len(p) :].tolist()
        for p in prompts
    ]
    seen = []

    def watched(forward):
        def called(*rows):
            with options.override(order="row"):  # of this thread, which is transformers'
                seen.append((forward, rows, forward(*rows)))
            return seen[-1][2]

        return called

    layers = [module for module in model.modules() if isinstance(module, Experts)]
    for module in layers:
        module.forward = watched(module.forward)
    found = model.generate_batch(
        prompts,
        generation_config=greedy,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
    )
    assert [f.generated_tokens for f in found.values()] == alone
    assert len(seen) < len(layers) * 8 * len(prompts)  # steps had rows of several prompts
    with options.override(order="row"), torch.inference_mode():
        for forward, rows, results in seen:
            ones = [forward(*(t[i : i + 1] for t in rows)) for i in range(len(results))]
            assert torch.equal(torch.cat(ones), results)
