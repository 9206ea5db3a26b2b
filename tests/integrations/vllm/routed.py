"""A process of its own: an engine of a directory, with vLLM's own capturer of routed experts bound
to its model, computes prompts one by one. Prints, as JSON, what was captured of each.

vLLM hands it to requests (`enable_return_routed_experts`) only in its second model runner, which
needs Triton: here the capturer's buffer is read instead.

Arguments: the directory; JSON of prompts, lists of ids.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )

    directory, prompts = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        directory,
        quantization="fusion_moe",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        seed=0,
        max_model_len=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        dtype="float32",
    )
    bound: list[Any] = []

    def bind(worker: Any) -> None:
        runner = worker.model_runner
        bound.append(RoutedExpertsCapturer(64, runner.vllm_config))
        bind_routed_experts_capturer(runner.get_model(), bound[0])

    llm.collective_rpc(bind)
    found = []
    for prompt in prompts:
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        data = bound[0].snapshot_routing_data(len(prompt))
        found.append([str(data.dtype), data.int().tolist()])
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
