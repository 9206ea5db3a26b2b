"""verify: what every projection of a model's experts is, where it lies, and what trains of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..encodings.encoded import plain
from ..errors import UnsupportedError
from ..messages import count
from ..nn.conversion.contract import contract_of
from ..nn.frozen.adaptable import AdaptableModule
from .experts import OffloadedExperts


@dataclass(frozen=True)
class Projection:
    """The weights of one projection of a layer's experts.

    encoding: or dtype of floats; shape: E, N, K; rank: of its adapter, 0 for none; where: on which
    device, in the host's memory or in files; trains, saved: of the adapter, without one of the
    weight; saved: whether the state dict of the model has it.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    rank: int
    where: str
    trains: bool
    saved: bool
    problems: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Verification:
    """The projections of a model's experts, and what is wrong, or odd, about them."""

    projections: tuple[Projection, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{p.name}: {p.encoding} {[*p.shape]}, "
            + (f"adapter of rank {p.rank}" if p.rank else "no adapter")
            + f", {p.where}, {'trains' if p.trains else 'frozen'}"
            + ("" if p.saved else ", not saved")
            for p in self.projections
        ]
        return "\n".join([*lines, *(f"problem: {problem}" for problem in self.problems)])


def verify(model: nn.Module, strict: bool = False) -> Verification:
    """What every projection of a model's experts is: encoded or in floats, with an adapter of which
    rank, on a device, in the host's memory or in files, trained or frozen, saved or not.

    What differs between layers is a problem: floats beside encoded weights, adapters of some layers
    or of several ranks, adapters that do not train beside those that do. So is an adapter that is
    not part of the model, one that the model computes without, since it is merged or disabled, one
    whose `B` is frozen while `A` trains, one whose factors PEFT understands in another way than the
    module that reads them, and one whose file had its `lora_B` expert by expert.

    Args:
        model: any model, also one that PEFT wraps, or that is offloaded.
        strict: whether a problem is an error.

    Raises:
        UnsupportedError: for a model without experts; with `strict`, for problems, all of them.
    """
    saved = {id(p) for p in model.parameters()}
    result = tuple(_projections(model, saved))
    if not result:
        raise UnsupportedError(
            f"no experts in a {type(model).__name__}",
            expected="a mixture-of-experts model, its experts in floats or in few bits",
            where="verify",
        )
    problems = (*(f"{p.name}: {why}" for p in result for why in p.problems), *_odd(result))
    if problems and strict:
        raise UnsupportedError(
            "\n".join([count(len(problems), "problem"), *problems]), where="verify"
        )
    return Verification(result, problems)


def _projections(model: nn.Module, saved: set[int]) -> Iterator[Projection]:
    layers: Iterable[Any] = model.modules()  # PEFT's are around what they adapt
    others = {
        (id(m.get_base_layer()), m.parameter_name): m
        for m in layers
        if hasattr(m, "parameter_name") and hasattr(m, "get_base_layer")
    }
    for name, module in model.named_modules():
        within = name.replace(".base_layer", "") + "." if name else ""
        if isinstance(module, AdaptableModule):
            for projection in module.projections:
                weight = getattr(module, module.part_names[projection][0])
                named = f"{within}{module.part_names[projection][0]}"
                yield _projection(
                    named,
                    module,
                    weight,
                    module.shape_of(projection),
                    module.adapter(projection),
                    saved,
                )
        else:
            for key, shape in _floats(module).items():
                adapter = others.get((id(module), key))
                yield _projection(within + key, module, getattr(module, key), shape, adapter, saved)


def _floats(module: Any) -> dict[str, tuple[int, ...]]:
    """[E, N, K] of the projections of experts in floats, by their names."""
    if contract := contract_of(module):
        return dict(zip(contract.names[:2], (contract.up_shape, contract.down_shape), strict=True))
    # others, such as Llama-4's: [E, K, N] there, [E, 2I, H] and [E, H, I] elsewhere
    up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if up is None or down is None or not up.dim() == down.dim() == 3:
        return {}
    turned = up.shape[1] == down.shape[2]
    shapes = ((t.mT if turned else t).shape for t in (up, down))
    return dict(zip(("gate_up_proj", "down_proj"), map(tuple, shapes), strict=True))


def _projection(
    name: str, module: Any, weight: Any, shape: tuple[int, ...], adapter: Any, saved: set[int]
) -> Projection:
    encoding = getattr(getattr(module, "encoding", None), "name", "")
    encoding, problems = encoding or str(weight.dtype).removeprefix("torch."), list[str]()
    factors = [] if adapter is None else _factors(adapter)
    trained = factors or [weight]
    rank = factors[0].shape[0] // shape[0] if factors and factors[0].dim() == 2 else 0
    rank = rank or (factors[0].shape[1] if factors else 0)
    if plain(weight).is_meta and not getattr(module, "brought", False):
        problems.append("no values: it is on the meta device")
    if adapter is not None:
        problems += getattr(adapter, "problems", list)()
        if why := _unused(adapter):
            problems.append(f"its adapter is {why}: the model computes without it")
        pairs = zip(factors[::2], factors[1::2], strict=True)
        if any(a.requires_grad and not b.requires_grad for a, b in pairs):
            problems.append("B of its adapter is frozen, A trains")
        if len(factors) == 2 and by_experts(_b(adapter, shape[0])):
            problems.append(
                "its lora_B has the columns of one expert after those of the other, in place of "
                "those of all experts for one of the rank's features after the other"
            )
        there = getattr(module, "adapters_on", None) or weight.device
        if any(t.device != there for t in factors):
            problems.append(f"an adapter on {factors[0].device} of a weight on {there}")
    return Projection(
        name,
        encoding,
        tuple(shape),
        rank,
        _where(module, weight),
        any(t.requires_grad for t in trained),
        all(id(t) in saved for t in trained),
        tuple(problems),
    )


def _factors(adapter: Any) -> list[Tensor]:
    """The parameters of an adapter of ours, or of PEFT's layer around a weight: A first."""
    if not hasattr(adapter, "lora_A"):
        return [adapter.A, adapter.B]
    names = [n for n in adapter.active_adapters if n in adapter.lora_A]
    return [layers[n].weight for n in names for layers in (adapter.lora_A, adapter.lora_B)]


def _b(adapter: Any, experts: int) -> Any:
    """B [E, N, r], also of PEFT's layer around floats: its columns are [r, E]."""
    if hasattr(adapter, "B"):
        return adapter.B
    (b,) = _factors(adapter)[1:]
    return b.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _unused(adapter: Any) -> str:
    """Why a model computes without an adapter; "" if it computes with it."""
    if getattr(adapter, "merged", False):
        return "merged into the weight"
    off = getattr(adapter, "disable_adapters", False) or getattr(adapter, "disabled", False)
    return "disabled" if off else ""


def by_experts(b: Tensor) -> bool:
    """Whether B [E, N, r] was read from columns in another order than PEFT's. An expert that got no
    token has zeros in all its columns: if they are spread over several experts, and belong to whole
    ones in the other order, that is the one.
    """
    zero = (b.detach() == 0).all(1)  # [E, r]
    other = zero.T.reshape(zero.shape)
    return _parts(zero) and not _parts(other)


def _parts(zero: Tensor) -> bool:
    return bool((zero.any(1) & ~zero.all(1)).any())


def _where(module: Any, weight: Any) -> str:
    if getattr(module, "brought", False):
        return "brought by accelerate for each call"
    if not isinstance(module, OffloadedExperts):
        return str(weight.device)
    here = int((module.cache.expert_map >= 0).sum())
    where = "files" if module.storage.in_files else "the host's memory"
    return f"{where}, {here} of {module.storage.experts} also on {module.device.on}"


def _odd(projections: tuple[Projection, ...]) -> Iterator[str]:
    """What differs where layers are usually alike."""
    floats = {str(d).removeprefix("torch.") for d in (torch.bfloat16, torch.float16, torch.float32)}
    encoded = [p for p in projections if p.encoding not in floats]
    kinds = {p.kind for p in projections if p.rank}
    ranks = sorted({p.rank for p in projections if p.rank})
    if len(ranks) > 1:
        yield f"adapters of ranks {', '.join(map(str, ranks))}"
    for p in projections:
        if encoded and p.encoding in floats:
            yield f"{p.name}: in {p.encoding}, others in {encoded[0].encoding}"
        if p.kind in kinds and not p.rank:
            yield f"{p.name}: no adapter, others have one"
        if p.rank and not p.trains and any(o.trains for o in projections):
            yield f"{p.name}: its adapter does not train, others do"
        if not p.saved:
            yield f"{p.name}: its adapter is not part of the model, and would not be saved"
