"""What a step that trains adapters needs of a GPU and of the host, and how fast it would be, before
anything is loaded: by arithmetic on a model's sizes.

What autograd saves of a token, and what a backward needs beside, is what torch's profiler shows of
the Trainer's steps under autocast; sums are 1.00 to 1.07 of what torch allocated on an H200 (4 and
8 layers of Qwen3-30B's sizes, 4,096 and 16,384 tokens); rates are those of the same runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..checkpoints import number
from ..encodings import NVFP4
from ..messages import amount
from .plan import DISK, INNER, SLOTS, WORKSPACE, Layer, Model, Plan, make

LINK = 5.0e10  # bytes per second that experts are copied with: PCIe 5, x16
FLOPS = {"H100": 1.4e14, "H200": 1.9e14}  # per second, of whole steps
_UNPACK = 9.6e11  # bytes per second of experts that the GPU puts into the layout of its kernels
_BUFFERS = 4  # each as large as a layer's experts
_ADAM = 16  # bytes of a factor: it, its gradient and two moments, in float32
_ADAM_8BIT = 10  # moments in 8 bits
_STASHED = 5  # what TRL's activation_offloading leaves on the GPU
_LOGIT = 12  # bytes: its log-softmax in float32, the gradients of that and of the logit


@dataclass(frozen=True)
class Step:
    """What trains. tokens: of a forward, without accumulation; rank: of the adapters of all
    experts and of attention; checkpointing: of gradients, by layers; chunked_loss: whether logits
    are never there for all tokens; adam_8bit: whether the optimizer's moments have 8 bits;
    activation_offloading: whether what checkpointing keeps of layers is in the host's memory.
    """

    tokens: int = 4096
    rank: int = 16
    checkpointing: bool = True
    chunked_loss: bool = False
    adam_8bit: bool = False
    activation_offloading: bool = False


@dataclass(frozen=True)
class TrainPlan:
    """parts: bytes of the GPU's memory by what they are for, but experts that stay there; of a
    layer's activations and the loss, which take turns, those that are more; plan: which do, None if
    there is no room for the parts; seconds of a step: of copies, and of products.
    """

    step: Step
    memory: int
    parts: Mapping[str, int]
    plan: Plan | None
    copies: float
    products: float
    advice: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        """Copies run under products."""
        return self.step.tokens / max(self.copies, self.products)

    def __str__(self) -> str:
        rows = [f"a step of {self.step.tokens:,} tokens, of {amount(self.memory, 'B')}:"]
        rows += [f"  {name:<24}{amount(n, 'B')}" for name, n in self.parts.items()]
        if self.plan is None:
            missing = sum(self.parts.values()) - self.memory
            return "\n".join([*rows, f"too much by {amount(missing, 'B')}", *self.advice])
        experts = amount(self.plan.in_slots, "B")
        rows += [f"  {'experts':<24}{experts}, {self.plan.resident:.0%} stay between steps"]
        if not self.plan.whole:
            there = self.plan.model.experts - self.plan.filed
            filed = f", in files: {amount(self.plan.filed, 'B')}" if self.plan.in_files else ""
            rows += [f"in memory: {amount(there, 'B')} of experts{filed}"]
        of = "copies" if self.copies > self.products else "products"
        rows += [
            f"copies {self.copies:.3g} s, products {self.products:.3g} s: about "
            f"{float(f'{self.tokens_per_second:.3g}'):,.0f} tokens/s, bound by {of}"
        ]
        return "\n".join([*rows, *self.advice])


def of_sizes(config: Mapping[str, Any]) -> Model:
    """A model by its configuration alone, with experts in NVFP4."""
    hidden, inner, experts, slots, layers = (
        _entry(config, *keys)
        for keys in (("hidden_size",), INNER, ("num_experts",), SLOTS, ("num_hidden_layers",))
    )
    shapes = (2 * inner, hidden), (hidden, inner)
    nbytes = sum(
        prod(NVFP4.part_shape(part, (1,), n, k, runs)) * part.dtype.itemsize
        for (n, k), runs in zip(shapes, (2, 0), strict=True)
        for part in NVFP4.parts
    )
    layer = Layer("", experts, nbytes, 3 * hidden * inner, slots)
    dense = layers * (_attention(config) + hidden * (experts + 2))
    head = _entry(config, "vocab_size") * hidden
    rest = 2 * (dense + (1 if config.get("tie_word_embeddings") else 2) * head)
    return Model((layer,) * layers, rest, 0)


def plan(
    model: Model,
    config: Mapping[str, Any],
    memory: int,
    step: Step,
    ram: int | None = None,
    link: float = LINK,
    flops: float = FLOPS["H100"],
    disk: int | None = None,
) -> TrainPlan:
    """What fits of a model into so many bytes of a GPU, and how fast a step is. disk: bytes of a
    folder for experts that `ram` is too small for. OptionError for too little of both.
    """
    parts, whole = _parts(model, config, step), None
    needed = sum(parts.values())
    on_device = replace(step, activation_offloading=False)
    sent = sum(_parts(model, config, on_device).values()) - needed  # activations, to the host
    without = {name: n for name, n in parts.items() if name != "buffers for copies"}
    if memory >= sum(without.values()) + model.experts:
        parts, needed = without, sum(without.values())
    least = 0 if parts is without else 3 * sum(layer.nbytes for layer in model.layers)
    if memory >= needed + least:
        kept = {"kv_tokens": 0, "workspace": needed - model.rest, "where": "plan"}
        held = None if ram is None else ram - sent
        whole = make(model, memory, held, disk=disk, **kept)  # type: ignore[arg-type]
    away = 0.0 if whole is not None and whole.whole else 1 - (whole.resident if whole else 0)
    # layers, forward and backward; where these turn, one is there, two others where they arrived
    each = 1 / len(model.layers)
    passes, unpacked = max(0, 2 - 6 * each), 2 - 2 * each
    filed, products = whole.filed if whole else 0, _flops(model, config, step) / flops
    copies = passes * away * ((model.experts - filed) / link + filed / min(link, DISK))
    copies += sent / link
    products += unpacked * bool(away) * model.experts / _UNPACK
    advice = tuple(_advice(model, config, memory, step, whole, copies > products))
    return TrainPlan(step, memory, parts, whole, copies, products, advice)


def _parts(model: Model, config: Mapping[str, Any], step: Step) -> dict[str, int]:
    hidden, inner = _entry(config, "hidden_size"), _entry(config, *INNER)
    layers, wide = len(model.layers), _attention(config) // hidden
    slots = max(layer.slots for layer in model.layers)
    of_experts = max(layer.experts for layer in model.layers) * (2 * hidden + 3 * inner)
    factors = step.rank * (of_experts + 4 * hidden + wide)
    # results of the first product, inputs of norms in float32, of adapters and of experts, and
    # factors as autocast casts them; then what the backward of a layer's experts needs beside
    saved = step.tokens * (4 * slots * inner + 16 * hidden + 5 * wide) + 2 * factors
    working, kept = 2 * step.tokens * (slots * (hidden + 3 * inner) + 3 * hidden), layers * saved
    if step.checkpointing:
        kept = 2 * step.tokens * hidden * min([layers] + [_STASHED] * step.activation_offloading)
        working += saved
    # of chunks, Liger's have up to twice as many logits as hidden states
    logits = step.tokens * min([_entry(config, "vocab_size")] + [2 * hidden] * step.chunked_loss)
    largest = {"a layer's activations": working, "logits and loss": _LOGIT * logits}  # in turns
    return {
        "all but experts": model.rest,
        "adapters, Adam": (_ADAM_8BIT if step.adam_8bit else _ADAM) * layers * factors,
        "saved activations": kept,
        max(largest, key=largest.__getitem__): max(largest.values()),
        "buffers for copies": _BUFFERS * max(layer.whole for layer in model.layers),
        "to work with": WORKSPACE,
    }


def _flops(model: Model, config: Mapping[str, Any], step: Step) -> float:
    """Of a step: forward, gradients of activations, and forward again with checkpointing."""
    routed = sum(layer.slots * layer.macs for layer in model.layers)
    dense = len(model.layers) * _attention(config)
    head = _entry(config, "vocab_size") * _entry(config, "hidden_size")
    return 2.0 * step.tokens * ((2 + step.checkpointing) * (routed + dense) + 2 * head)


def _attention(config: Mapping[str, Any]) -> int:
    """Numbers of a layer's four projections."""
    hidden, heads = _entry(config, "hidden_size"), _entry(config, "num_attention_heads")
    size = number(config, "", ("head_dim",)) or hidden // heads
    return 2 * hidden * size * (heads + (number(config, "", ("num_key_value_heads",)) or heads))


def _advice(
    model: Model,
    config: Mapping[str, Any],
    memory: int,
    step: Step,
    made: Plan | None,
    by_copies: bool,
) -> list[str]:
    """What to do for the plan, or what to change."""
    if made is not None:
        each = sum(layer.nbytes for layer in model.layers)
        room = model.rest + WORKSPACE + each * min(made.slots)
        how = ["quantization_config=NVFP4Config()"] if model.rounded else []
        if not made.whole:
            ram = f', "cpu": "{(made.ram or 0) / 2**30:.1f}GiB"' if made.in_files else ""
            how += [f'max_memory={{0: "{room / 2**30:.1f}GiB"{ram}}}', "kv_tokens=0"]
            how += ["offload_folder=..."] if made.in_files else []
        why = "" if made.whole else ": the rest is for training"
        lines = [f"load it with {', '.join(how)}{why}"] if how else []
        return lines + (["more tokens a step cost no more copies"] if by_copies else [])
    now = sum(_parts(model, config, step).values())
    changes = {
        "--checkpointing": replace(step, checkpointing=True),
        "--chunked-loss, such as TRL's or use_liger_kernel=True": replace(step, chunked_loss=True),
        "--adam-8bit, such as optim='adamw_bnb_8bit'": replace(step, adam_8bit=True),
        "--activation-offloading, TRL's": replace(step, activation_offloading=True),
        f"--rank {step.rank // 2}": replace(step, rank=max(1, step.rank // 2)),
        f"--tokens {step.tokens // 2}, and accumulation": replace(step, tokens=step.tokens // 2),
    }
    saves = {how: now - sum(_parts(model, config, s).values()) for how, s in changes.items()}
    return [f"{how} saves {amount(n, 'B')}" for how, n in saves.items() if n > 0]


def _entry(config: Mapping[str, Any], *keys: str) -> int:
    return number(config, "", keys) or 0
