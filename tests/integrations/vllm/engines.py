"""A process of its own: engines, one after the other. Prints, as JSON, for each what it generated,
or the error with which it did not start.

Arguments: JSON of options of LLM, for each engine, with "then" beside them: what is done before it
generates once more; JSON of prompts, lists of ids.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any


def main() -> None:
    engines, prompts = map(json.loads, sys.argv[1:])
    found = []
    for options in engines:
        found.append(one(options.pop("then", []), prompts, options))
        gc.collect()
    print("FOUND", json.dumps(found))


def one(then: list[str], prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    from fusion_moe.errors import Error

    usual = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
        "seed": 0,
        "quantization": "fusion_moe",
    }
    usual |= {"enforce_eager": True, "max_model_len": 512, "disable_log_stats": False}
    try:
        llm = LLM(**usual | options)
    except Error as error:
        return {"refused": str(error)}
    found: dict[str, Any] = {"first": generated(llm, prompts)}
    for action in then:
        try:
            ACTIONS[action](llm)
        except Error as error:
            found[f"{action} refused"] = str(error)
    found["then"] = generated(llm, prompts)
    numbers = (m for m in llm.get_metrics() if hasattr(m, "value"))
    return found | {m.name.removeprefix("vllm:"): m.value for m in numbers}


def generated(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Tokens of each prompt, and their log-probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=8, temperature=0, logprobs=0, detokenize=False, ignore_eos=True
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = [a.outputs[0] for a in llm.generate(asked, sampling, use_tqdm=False)]
    return [
        [list(a.token_ids), [at[t].logprob for t, at in zip(a.token_ids, a.logprobs, strict=True)]]
        for a in answers
    ]


def reload(llm: Any) -> None:
    """The weights of the directory, in place of drawn ones."""
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()


def sleep(llm: Any) -> None:
    """On CPUs vLLM says that it does not."""
    llm.sleep(1)
    llm.wake_up()


ACTIONS = {
    "forget": lambda llm: llm.reset_prefix_cache(),
    "reload": reload,
    "save": lambda llm: llm.llm_engine.engine_core.save_sharded_state(path="."),
    "sleep": sleep,
}

if __name__ == "__main__":
    main()
