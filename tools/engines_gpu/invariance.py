"""Whether what vLLM says to a prompt depends on the other prompts of a batch, and where: one engine
in this process.

    VLLM_BATCH_INVARIANT=1 python tools/engines_gpu/invariance.py DIRECTORY [--out FILE.json]
        [--options '{"quantization": "fusion_moe"}'] [--adapter FOLDER] [--modules] [--speed]

Each prompt is asked alone, then all of them in other company; greedy tokens and log-probabilities
must have the same bits. A line says so for each way of asking, as soon as it is known. --against
names the file of another engine, as one without prefix caching or chunked prefill, with which the
answers to prompts alone are compared. --modules, with "enforce_eager", watches rows: which modules
give the same row of inputs another output, and which is the first with rows that no prompt alone
had. --speed measures steps and prompts; of engines with the same --turn one at a time, after all of
them have answered. Runs on CPUs too: there vLLM does not start with its flag, and
FUSION_MOE_ORDER=row asks experts for the same.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from engine import Engine, decode, prefill
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

Answer = list[Any]  # tokens, and the log-probability of each
PROMPTS, TOKENS, SHARED = 64, 12, 144  # SHARED: tokens of the beginning that half of them have
# in the names of classes of modules that work on rows
_ROWWISE = "Linear", "Norm", "VocabParallelEmbedding", "Experts", "MoERunner", "LogitsProcessor"


def prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Of 1 to `longest` tokens; every second one begins as the others of these do. The first are
    the same for each count.
    """
    drawn = random.Random(0)

    def some(n: int) -> list[int]:
        return [drawn.randrange(3, vocabulary) for _ in range(n)]

    beginning = some(min(SHARED, longest - 1))
    lengths = [drawn.randrange(1, longest + 1) for _ in range(PROMPTS)]
    return [
        beginning + some(max(1, n - len(beginning))) if i % 2 else some(n)
        for i, n in enumerate(lengths[:count])
    ]


def company(count: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Ways to ask: their names, and which prompts go together, in which order."""
    each = [*range(count)]
    yield "alone", [[i] for i in each]
    for size in (2, 4, 8, 16, 32, 64):
        if size <= count:
            yield f"in batches of {size}", [each[i : i + size] for i in range(0, count, size)]
    random.Random(1).shuffle(each)
    yield "in another order", [each]
    yield "twice", [each + each[::-1]]
    yield "alone at last", [[i] for i in each]


class Rows:
    """What modules give for the bits of a row of their inputs."""

    def __init__(self) -> None:
        self.outputs = defaultdict[str, dict[Any, Any]](dict)
        self.counts = defaultdict[str, Counter[str]](Counter)
        self.is_alone = True
        self._inputs = dict[str, list[bytes]]()

    def watch(self, model: nn.Module) -> None:
        """Watches modules that work on rows, and attention's outputs."""
        for name, module in model.named_modules():
            kind = type(module).__name__
            # what is below an adapter's layer knows it from elsewhere
            rowwise = any(part in kind for part in _ROWWISE) and not name.endswith("base_layer")
            if kind == "Attention" or rowwise:
                module.register_forward_pre_hook(self._before(name), with_kwargs=True)
                module.register_forward_hook(self._after(name, kind == "Attention"))

    def _before(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            # before, as some write into their inputs
            self._inputs[name] = _bits(*args, *kwargs.values())

        return hook

    def _after(self, name: str, of_context: bool) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            outputs = _bits(*output) if isinstance(output, tuple) else _bits(output)
            self._count(name, outputs if of_context else self._inputs.pop(name), outputs)

        return hook

    def _count(self, name: str, inputs: list[bytes], outputs: list[bytes]) -> None:
        known, counts = self.outputs[name], self.counts[name]
        for key, value in zip(inputs, outputs, strict=True):
            if self.is_alone and key not in known:
                known[key] = value
            counts["rows"] += 1
            counts["unknown inputs"] += key not in known
            counts["other outputs"] += known.setdefault(key, value) != value

    def summary(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Experts together; modules that give the same inputs other outputs; the first module with
        inputs (attention: outputs) that no prompt alone had.
        """
        of_experts = [c for name, c in self.counts.items() if name.endswith(".fusion_moe")]
        names = "rows", "unknown inputs", "other outputs"
        yield "experts", {name: sum(c[name] for c in of_experts) for name in names}
        yield from ((name, dict(c)) for name, c in self.counts.items() if c["other outputs"])
        # sampled rows of unfinished prompts are nobody's
        unknown = [name for name, c in self.counts.items() if c["unknown inputs"]]
        if unknown and unknown[0] != "logits_processor":
            yield (
                f"the first with rows that no prompt alone had: {unknown[0]}",
                dict(self.counts[unknown[0]]),
            )


def _bits(*values: Any) -> list[bytes]:
    """Of each row of the tensors that have as many as the first, and which adapter it has."""
    tensors = [t for t in values if isinstance(t, Tensor) and t.dim()]
    rows = [t for t in tensors if len(t) == len(tensors[0])]
    flat = [t.detach().flatten(1) if t.dim() > 1 else t.detach()[:, None] for t in rows]
    numbers = [t.contiguous().view(torch.uint8).cpu().numpy() for t in flat]
    keys = [b"".join(n[i].tobytes() for n in numbers) for i in range(len(rows[0]))]
    of = [v["lora_of"].tolist() for v in values if isinstance(v, dict) and "lora_of" in v]
    for slots in of:
        keys = [k + b"%d" % s if s >= 0 else k for k, s in zip(keys, slots, strict=True)]
    return keys


class Asked:
    """An engine, prompts, and what it said to them."""

    def __init__(self, engine: Engine, count: int, longest: int, adapter: str | None):
        self.engine, self.prompts = engine, prompts(count, longest, engine.vocabulary)
        self.adapter = LoRARequest("adapter", 1, adapter) if adapter else None

    def __call__(self, together: Sequence[int]) -> list[Answer]:
        """The answers to prompts in one call; every third one is shorter, and two of four have the
        adapter.
        """
        usual: dict[str, Any] = {"temperature": 0, "logprobs": 0, "detokenize": False}
        lengths = [TOKENS if i % 3 else TOKENS // 2 for i in together]
        sampling = [SamplingParams(max_tokens=n, ignore_eos=True, **usual) for n in lengths]
        answers = self.engine.llm.generate(
            [{"prompt_token_ids": self.prompts[i]} for i in together],
            sampling,
            use_tqdm=False,
            lora_request=[self.adapter if i % 4 in (1, 2) else None for i in together],
        )
        outputs = [answer.outputs[0] for answer in answers]
        return [
            [
                list(o.token_ids),
                [at[t].logprob for t, at in zip(o.token_ids, o.logprobs, strict=True)],
            ]
            for o in outputs
        ]


def differ(answers: Sequence[tuple[int, Answer]], wanted: Mapping[int, Answer]) -> dict[str, Any]:
    """How many answers have other tokens or other bits than those that are wanted, and by how much
    log-probabilities differ at most, up to the first other token.
    """
    tokens = bits = 0
    largest = 0.0
    for i, (ids, values) in answers:
        want_ids, want = wanted[i]
        tokens += ids != want_ids
        bits += (ids, values) != (want_ids, want)
        same = [a == b for a, b in zip(ids, want_ids, strict=True)]
        until = same.index(False) if False in same else len(same)
        gaps = [abs(a - b) for a, b in zip(values[:until], want[:until], strict=True)]
        largest = max([largest, *gaps])
    return {"answers": len(answers), "other tokens": tokens, "other bits": bits, "apart": largest}


def measured(ask: Asked, rows: Rows | None) -> Iterator[tuple[str, Any]]:
    """The answers alone; then, for each way of asking, how far they are from these."""
    alone = dict[int, Answer]()
    for name, batches in company(len(ask.prompts)):
        ask.engine.llm.reset_prefix_cache()
        answers = [pair for batch in batches for pair in zip(batch, ask(batch), strict=True)]
        if not alone:
            alone = dict(answers)
            yield "answers", [alone[i] for i in range(len(alone))]
        else:
            yield name, differ(answers, alone)
        if rows:
            rows.is_alone = False
    answers = list(enumerate(ask(range(len(ask.prompts)))))  # of what is in the cache
    yield "with their own prefixes cached", differ(answers, alone)


def speed(engine: Engine) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a step with so many sequences, and of a long prompt: times by the clock, and GPU time with
    that of each kernel, which other processes hardly change.
    """
    for count in 1, 16, 64:
        yield f"a step of {count}", decode(engine, count)
    yield "a prompt", prefill(engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--options", type=json.loads, default={}, help="of LLM, as JSON")
    parser.add_argument("--adapter")
    parser.add_argument("--count", type=int, default=PROMPTS, help="of prompts")
    parser.add_argument("--longest", type=int, default=300, help="prompt, in tokens")
    parser.add_argument("--modules", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--turn", type=Path, help="a file that is there")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with asked.turn.open() if asked.turn else nullcontext() as turn:
        if turn:
            fcntl.flock(turn, fcntl.LOCK_SH)
        note = Notes(asked.out)
        engine = Engine(asked.directory, **asked.options)
        note("start, s", engine.start_s)
        answer(engine, asked, note)
        if turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
        for name, value in speed(engine) if asked.speed else ():
            note(name, value)


class Notes:
    """Results: a line of each, and all of them in a file."""

    def __init__(self, file: Path | None):
        self.file, self.begun = file, time.perf_counter()
        self.results: dict[str, Any] = {"flag": os.environ.get("VLLM_BATCH_INVARIANT", "0")}

    def __call__(self, name: str, value: Any) -> None:
        self.results[name] = value
        if isinstance(value, dict):
            shown = json.dumps({k: v for k, v in value.items() if k != "kernels"})
        else:
            shown = f"{len(value)} of them" if isinstance(value, list) else json.dumps(value)
        print(f"{time.perf_counter() - self.begun:6.1f} s  {name}: {shown}", flush=True)
        if self.file:
            self.file.write_text(json.dumps(self.results))


def answer(engine: Engine, asked: argparse.Namespace, note: Notes) -> None:
    """Asks, and notes what differs."""
    ask = Asked(engine, asked.count, asked.longest, asked.adapter)
    rows = Rows() if asked.modules else None
    if rows:
        engine.llm.apply_model(rows.watch)
    for name, value in measured(ask, rows):
        note(name, value)
    if asked.against:
        other = json.loads(asked.against.read_text())["answers"]
        note("against the other engine", differ([*enumerate(note.results["answers"])], other))
    for name, counts in rows.summary() if rows else ():
        note(name, counts)


if __name__ == "__main__":
    main()
