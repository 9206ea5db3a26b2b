"""A process of its own: SGLang's engine generates from a directory. Prints, as JSON,
log-probabilities of the prompt's tokens and what was generated.

Arguments: the directory; JSON of prompts, lists of ids; JSON of options of Engine, if not PLAIN.
"""

from __future__ import annotations

import json
import sys

# What runs without a GPU and without SGLang's kernels.
PLAIN = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "max_total_tokens": 512,
    "context_length": 64,
}


def main() -> None:
    import sglang

    directory, prompts = sys.argv[1], json.loads(sys.argv[2])
    options = json.loads(sys.argv[3]) if sys.argv[3:] else PLAIN
    engine = sglang.Engine(
        model_path=directory,
        quantization="fusion_moe",
        skip_tokenizer_init=True,
        log_level="info",
        **options,
    )
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    answers = engine.generate(
        input_ids=prompts, sampling_params=sampling, return_logprob=True, logprob_start_len=0
    )
    found = [
        {
            "log_probabilities": [
                value for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]
            ],
            "tokens": answer["output_ids"],
        }
        for answer in answers
    ]
    updated, message, *_ = engine.update_weights_from_disk(directory)
    assert not updated
    assert "not supported with --quantization fusion_moe" in message
    print("FOUND", json.dumps(found), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
