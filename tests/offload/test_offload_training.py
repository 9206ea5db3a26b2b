"""Offloaded experts with adapters: gradients are those of experts that are on the device, bit for
bit, whatever is copied, in which order, and whatever goes wrong in between.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from bad_calls import messages
from experts import experts
from test_offloaded_experts import BOTH, E, H, I, encoded, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusion_moe
from fusion_moe.bodies.autograd import Step
from fusion_moe.encodings import EncodedParameter
from fusion_moe.errors import UnsupportedError
from fusion_moe.layouts import W16X64
from fusion_moe.lora.adapter import add_lora_
from fusion_moe.lora.merging import merge_lora_
from fusion_moe.nn import Experts, swiglu
from fusion_moe.offload import OffloadedExperts
from fusion_moe.offload.cache import Cache
from fusion_moe.offload.offload import _into_files
from fusion_moe.offload.pretended import Pretended
from fusion_moe.runtime.host_memory import pages

pytestmark = pytest.mark.usefixtures("meaning_without_all")

LAYERS = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Layers(nn.Module):
    """Layers of experts, one after the other."""

    def __init__(self, layers: list[Experts], reentrant: bool | None = None):
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(layers), reentrant

    def forward(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        for layer in self.layers:
            rows = nn.functional.layer_norm(x, (H,))
            if self.reentrant is None:
                x = x + layer(rows, ids, w)
            else:
                x = x + checkpoint(layer, rows, ids, w, use_reentrant=self.reentrant)
        return x


def offloaded(plain: Experts, slots: int, shared: Any = None) -> OffloadedExperts:
    def make(storage: Any) -> Pretended:
        return Pretended(storage, slots, 2, BOTH)

    return OffloadedExperts.of(plain, make, Cache(E, slots), 0, shared)


def both(slots: int = 3, adapters: bool = True, reentrant: bool | None = None) -> list[Layers]:
    """On the device; and in the host's memory but for some."""
    results, shared = [], dict[Any, Any]()
    for away in (False, True):
        layers: list[Experts] = [experts(E, H, I, seed=i) for i in range(LAYERS)]
        if away:
            layers = [offloaded(layer, slots, shared) for layer in layers]
        results.append(Layers(layers, reentrant))
        if adapters:
            adapt(results[-1])
    return results


def adapt(model: nn.Module) -> None:
    add_lora_(model, rank=4)
    g = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(0, 0.1, generator=g)


def gradients(model: nn.Module, count: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """What a call gives, its gradients, and those of adapters, which add up."""
    x, ids, w = tokens(count, dtype, seed)
    x.requires_grad_()
    w.requires_grad_()
    y = model(x, ids, w)
    y.float().square().mean().backward()
    assert x.grad is not None
    assert w.grad is not None
    adapters = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), x.grad, w.grad, *adapters]


def assert_equal(found: list[Tensor], want: list[Tensor]) -> None:
    assert len(found) == len(want)
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("slots", [0, 3, E])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_are_those_of_experts_on_the_device(slots, reentrant):
    plain, found = both(slots, reentrant=reentrant)
    for step, dtype in enumerate(DTYPES):
        for count in (0, 2, 40):  # the second names some of the experts
            want = gradients(plain, count, dtype, step)
            assert_equal(gradients(found, count, dtype, step), want)


@pytest.mark.parametrize("layout", ["linear", W16X64.name])
def test_the_same_programs_run_in_each_layout(layout, monkeypatch):
    """So a GPU, which chooses kernels by programs and sizes, launches what it launches for experts
    that are there.
    """
    there, away = (experts(E, H, 2 * I) for _ in "ab")
    there.put_in(layout)
    away = offloaded(away, 3)
    away.device.layout = layout
    of_call, steps = Step.of_call, list[Step]()

    def stop(call: Any) -> None:
        steps.append(of_call(call))
        raise KeyboardInterrupt

    monkeypatch.setattr(Step, "of_call", stop)
    for model in (there, away):
        adapt(model)
        with pytest.raises(KeyboardInterrupt):
            gradients(model, 40, torch.bfloat16)
    a, b = steps
    assert f"layout='{layout}'" in a.programs.backward
    assert a == b


def test_without_adapters():
    """Frozen experts between layers that train."""
    plain, found = both(adapters=False)
    assert_equal(gradients(found, 40, torch.bfloat16), gradients(plain, 40, torch.bfloat16))


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "int4", "bf16"])
def test_encodings_and_biases(name):
    biases = torch.randn(E, 2 * I), torch.randn(E, H)
    how = {"gate_up_bias": biases[0].bfloat16(), "down_bias": biases[1].bfloat16()}
    activation = swiglu(interleave=8, limit=7.0, alpha=1.702, up_offset=1.0)
    found = []
    for away in (False, True):
        layer = encoded(name, activation=activation, **how)
        model = Layers([offloaded(layer, 3) if away else layer])
        adapt(model)
        found.append(gradients(model, 40, torch.bfloat16))
    assert_equal(*found)


def test_copies_are_ahead_of_their_use_and_none_where_passes_turn(monkeypatch):
    _, found = both(slots=2)
    buffers = found.layers[0].layer_buffers
    for layer in found.layers:  # copies are made when they are asked for
        monkeypatch.setattr(layer.device, "copies_itself", True)
    number = {layer.device: i for i, layer in enumerate(found.layers)}
    own, hold, used, copied = Pretended.fetch, buffers.hold, list[int](), list[tuple[int, int]]()

    def fetch(self: Pretended, wanted: Any, arrival: Any) -> None:
        copied.append((used[-1], number[self]))
        own(self, wanted, arrival)

    def held(layer: OffloadedExperts, named: Any) -> Any:
        used.append(number[layer.device])
        return hold(layer, named)

    assert all(layer.layer_buffers is buffers for layer in found.layers)
    for _ in range(2):
        gradients(found, 40, torch.bfloat16)
    before = [layer.counters.copied for layer in found.layers]
    monkeypatch.setattr(Pretended, "fetch", fetch)
    monkeypatch.setattr(buffers, "hold", held)
    gradients(found, 40, torch.bfloat16)
    assert used == [*range(LAYERS), *reversed(range(LAYERS))]
    # while one is used: the third one after it; not those that were used before the last one
    assert copied == [(3, 0), (0, 3)]
    counted = [layer.counters.copied for layer in found.layers]
    away = [int((layer.device.expert_map < 0).sum()) for layer in found.layers]
    assert [b - a for a, b in zip(before, counted, strict=True)] == [away[0], 0, 0, away[3]]


def test_few_tokens_copy_the_experts_that_they_name():
    _, found = both(slots=0)
    _, ids, _ = tokens(1)
    gradients(found, 1, torch.bfloat16)
    named = len({e for e in ids.flatten().tolist() if e >= 0})
    assert [layer.counters.copied // named for layer in found.layers] == [2, 1, 1, 1]
    layer = found.layers[0]
    assert layer.counters.bytes_copied == layer.counters.copied * layer.storage.nbytes


def write(layer: Experts, how: str, new: dict[str, Tensor]) -> None:
    """New numbers in place of a layer's."""
    if how == "update_weights_":
        fusion_moe.update_weights_(layer, new)
    elif how == "load_state_dict":
        layer.load_state_dict(new, strict=False)
    else:
        own = layer.state_dict() if how == "state_dict" else dict(layer.named_parameters())
        with torch.no_grad():
            for name, t in new.items():
                own[name].copy_(t)


WRITES = ("update_weights_", "load_state_dict", "state_dict", "parameters")


@pytest.mark.parametrize("how", WRITES)
def test_writes_are_read_by_slots_the_host_and_copies(how):
    plain, found = both(adapters=False)
    steps(found)  # copies of the next step are there
    for model in (plain, found):
        write(model.layers[1], how, experts(E, H, I, seed=9).state_dict())
    want = gradients(plain, 40, torch.bfloat16)
    assert_equal(gradients(found, 40, torch.bfloat16), want)
    for model in (plain, found):
        write(model.layers[2], how, experts(E, H, I, seed=8).state_dict())
    with torch.no_grad():
        assert found(*tokens(40)).equal(plain(*tokens(40)))


@pytest.mark.parametrize("how", WRITES)
def test_weights_that_change_in_between_are_an_error(how):
    plain, found = both()
    other = experts(E, H, I, seed=9).state_dict()
    x, ids, w = tokens(40)
    y = found(x.requires_grad_(), ids, w)
    for model in (plain, found):
        write(model.layers[1], how, other)
    with pytest.raises(UnsupportedError, match="changed between forward and backward"):
        y.sum().backward()
    for model in (plain, found):
        model.zero_grad()
    want = gradients(plain, 40, torch.bfloat16)
    assert_equal(gradients(found, 40, torch.bfloat16), want)


def steps(model: nn.Module) -> None:
    """Two: the second one reads what the first one fetches ahead."""
    for _ in range(2):
        gradients(model, 40, torch.bfloat16, seed=1)


@pytest.mark.parametrize("at", range(4))
def test_a_copy_that_fails_leaves_nothing_half_there(at, monkeypatch):
    """Whichever of the copies of a step: it raises, and the next step is right."""
    plain, found = both()
    gradients(found, 40, torch.bfloat16)  # learns the order
    own, left = Pretended.fetch, [at]

    def fetch(self: Pretended, wanted: Any, arrival: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            own(self, wanted[: len(wanted) // 2], arrival)
            raise OSError("no room on the disk")
        own(self, wanted, arrival)

    with monkeypatch.context() as patch:
        patch.setattr(Pretended, "fetch", fetch)
        with pytest.raises(OSError, match="no room"):
            steps(found)
    found.zero_grad()
    assert_equal(gradients(found, 40, torch.bfloat16), gradients(plain, 40, torch.bfloat16))


def test_the_cache_may_change_in_between():
    """What was to come from a slot that holds another expert now is copied."""
    plain, found = both()
    for _ in range(2):
        gradients(found, 40, torch.bfloat16)
    for layer in found.layers:
        layer._new[-1] = 100
        assert layer.learn()
    for model in (plain, found):
        model.zero_grad()
    assert_equal(gradients(found, 40, torch.bfloat16), gradients(plain, 40, torch.bfloat16))


def test_inference_with_adapters_and_merged():
    plain, found = both()
    for args in (tokens(40), tokens(2)):
        with torch.no_grad():
            assert found(*args).equal(plain(*args))
        with torch.inference_mode():
            assert found(*args).equal(plain(*args))
    for model in (plain, found):
        merge_lora_(model, requantize=True)
    with torch.no_grad():
        assert found(*tokens(5)).equal(plain(*tokens(5)))
    assert found.layers[0].counters.steps == 1


def test_adapters_move_and_are_cast():
    _, found = both()
    before = found.layers[0].down_proj
    found.to(torch.bfloat16)
    assert found.layers[0].gate_up_lora.A.dtype == torch.bfloat16
    assert found.layers[0].down_proj is before


def test_compiled():
    """torch.compile takes what is around the experts."""
    plain, found = both()
    want = gradients(plain, 40, torch.bfloat16)
    compiled = torch.compile(found, backend="aot_eager")
    for _ in range(2):
        found.zero_grad()
        assert_equal(gradients(compiled, 40, torch.bfloat16), want)


def test_in_files(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 64)
    plain, _ = both()
    layers, shared = [experts(E, H, I, seed=i) for i in range(LAYERS)], dict[Any, Any]()
    with pages.in_files(tmp_path):
        for layer in layers:
            _into_files(layer)
    found = Layers([offloaded(layer, 3, shared) for layer in layers])
    adapt(found)
    assert found.layers[0].storage.in_files
    for seed in range(2):
        want = gradients(plain, 40, torch.bfloat16, seed)
        assert_equal(gradients(found, 40, torch.bfloat16, seed), want)


def test_bad_input(golden):
    _, found = both()
    layer, (x, ids, w) = found.layers[0], tokens(3)
    golden(
        messages(
            {
                "an expert that there is not": lambda: layer(x, ids + E, w),
                "features": lambda: layer(x[:, 1:], ids, w),
                "a second derivative": lambda: torch.autograd.grad(
                    layer(x.requires_grad_(), ids, w).sum(), x, create_graph=True
                ),
                "torch.func": lambda: torch.func.grad(lambda x: layer(x, ids, w).sum())(x),
            }
        )
    )


def live() -> list[Tensor]:
    """All tensors of this process."""
    gc.collect()
    kinds = Tensor, nn.Parameter, EncodedParameter
    return [t for t in gc.get_objects() if type(t) in kinds and t.device.type == "cpu"]


def live_bytes() -> int:
    """Of their memory."""
    stores = {}
    for t in live():
        with contextlib.suppress(RuntimeError, NotImplementedError):  # those without memory
            stores[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(stores.values())


@pytest.mark.slow
def test_memory_stays_as_it_is_over_many_steps():
    """With checkpoints and without, of many tokens and few, while the cache changes."""
    _, found = both()
    used, others = [], live()  # what other tests left stays meanwhile
    for step in range(52):
        found.reentrant = (None, False)[step % 2]
        for layer in found.layers if step % 10 == 9 else ():
            layer._new[step % E] += 100
            layer.learn()
        gradients(found, (40, 2)[step % 2], torch.bfloat16, step % 4)
        if step in (11, 51):
            used.append(live_bytes())
    assert used[0] == used[1]
    del others
    buffers = found.layers[0].layer_buffers
    assert len(buffers._arriving) + len(buffers._free) == 3


def test_no_room_for_buffers_is_an_error_before_the_step(monkeypatch):
    plain, found = both()
    layer = found.layers[0]
    own = layer.storage.empty
    rooms = iter([True, False])

    def empty(experts_: int, on: Any) -> Any:
        if not next(rooms, True):
            raise torch.OutOfMemoryError("tried to allocate")
        return own(experts_, on)

    monkeypatch.setattr(layer.storage, "empty", empty)
    with pytest.raises(torch.OutOfMemoryError, match=r"plan --train says.*tried to allocate"):
        gradients(found, 40, torch.bfloat16)
    assert_equal(gradients(found, 40, torch.bfloat16), gradients(plain, 40, torch.bfloat16))
