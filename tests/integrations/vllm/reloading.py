"""A process of its own: an engine of one directory reloads another one, and then the tensors of the
first. Prints, as JSON, what was generated before and after, and by a new engine.

Arguments: both directories; JSON of prompts, lists of ids; JSON of options of LLM.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    first, second = sys.argv[1:3]
    prompts, options = map(json.loads, sys.argv[3:])

    def engine(directory: str) -> Any:
        return LLM(
            model=directory,
            skip_tokenizer_init=True,
            max_num_seqs=4,
            seed=0,
            max_model_len=64,
            quantization="fusion_moe",
            **options,
        )

    def generated(llm: Any) -> list[Any]:
        llm.reset_prefix_cache()
        sampling = SamplingParams(
            max_tokens=6, temperature=0, logprobs=0, detokenize=False, ignore_eos=True
        )
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        return [
            [(token, at[token].logprob) for token, at in zip(o.token_ids, o.logprobs, strict=True)]
            for o in (answer.outputs[0] for answer in answers)
        ]

    def addresses(llm: Any) -> list[int]:
        (model,) = llm.collective_rpc("get_model")
        return [p.data_ptr() for name, p in model.named_parameters() if "fusion_moe" in name]

    found: dict[str, Any] = {"of the second": generated(engine(second))}
    llm = engine(first)
    before = addresses(llm)
    found["of the first"] = generated(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": second})
    found["reloaded the second"] = generated(llm)
    tensors = load_file(Path(first) / "model.safetensors")
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
    found["reloaded the first"] = generated(llm)
    found["addresses stay"] = bool(before) and addresses(llm) == before
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
