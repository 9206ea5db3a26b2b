"""The work of `run`, which needs torch: a model that is loaded, and what was said to it."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from ..checkpoints import Directory
from ..encodings import NVFP4
from ..errors import OptionError
from ..messages import amount, count
from ..nn import Experts
from .inspect_directory import is_expert, kernels_for
from .models import a_model, tokenizer_of
from .output import Result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..integrations.transformers.decoding import Decoder

_LEARN = 16  # tokens between two changes of which experts are on the GPU


@dataclass(frozen=True)
class Answer:
    """What one prompt took, in seconds and tokens: of the prompt, and after the first token."""

    text: str
    read: int
    first: float
    written: int
    rest: float

    def __str__(self) -> str:
        rate = f"{(self.written - 1) / self.rest:,.1f}" if self.written > 1 else "?"
        return (
            f"prompt: {count(self.read, 'token')}, {self.read / self.first:,.1f} tokens/s; "
            f"answer: {count(self.written, 'token')}, {rate} tokens/s"
        )


@dataclass(frozen=True)
class Run(Result):
    """What was answered, and by what. experts: modules by encoding, with the kernels that read
    them; weights, peak: bytes; recorded: the file that --record wrote, "" without it.
    """

    schema = "fusion_moe.run/2"
    model: str
    steps: str
    experts: tuple[str, ...]
    weights: int
    peak: int
    answers: tuple[Answer, ...]
    recorded: str

    def print(self, console: Console) -> None:
        """What it took; the text itself was printed while it was made."""
        for answer in self.answers[-1:]:
            console.print(f"\n{answer}", soft_wrap=True)
        console.print(
            f"memory: {amount(self.weights, 'B')} of weights, {amount(self.peak, 'B')} at its peak",
            f"experts: {'; '.join(self.experts) or 'in floats, by transformers'}",
            f"steps: {self.steps}",
            sep="\n",
            soft_wrap=True,
        )
        if self.recorded:
            console.print(f"record: {self.recorded}", soft_wrap=True)


def _needed(of: Directory) -> int:
    """The bytes of a model's weights once it is loaded: experts in floats are rounded."""
    rounded = [t for name, t in of.tensors.items() if not of.quantization and is_expert(name)]
    fewer = [t.nbytes - math.prod(t.shape) * NVFP4.weight_bits / 8 for t in rounded]
    return sum(t.nbytes for t in of.tensors.values()) - int(sum(fewer))


class Talk:
    """A model, and what was said. out: whether text is printed while it is made; learn: has
    offloaded experts follow what was used, which replays do not.
    """

    learn: Callable[[Any], int] | None = None

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, choose: Any, out: bool):
        self.model, self.tokenizer, self.choose, self.out = model, tokenizer, choose, out
        self.messages: list[dict[str, str]] = []
        self.decoder: Decoder | None = None
        self.step: Callable[[], None] = lambda: None  # called where one begins
        self.steps, self.answers, self.peak = "", list[Answer](), 0
        self.weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))

    @classmethod
    def open(
        cls,
        directory: Path,
        device: str,
        how: dict[str, Any],
        temperature: float | None,
        out: bool,
    ) -> Talk:
        """Loads a model. how: what of it goes elsewhere, for `from_pretrained`, which may raise."""
        from ..integrations.transformers import NVFP4Config, from_pretrained, fuse_routers_
        from ..integrations.transformers.decoding import sampling, share_keys_
        from ..integrations.transformers.loading import placed

        opened = Directory.open(directory)  # says what is wrong with it
        print(f"weights: {amount(_needed(opened), 'B')} of memory", file=sys.stderr)
        tokenizer = tokenizer_of(directory)
        # by a configuration, experts in FP8 would be rounded too
        rounds = {} if opened.quantization else {"quantization_config": NVFP4Config()}
        how = {"dtype": torch.bfloat16, **rounds, **(how or placed(device))}
        with a_model(directory):
            model = from_pretrained(directory, **how).eval()
        fuse_routers_(model)
        share_keys_(model)
        text = model.generation_config
        if temperature is None:
            temperature = (text.temperature or 1.0) if text.do_sample else 0.0
        talk = cls(model, tokenizer, sampling(text, temperature), out)
        if "max_memory" in how:
            from ..offload import learn_

            talk.learn = learn_
        return talk

    def answer(self, prompt: str, tokens: int, length: int | None) -> Answer:
        """length: of the cache; None: as many as are needed; at most the model's context."""
        from transformers import TextStreamer

        from ..integrations.transformers.decoding import check_ids, context_of

        self.messages.append({"role": "user", "content": prompt})
        ids = self._ids(prompt)
        check_ids(self.model, ids)
        ids = ids.to(self.model.device)
        wanted = length or ids.shape[1] + tokens
        whole = min(wanted, context_of(self.model) or wanted)  # beyond it there is only noise
        room = whole - ids.shape[1]
        if room < 1:
            raise OptionError(
                f"a conversation of {count(ids.shape[1], 'token')}",
                expected=f"fewer than {whole:,}",
                todo="--length makes room for more" if whole == length else "",
                where="run",
            )
        decoder = self._decoder(whole, ids.shape[1])
        streamer = TextStreamer(self.tokenizer, skip_special_tokens=True) if self.out else None
        start = time.perf_counter()
        self.step()
        written = [int(decoder.prompt(ids))]
        first = time.perf_counter()
        with contextlib.suppress(KeyboardInterrupt):  # what there is then is the answer
            while written[-1] not in self._ends() and len(written) < min(tokens, room):
                if streamer:
                    streamer.put(torch.tensor(written[-1:]))
                self.step()
                written.append(int(decoder.step()))
                if self.learn and len(written) % _LEARN == 0:
                    self.learn(self.model)
        end = time.perf_counter()
        if streamer:
            streamer.put(torch.tensor(written[-1:]))
            streamer.end()
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        answer = Answer(text, ids.shape[1], first - start, len(written), end - first)
        self.answers.append(answer)
        self.peak = _peak(self.model.device)
        return answer

    def ended(self, recorded: str) -> Run:
        """The result of the command: the model, how steps ran, experts, memory, and all answers so
        far. recorded: the file that the recording was written to, or "".
        """
        return Run(
            type(self.model).__name__,
            self.steps,
            _experts_of(self.model),
            self.weights,
            self.peak,
            tuple(self.answers),
            recorded,
        )

    def _ids(self, prompt: str) -> torch.Tensor:
        """i64[1, P]: the conversation by the tokenizer's template, or the prompt alone."""
        if not self.tokenizer.chat_template:
            return self.tokenizer(prompt, return_tensors="pt").input_ids
        return self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]

    def _decoder(self, length: int, prompt: int) -> Decoder:
        """prompt: tokens of the first one, whose kernels are compiled here, before it is timed."""
        from ..integrations.transformers.decoding import Decoder
        from ..nn import prepare_

        if self.decoder is None:
            prepare_(self.model, tokens=(1, prompt))
            self.decoder = Decoder(self.model, length, choose=self.choose)
            why = self.decoder.why_plain
            self.steps = f"call by call: {why}" if why else "a replayed CUDA graph"
        return self.decoder

    def _ends(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        return (
            ends
            if isinstance(ends, list)
            else [self.tokenizer.eos_token_id if ends is None else ends]
        )


@contextlib.contextmanager
def recorded(talk: Talk, path: Path | None) -> Iterator[None]:
    """Records what a talk does inside the block, into a file, if there is a path."""
    if path is None:
        yield
        return
    from ..recorder import record

    with record(talk.model) as run:
        talk.step = run.step
        yield
    run.save(path)


def line(prompt: str) -> str:
    """What the user types at the prompt; "" at the end of the input."""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _experts_of(model: torch.nn.Module) -> tuple[str, ...]:
    """Modules of each encoding, and what multiplies by it."""
    counter = Counter(module.encoding for module in model.modules() if isinstance(module, Experts))
    return tuple(
        f"{count(n, 'layer')} in {encoding.name}, {kernels_for(encoding)}"
        for encoding, n in counter.items()
    )


def _peak(device: torch.device) -> int:
    """Bytes of the GPU's memory, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
