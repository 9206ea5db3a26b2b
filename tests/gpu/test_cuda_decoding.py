"""Steps that are replayed as a CUDA graph write what transformers' `generate` does."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from fusion_moe.transformers import NVFP4Config, from_pretrained

pytestmark = pytest.mark.gpu
MODEL = Path(__file__).parents[2] / "examples" / "tiny_qwen3_moe"
TEXTS = "def __repr__(self):", "import os\nimport sys\n\n\nclass Path", "    return self."
TOKENS = 8  # few: sums in another order may at last end in another token


def test_replayed_steps_write_what_generate_does():
    """Of one prompt after another, in the same cache; and what is drawn among the likeliest one."""
    from fusion_moe.integrations.transformers.decoding import Decoder, greedy, sampling, share_keys_

    kwargs = {"dtype": torch.bfloat16, "quantization_config": NVFP4Config(), "device_map": "cuda"}
    model, tokenizer = from_pretrained(MODEL, **kwargs).eval(), AutoTokenizer.from_pretrained(MODEL)
    share_keys_(model)
    model.generation_config.top_k = 1
    prompts = [tokenizer(text, return_tensors="pt").input_ids.cuda() for text in TEXTS]
    how = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    told = [model.generate(ids, **how)[0, ids.shape[1] :].tolist() for ids in prompts]
    for choose in greedy, sampling(model.generation_config, 0.7):
        decoder = Decoder(model, 64, choose=choose)
        assert decoder.why_plain == ""
        found = [
            [decoder.prompt(ids).item(), *(decoder.step().item() for _ in range(TOKENS - 1))]
            for ids in prompts
        ]
        assert found == told
