"""A process of its own: LLM.generate of a directory. Prints, as JSON, log-probabilities of the
prompt's tokens and what was generated.

Arguments: the directory; JSON of options of LLM; JSON of prompts, lists of ids; JSON of each
prompt's adapter, a directory or null.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    directory, options, prompts, adapters = sys.argv[1], *map(json.loads, sys.argv[2:])
    ids = {adapter: i for i, adapter in enumerate(dict.fromkeys(filter(None, adapters)), 1)}
    requests = [
        LoRARequest(f"adapter {ids[adapter]}", ids[adapter], adapter) if adapter else None
        for adapter in adapters
    ]
    llm = LLM(model=directory, skip_tokenizer_init=True, max_num_seqs=4, seed=0, **options)
    sampling = SamplingParams(
        max_tokens=6, temperature=0, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        sampling,
        use_tqdm=False,
        lora_request=requests,
    )
    found = [
        {
            "log_probabilities": [
                at[token].logprob
                for at, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)
            ],
            "tokens": list(answer.outputs[0].token_ids),
        }
        for answer, prompt in zip(answers, prompts, strict=True)
    ]
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
