"""A model with its experts in few bits beside the same model in bf16, or beside what other
compilers make of that: decoding, prompts, memory.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ...checkpoints.conversion import dense_tensors
from ...errors import Error
from ...messages import count, phase
from ...messages.progress import progress
from ...nn import Experts, QuantizationConfig, prepare_, quantize_
from ...plugins import message
from ..thunder import need_thunder
from .decoding import Decoder, captured, share_keys_
from .loading import configuration, from_pretrained, placed
from .routers import fuse_routers_

# entries of configurations
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3_moe",
        "vocab_size": 2048,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "qwen3-30b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}
BF16_EXPERTS = ("grouped_mm", "batched_mm")
GRAPHED = "inductor", "fusion_moe"  # modes whose steps may become a CUDA graph
FEW = 8  # sequences up to which batched_mm, which copies an expert for each row, may be the fastest


@dataclass(frozen=True)
class Contender:
    """A model, and the backend that compiles it. experts: which of transformers' implementations
    computes steps, "" for ours; mode: what compiles prompts too, on CPUs as on GPUs, one of MODES.
    """

    name: str
    model: Any
    backend: str = ""
    experts: str = ""
    mode: str = ""

    def decoder(self, length: int, batch: int) -> Decoder:
        """A decoder of this model; without a mode, forgets what was compiled before."""
        if self.mode:
            compiled = MODES[self.mode](self.model)
            graph = self.mode in GRAPHED
            return Decoder(self.model, length, batch, compiled=compiled, graph=graph)
        torch._dynamo.reset()
        # batched_mm would copy an expert for each row of the prompts
        experts = ("grouped_mm", self.experts) if self.experts else None
        return Decoder(self.model, length, batch, backend=self.backend, experts=experts)

    @torch.no_grad()
    def read(self, ids: Tensor) -> None:
        """The last logits of prompts i64[B, P], not compiled."""
        if self.experts:
            self.model.set_experts_implementation(self.experts)
        self.model(ids, use_cache=False, logits_to_keep=1)


@dataclass(frozen=True)
class Times:
    """Seconds of a call: the median of several runs, the fastest and the slowest."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """How far apart the fastest and the slowest are, relative to the median."""
        return (self.high - self.low) / self.median

    def overlaps(self, other: Times) -> bool:
        """Whether two measurements overlap, so that it is open which is faster."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Row:
    """What a contender takes. of: "decode" or "prompt", in modes "first token" or "between tokens";
    tokens: of a call; times: None if it cannot be, and why; peak: bytes on a GPU, beside weights.
    """

    of: str
    name: str
    tokens: int
    times: Times | None
    mode: str = ""
    why: str = ""
    peak: int = 0

    @property
    def timed(self) -> Times:
        """Its times, of a row that has some."""
        assert self.times is not None
        return self.times


def made(config: Any, layers: int, device: str) -> Any:
    """A model of a configuration in bf16, with so many layers (0: all) and random weights."""
    text = config.get_text_config()
    if layers:
        whole, text.num_hidden_layers = text.num_hidden_layers, layers
        for key, kinds in vars(text).items():  # what each layer is
            if isinstance(kinds, list) and len(kinds) == whole and isinstance(kinds[0], str):
                setattr(text, key, kinds[:layers])
    torch.manual_seed(0)
    with torch.device(device):
        phase(f"making {count(text.num_hidden_layers, 'layer')} with random weights")
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def config_of(name: str) -> Any:
    """transformers' configuration of a model that SIZES names, such as "qwen3-30b". KeyError for
    other names.
    """
    sizes = dict(SIZES[name])
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def loaded(directory: str | Path, device: str, to: str = "nvfp4") -> list[Contender]:
    """The contenders of a directory: the model with experts in few bits, and the same model in
    bf16, beside which it is timed.

    Experts in floats are quantized to the format `to`; of a quantized directory the bf16 model has
    the dequantized weights. device: "cpu" or "cuda". Raises as `from_pretrained`.
    """
    where: dict[str, Any] = {"dtype": torch.bfloat16, **placed(device)}
    model = from_pretrained(directory, **where).eval()
    if not any(isinstance(module, Experts) for module in model.modules()):
        return beside(model, to=to)
    config = configuration(directory)
    config.quantization_config = None
    numbers = dense_tensors(directory, torch.bfloat16)
    dense = from_pretrained(None, config=config, state_dict=numbers, **where).eval()
    return beside(dense, model)


def beside(
    model: Any, encoded: Any = None, to: str | QuantizationConfig = "nvfp4"
) -> list[Contender]:
    """A model in bf16 behind the same with encoded experts; None: by `quantize_` in the format
    `to`, sharing all other weights.
    """
    share_keys_(model)
    if encoded is None:
        quantize_(encoded := _sharing(model), to)
    else:
        share_keys_(encoded)
    fuse_routers_(encoded)
    phase("compiling the kernels of experts")
    prepare_(encoded)
    (name, *_) = (m.encoding.name.upper() for m in encoded.modules() if isinstance(m, Experts))
    return [
        Contender(name, encoded, "fusion_moe"),
        *(Contender(f"bf16 {e}", _sharing(model), "inductor", e) for e in BF16_EXPERTS),
    ]


def in_modes(contenders: Sequence[Contender], modes: Sequence[str]) -> list[Contender]:
    """Of what `beside` gives: our experts in the mode "fusion_moe"; in all others the model in bf16
    with the experts that transformers chooses.
    """
    ours, *_, plain = contenders
    return [
        Contender(f"fusion_moe {ours.name}", ours.model, mode=mode)
        if mode == "fusion_moe"
        else Contender(f"{mode} bf16", _sharing(plain.model).requires_grad_(False), mode=mode)
        for mode in modes
    ]


def _thunder(model: Any) -> Callable[..., Any]:
    need_thunder()
    import thunder  # after the check, which says what is missing

    return thunder.jit(model)


def _thunderfx(model: Any) -> Callable[..., Any]:
    need_thunder()
    from thunder.dynamo import thunderfx

    return thunderfx(model)


# what compiles a model, each as its own documentation has it
MODES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "eager": lambda model: model,
    "inductor": partial(torch.compile, backend="inductor", dynamic=False),
    "fusion_moe": partial(torch.compile, backend="fusion_moe", dynamic=False),
    "thunder": _thunder,
    "thunderfx": _thunderfx,
}


def _sharing(model: nn.Module) -> Any:
    """A copy with the same tensors."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def compared(
    contenders: Sequence[Contender], batches: Sequence[int], context: int, prompt: int, repeats: int
) -> Iterator[Row]:
    """Steps of each batch after `context` tokens, then prompts, measured in turns."""
    on_gpu = contenders[0].model.device.type == "cuda"
    times = 20 if on_gpu else 4
    length = context + (times + 1) * (repeats + 1)
    for batch in batches:
        steps = {}
        for contender in _for_tokens(contenders, batch):
            phase(f"{contender.name}: a prompt of {batch} x {context} tokens, before steps")
            steps[contender.name] = decoder = contender.decoder(length, batch)
            decoder.prompt(_ids(contender.model, batch, context))
        phase(f"timing steps of {count(batch, 'sequence')}")
        for name, result in alternating(
            {n: d.step for n, d in steps.items()}, times, repeats
        ).items():
            yield Row("decode", name, batch, result)
    phase(f"timing prompts of {count(prompt, 'token')}")
    ids = _ids(contenders[0].model, 1, prompt)
    prompts = {c.name: partial(c.read, ids) for c in _for_tokens(contenders, prompt)}
    for name, result in alternating(prompts, 1, repeats).items():
        yield Row("prompt", name, prompt, result)


def compared_modes(
    contenders: Sequence[Contender], batches: Sequence[int], prompt: int, repeats: int
) -> Iterator[Row]:
    """Of each batch, prompts of so many tokens until their first token, then the tokens after it,
    measured alternately. What fails in a mode is its row.
    """
    times = 20 if contenders[0].model.device.type == "cuda" else 4
    length = prompt + (times + 1) * (repeats + 1)
    for batch in batches:
        torch._dynamo.reset()
        ids = _ids(contenders[0].model, batch, prompt)
        ready, rows = dict[str, Decoder](), list[Row]()
        for c in contenders:
            decoder, row = _started(c, length, ids)
            rows.append(row)
            if decoder is not None:
                ready[c.name] = decoder
        for of, calls_each, calls in (
            ("first token", 1, {name: partial(d.prompt, ids) for name, d in ready.items()}),
            ("between tokens", times, {name: d.step for name, d in ready.items()}),
        ):
            phase(f"timing: {of}")
            result = alternating(calls, calls_each, repeats)
            yield from (replace(row, of=of, times=result.get(row.name)) for row in rows)


def _started(contender: Contender, length: int, ids: Tensor) -> tuple[Decoder | None, Row]:
    """A decoder whose calls are compiled, None if that fails, and what is known of it before it is
    timed.
    """
    phase(f"{contender.name}: compiling a prompt and a step")
    on_gpu, row = ids.device.type == "cuda", Row("", contender.name, len(ids), None, contender.mode)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    try:
        decoder = contender.decoder(length, len(ids))
        for _ in range(2):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            decoder.prompt(ids)
            decoder.step()
    except Exception as error:  # of another compiler, which raises any kind
        return None, replace(row, why=why_not(error))
    return decoder, replace(row, peak=torch.cuda.max_memory_allocated() - before if on_gpu else 0)


def why_not(error: Exception) -> str:
    """An error as a line; of ours the sentence alone."""
    text = str(error) if isinstance(error, Error) else message(error)
    return " ".join(text.split())


def _for_tokens(contenders: Sequence[Contender], tokens: int) -> list[Contender]:
    """Those that are measured with so many tokens."""
    return [c for c in contenders if c.experts != "batched_mm" or tokens <= FEW]


def _ids(model: Any, batch: int, tokens: int) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (batch, tokens), device=model.device)


@torch.no_grad()
def head(model: Any, batch: int, repeats: int) -> Times:
    """What the projection to the vocabulary takes, which a model has once and not in each layer."""
    phase("timing the projection to the vocabulary")
    project = model.get_output_embeddings()
    x = torch.randn(batch, project.weight.shape[1], device=model.device, dtype=torch.bfloat16)
    call: Callable[[], object] = partial(project, x)
    if model.device.type == "cuda":
        call = captured(call)
    return alternating({"": call}, 20, repeats)[""]


@torch.no_grad()
def alternating(
    calls: Mapping[str, Callable[[], object]], times: int, repeats: int
) -> dict[str, Times]:
    """What each call takes, in runs of so many calls, in turns. The first run does not count."""
    results: dict[str, list[float]] = {name: [] for name in calls}
    for _ in progress(range(repeats + 1), "turns", repeats + 1):
        for name, call in calls.items():
            results[name].append(_seconds(call, times))
    return {
        name: Times(statistics.median(kept), min(kept), max(kept))
        for name, (_, *kept) in results.items()
    }


def _seconds(call: Callable[[], object], times: int) -> float:
    """Of a call, until the GPU has done its work."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    call()
    wait()
    start = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return (time.perf_counter() - start) / times


def bytes_of(model: nn.Module, times: float = 1) -> int:
    """Of parameters and buffers; times: how many layers there are for each of this model's."""
    named = (*model.named_parameters(), *model.named_buffers())
    return round(sum(t.nbytes * (times if ".layers." in name else 1) for name, t in named))
