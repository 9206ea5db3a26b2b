"""prepare_: puts the weights of a model in the layout of a target, in place, and compiles its
kernels before they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from ... import backends, options
from ...errors import (
    NonFiniteError,
    OptionError,
    UnsupportedError,
    need_one_of,
)
from ...messages import log
from ...messages.progress import progress
from ...runtime import native
from ...runtime.precompile import preparing
from ..config import WEIGHTS
from .adaptable import AdaptableModule
from .base import place_
from .packed import PackedModule
from .requantized import requantizing

_ALL = "all"
# tokens: 1, which tracers treat as a constant, and two others, after which they treat it as a
# symbol
_FEW = (1, 2, 3)


def prepare_(
    model: nn.Module,
    to: str = "auto",
    *,
    tokens: Sequence[int] | Literal["all"] = (),
    weights: Literal["packed", "fp8", "both"] | None = None,
) -> None:
    """Puts the weights of a model in the layout of a target, in place.

    On CUDA, modules do this by themselves at their first call, unless the option `order_weights` is
    off; `prepare_` chooses the time. It needs memory for one extra copy of one weight of a layer.
    Weights that are not whole tiles of the layout are padded with zeros; state dicts are always
    linear, without padding. A warning names weights that cannot have the layout; they stay linear.
    Call `prepare_` once the model is where it runs: a module that moves to another kind of device
    returns to the linear layout. Parameters become new ones.

    On a CPU, weights may lie elsewhere than modules put them, after torch.load of a module. They
    are copied to large pages. Shared memory stays.

    C++ launches this process's calls from then on, where Python would (the option `native_calls`):
    the library for that is compiled now, unless the cache folder has it.

    Args:
        model: any module; its submodules of fusion_moe.nn are prepared.
        to: a target; "auto": the one of the option `target`, then that of the weights' device.
        tokens: numbers of tokens whose kernels are compiled now, in parallel and with a progress
            line, instead of in the middle of serving. For each number the model is called with that
            many tokens in one sequence, and with one token in that many sequences; none of this
            library's kernels runs meanwhile. "all": the model is called with up to three tokens,
            and the kernels for all other numbers are derived from these calls' programs. Compiling
            a model afterwards makes other programs: pass the model that torch.compile returned.
        weights: what experts in fewer than 8 bits are read as from now on, for
            activation_format="fp8"; None: as before. "packed": as they are stored, and activations
            in 16 bits. "fp8": requantized to FP8 with a power of two for 128 x 128, once, now; what
            was loaded stays in the host's memory, for state dicts and `save_pretrained`, which
            never write the FP8 weights. "both": packed below some 130 rows an expert, in FP8 from
            there on, and both in the device's memory; then numbers depend on how many rows are
            computed together. Weights that change are requantized again; compiled models see it
            after `load_state_dict` and `update_weights_` only. Logs what was rounded, and how large
            it is.

    Raises:
        UnsupportedError: for a model that calls nothing of this library, and for one that takes no
            `input_ids`: call that with its own arguments inside
            `with fusion_moe.preparing("all"):`.
        NonFiniteError: for a block scale that is negative or NaN.

    An interrupted call leaves each module in one layout or the other.
    """
    need_one_of("to", to, ("auto", *backends.TARGETS), where="prepare_")
    if weights is not None:
        need_one_of("weights", weights, WEIGHTS, where="prepare_")
    _check_tokens(model, tokens)
    modules = {name: m for name, m in model.named_modules() if isinstance(m, PackedModule)}
    if not modules and not tokens:
        log.warning(
            "prepare_ changes nothing: no encoded weights in a %s; fusion_moe.quantize_(model) "
            "makes them",
            type(model).__name__,
        )
    for name, module in modules.items():
        if weights not in (None, "packed") and isinstance(module, AdaptableModule) and module.fixed:
            raise UnsupportedError(
                f"weights = {weights!r} for {name or type(module).__name__}",
                expected=module.fixed,
                where="prepare_",
            )
    modules = {name: module for name, module in modules.items() if not module.brought}
    kept: dict[str, str] = {}
    for name, module in progress(modules.items(), "ordering weights", len(modules)):
        device = next(module.parameters()).device
        wanted = options.current().target if to == "auto" else to
        if weights is not None and isinstance(module, AdaptableModule):
            module.read_as_(weights)
        try:
            why = module.put_in(module.layout_on(backends.find(wanted, device)))
        except NonFiniteError as error:
            raise error.at(name) from None
        if why:
            kept[name or type(module).__name__] = why
        place_(module)
        module.decided()
    if weights is not None and (did := requantizing(modules.values())):
        log.warning("%s", did)
    elif weights not in (None, "packed") and modules:
        log.warning(
            "weights = %r changes nothing: none of the weights, in %s, can be requantized to FP8",
            weights,
            ", ".join(dict.fromkeys(m.encoding.name for m in modules.values())),
        )
    if modules:
        native.use()
    if kept:
        (name, why), *others = kept.items()
        log.warning(
            "weights stay in the linear layout: %s%s: %s",
            name,
            f" and {len(others)} more" if others else "",
            why,
        )
    if tokens:
        _compile(model, tokens)


def _check_tokens(model: nn.Module, tokens: Sequence[int] | str) -> None:
    """OptionError for an invalid number of tokens, UnsupportedError for a model that cannot be
    called with tokens.
    """
    listed = isinstance(tokens, Sequence) and all(
        isinstance(count, int) and count > 0 for count in tokens
    )
    if tokens != _ALL and not listed:
        raise OptionError(
            f"tokens = {tokens!r}",
            expected="a list of positive integers, or 'all'",
            where="prepare_",
        )
    if tokens and not _is_language_model(model):
        raise UnsupportedError(
            f"tokens for a {type(model).__name__}",
            expected="a language model with a config",
            todo="with fusion_moe.preparing(): call the model with inputs of these sizes",
            where="prepare_",
        )


def _is_language_model(model: nn.Module) -> bool:
    """Whether a model can be called with tokens. A configuration of several parts has them in its
    text model's; a model of several, such as a thinker and a talker, may not be called itself.
    """
    called, config = getattr(model, "_orig_mod", model), getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return type(called).forward is not nn.Module.forward and hasattr(text, "vocab_size")


def _compile(model: nn.Module, tokens: Sequence[int] | str) -> None:
    """Compiles what calls of a language model need for these numbers of tokens."""
    device = next(model.parameters()).device
    counts, sizes = (_FEW, "all") if isinstance(tokens, str) else (tokens, "called")
    with preparing(sizes) as noted, torch.no_grad():
        for shape in dict.fromkeys(shape for count in counts for shape in ((1, count), (count, 1))):
            model(input_ids=torch.zeros(shape, dtype=torch.long, device=device), use_cache=False)
        if not noted:
            raise UnsupportedError(
                f"a {type(model).__name__} that calls nothing of fusion_moe",
                expected="experts of ours, or a compiled model",
                todo="fusion_moe.quantize_(model), or give prepare_ what torch.compile returned",
                where="prepare_",
            )
