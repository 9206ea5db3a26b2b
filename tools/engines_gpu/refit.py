"""New weights in a running engine of vLLM, from bfloat16 parameters of a trainer on the same GPU:
seconds, memory, and whether captured graphs and their answers stay.

    python tools/engines_gpu/refit.py DIRECTORY [--options '{"quantization": "fusion_moe"}']
        [--forms whole each] [--out FILE.json]

DIRECTORY: with Qwen3's configuration. Parameters are random, by transformers' names. whole: all
experts of a layer in one tensor, as transformers has them; each: an expert after the other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import torch
from engine import Engine
from invariance import Notes
from torch import Tensor

FORMS = "whole", "each"


def renewed(engine: Engine, parameters: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """One reload: its seconds, and the memory that it takes meanwhile."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun, held = time.perf_counter(), torch.cuda.memory_allocated()
    given = {"weights_iterator": iter(parameters)}
    engine.llm.collective_rpc("reload_weights", kwargs=given)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    engine.llm.reset_prefix_cache()
    return {"s": seconds, "peak_gb": (torch.cuda.max_memory_allocated() - held) / 1e9}


def said(engine: Engine) -> list[Any]:
    """Greedy tokens, and log-probabilities, of some prompts."""
    answers = engine.generate(engine.prompts(4, 24, seed=5), 8, logprobs=0)
    outputs = [answer.outputs[0] for answer in answers]
    return [
        (t, at[t].logprob) for o in outputs for t, at in zip(o.token_ids, o.logprobs, strict=True)
    ]


def addresses(engine: Engine) -> dict[str, int]:
    """Where the weights are."""
    (model,) = engine.llm.collective_rpc("get_model")
    return {name: p.data_ptr() for name, p in model.named_parameters()}


def measured(engine: Engine, config: dict[str, Any], form: str) -> Iterator[tuple[str, Any]]:
    """Of two sets of parameters, in turn: old weights, those of one set, of the other, of the first
    again. Each form has its own.
    """
    first = 2 * FORMS.index(form)
    sets = [[*models.parameters(config, first + i, form)] for i in (1, 2)]
    size = sum(t.nbytes for _, t in sets[0]) / 1e9
    answers, where, found = [said(engine)], addresses(engine), list[dict[str, Any]]()
    for i in 0, 1, 0:
        found.append(renewed(engine, sets[i]))
        answers.append(said(engine))
    old, one, other, again = answers
    yield (
        form,
        {
            "gb": size,
            "reloads": found,
            "new answers": old != one != other,
            "the same for the same weights": one == again,
            "addresses stay": addresses(engine) == where,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--options", type=json.loads, default={}, help="of LLM, as JSON")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    note = Notes(asked.out)
    engine = Engine(str(asked.directory), **asked.options)
    note("start, s", engine.start_s)
    config = json.loads((asked.directory / "config.json").read_text())
    for form in asked.forms:
        for name, value in measured(engine, config, form):
            note(name, value)


if __name__ == "__main__":
    main()
