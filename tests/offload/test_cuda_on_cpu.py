"""What offload/cuda.py does with a GPU, without one: its kernels are compiled for the CPU, memory
of the GPU is the host's, and streams are one. The worker is the real one.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cover import few
from experts import as_bytes, copied, float_weights, same_state
from kernels_on_cpu import SOME, folder
from on_cpu import library
from test_offload_training import adapt, assert_equal, gradients
from test_offloaded_experts import BOTH, COMPUTES, COPIES, E, H, encoded, tokens

import fusion_moe
from fusion_moe import backends
from fusion_moe.bodies.autograd import Step
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.encodings.orders import Nibbles
from fusion_moe.errors import (
    BuildError,
    DtypeError,
    GroupsError,
    PinError,
    UnsupportedError,
    WorkerError,
)
from fusion_moe.layouts import W16X64
from fusion_moe.nn import Experts
from fusion_moe.offload import Plan, cuda, launches, moves, offload, offload_, pinned
from fusion_moe.offload.cache import Cache
from fusion_moe.offload.cuda import Cuda, shared_of
from fusion_moe.offload.experts import OffloadedExperts
from fusion_moe.offload.moves import Shared
from fusion_moe.offload.offload import _into_files
from fusion_moe.offload.pinned import Pinned, Staging
from fusion_moe.offload.worker import Worker
from fusion_moe.runtime.host_memory import pages

pytestmark = [pytest.mark.compiler, pytest.mark.once]
__all__ = ["folder"]  # a fixture
ROWS = 48  # of a step that is not long


class Event:
    def query(self) -> bool:
        return True

    synchronize = record = lambda self, *_: None


class Stream:
    cuda_stream = 0

    def record_event(self) -> Event:
        return Event()

    wait_event = wait_stream = synchronize = lambda self, *_: None


class OnCpu:
    """torch, whose GPU is the CPU."""

    cuda = SimpleNamespace(
        Stream=lambda *_: STREAM,
        Event=Event,
        stream=lambda _: nullcontext(),
        device=lambda _: nullcontext(),
        current_stream=lambda *_: STREAM,
        synchronize=lambda *_: None,
    )

    def device(self, *_) -> torch.device:
        return torch.device("cpu", 0)

    def empty(self, *shape, pin_memory=False, **more) -> torch.Tensor:
        return torch.empty(*shape, **more)

    def __getattr__(self, name):
        return getattr(torch, name)


STREAM = Stream()


@pytest.fixture(autouse=True)
def gpu(folder, monkeypatch):
    """A GPU that is the CPU."""
    steps, experts = (library(folder, name=name) for name in ("kernels", "experts"))

    class Kernel:
        def __init__(self, source: str, blocks: int = 0, **how):
            name = launches.name_of(source)
            of = source.partition("<")[2].partition(">")[0].split(", ")
            suffix = {"begin_step": of, "end_step": of[1:]}.get(name, [])
            self.run = getattr(experts if name == "load" else steps, "_".join([name, *suffix]))
            self.run.restype, self.begins = ctypes.POINTER(ctypes.c_int32), name == "begin_step"

        def __call__(self, stream: int, numbers, blocks: int = 0) -> None:
            found = self.run((ctypes.c_longlong * len(numbers))(*numbers))
            if self.begins:
                copied = found[1 : 1 + found[0]]
                experts.copy(
                    ctypes.c_void_p(numbers[1]),
                    (ctypes.c_longlong * 64)(*copied),
                    ctypes.c_int64(len(copied)),
                    ctypes.c_int64(numbers[4]),
                )

    fake = SimpleNamespace(index_of=lambda _: 0, stream=lambda _: 0, capturing=lambda: False)
    for module in (cuda, moves):
        monkeypatch.setattr(module, "torch", OnCpu())
        monkeypatch.setattr(module, "cuda", fake)
    monkeypatch.setattr(moves, "Kernel", Kernel)
    monkeypatch.setattr(moves, "Staging", lambda sizes: Staging(sizes, pin=False))
    monkeypatch.setattr(cuda, "pinned", lambda t: Pinned(t, pin=False))
    monkeypatch.setattr(cuda, "copy", lambda of, _: [ctypes.memmove(*each) for each in of])
    monkeypatch.setattr(cuda, "_wait", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    with torch.no_grad():
        yield
    fusion_moe.synchronize()


def offloaded(plain: Experts, slots: int, constants=BOTH, spare=E, every=0, **more):
    def make(storage):
        shared = shared_of(storage, torch.device("cpu", 0), ROWS, **more)
        return Cuda(storage, slots, spare, constants, shared)

    return OffloadedExperts.of(plain, make, Cache(E, slots), every)


@pytest.mark.slow
@pytest.mark.parametrize("constants", [COMPUTES, COPIES, BOTH])
@pytest.mark.parametrize("slots", [0, 3, E])
def test_equal_to_the_plain_module(slots, constants):
    plain = encoded("nvfp4")
    found = offloaded(plain, slots, constants, every=3)
    for step, count in enumerate((0, 1, 16, 7, 40, 2)):  # one of them long
        x, ids, w = tokens(count, seed=step)
        for of in (ids, ids.int()):
            assert torch.equal(found(x, of, w), plain(x, ids, w)), count
    c = found.counters
    named = 2 * sum(
        int((tokens(n, seed=i)[1] >= 0).sum()) for i, n in enumerate((0, 1, 16, 7, 40, 2))
    )
    assert (c.steps, c.hits + c.misses) == (10, named)
    assert (c.misses > 0) == (slots < E)
    assert bool(c.copied) == (slots < E)  # also in long steps
    assert bool(c.computed) == (slots < E and constants is not COPIES)
    assert (c.cpu_ns > 0) == bool(c.computed)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"scale_on": "input"}, {}])
@pytest.mark.parametrize("encoding", few(["nvfp4", "mxfp4", "fp8"]))
def test_other_layers(encoding, more):
    plain = encoded(encoding, **more)
    found, args = offloaded(plain, 3), tokens(9)
    assert torch.equal(found(*args), plain(*args))


def test_a_step_without_misses_leaves_the_host_alone(monkeypatch):
    """Its kernels neither read nor write memory of the host: they have no addresses of it."""
    plain = encoded("nvfp4")
    found = offloaded(plain, E, COMPUTES)
    moves, named = found.device.moves, torch.tensor([1, 2, 0])
    moves.parts._memory[2::9] = 0  # of the host storage
    monkeypatch.setattr(Shared, "buffers", property(lambda self: [0] * 5))
    for count in (1, 3, 16):
        x, ids, w = tokens(count, seed=count)
        ids = named[ids % 3]
        for _ in range(3):
            assert torch.equal(found(x, ids, w), plain(x, ids, w))
    c = found.counters
    assert (c.steps, c.misses, c.copied, c.cpu_ns, c.wait_ns) == (9, 0, 0, 0, 0)
    assert int(moves.shared.exchange[0]) == 0  # requests


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
@pytest.mark.parametrize("slots", [0, 4])
def test_homes_in_files(slots, encoding, tmp_path, monkeypatch):
    """Steps copy nothing from there, the cache through a spare slot, and long steps as always."""
    monkeypatch.setattr(pages, "PAGE", 64)
    plain = encoded(encoding)
    with pages.in_files(tmp_path):
        _into_files(plain)
    found = offloaded(plain, slots, COPIES, spare=2, every=2)
    assert found.storage.in_files
    for step, count in enumerate((1, 16, 7, 2, 9, 4)):
        x, ids, w = tokens(count, seed=step)
        assert torch.equal(found(x, ids, w), plain(x, ids, w)), count
        assert found.counters.copied == 0
    assert found.counters.computed
    assert found.counters.loaded > slots - 1 or not slots
    assert "times of another machine" in found.explain(x, ids, w)[0]
    x, ids, w = tokens(40)
    assert torch.equal(found(x, ids, w), plain(x, ids, w))
    assert found.counters.copied


def test_a_long_step_without_room_for_copies():
    """It has the bits of its short steps: a CPU's kernels may differ by their number of rows."""
    plain, args = encoded("nvfp4"), tokens(40)
    found = offloaded(plain, 3, spare=1)
    short = zip(*(t.split(ROWS // 3) for t in args), strict=True)
    assert torch.equal(found(*args), torch.cat([plain(*piece) for piece in short]))


def test_what_is_wrong_is_told():
    plain, (x, ids, w) = encoded("nvfp4"), tokens(9)
    found = offloaded(plain, 3)
    with pytest.raises(DtypeError, match="float32"):
        found(x.float(), ids, w)
    bad = ids.clone()
    bad[2, 1] = E
    found(x, bad, w)
    with pytest.raises(GroupsError, match=rf"ids.flatten\(\)\[7\] = {E} is out of range"):
        fusion_moe.synchronize()
    with pytest.raises(GroupsError):
        found(*tokens(40)[:1], torch.full((40, 3), E), tokens(40)[2])  # a long one, at once
    assert torch.equal(found(x, ids, w), plain(x, ids, w))


class Opposite(Nibbles):
    """Its codes are stored with all bits the other way."""

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        return super().packed(15 - x)


def test_an_order_that_changes_codes_is_refused():
    with pytest.raises(UnsupportedError, match="moves bits"):
        launches.turns_of_codes(Opposite())


def test_a_worker_that_fails_is_an_error_and_the_rest_is_right():
    plain, (x, ids, w) = encoded("nvfp4"), tokens(9)
    found = offloaded(plain, 3, COMPUTES, limit=0.05)
    worker = found.device.shared.model.worker
    worker.pause()
    y = found(x, ids, w)
    worker.pause(False)
    expert_map = found.device.expert_map
    there = torch.where((ids >= 0) & (expert_map[ids.clamp(0)] >= 0), ids, -1)
    assert torch.equal(y, plain(x, there, w))
    with pytest.raises(WorkerError, match=r"it is late, after [5-9]\d ms"):
        found(x, ids, w)
    found(x, ids, w)
    with pytest.raises(WorkerError, match="it failed before"):
        fusion_moe.synchronize()

    found = offloaded(plain, 3, COMPUTES)
    Worker.of_process().stop()
    found(x, ids, w)
    with pytest.raises(WorkerError, match="it has ended"):
        fusion_moe.synchronize()
    found = offloaded(plain, 3, COMPUTES)  # with a new worker
    assert torch.equal(found(x, ids, w), plain(x, ids, w))


@pytest.mark.slow
@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
@pytest.mark.parametrize("slots", [0, 3, E])
def test_gradients_of_adapters(slots, encoding, in_files, tmp_path, monkeypatch):
    """Those of experts that are all there: copies are unpacked into the layout of slots."""
    plain, moved = encoded(encoding), encoded(encoding)
    if in_files:
        monkeypatch.setattr(pages, "PAGE", 64)
        monkeypatch.setattr(cuda, "_PIECE", 1000)  # several of an expert, the last one shorter
        with pages.in_files(tmp_path):
            _into_files(moved)
    results = []
    for layer in (plain, offloaded(moved, slots, COPIES, spare=2)):
        adapt(torch.nn.Sequential(layer))
        with torch.enable_grad():
            results.append([gradients(layer, n, torch.bfloat16, n) for n in (40, 2, 40)])
    for want, found in zip(*results, strict=True):
        assert_equal(found, want)
    c = layer.counters
    assert c.copied == E - len(layer.device.expert_map[layer.device.expert_map >= 0])
    assert c.bytes_copied == (c.copied + c.loaded) * layer.storage.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("encoding", few(SOME, 4))
@pytest.mark.parametrize("slots", [0, 3])
def test_gradients_of_weights_in_tiles(slots, encoding, monkeypatch):
    """Buffers and slots have the bytes of a module on the device, in its order; programs are the
    same; and the host's storage stays as CPUs read it.
    """
    floats = float_weights(E, H, H)
    plain, moved = (Experts(*(quantize(w, ENCODINGS[encoding]) for w in floats)) for _ in "ab")
    plain.put_in(W16X64.name)
    find = SimpleNamespace(find=lambda *_: backends.TARGETS["cuda"])
    monkeypatch.setattr(cuda, "backends", find)
    found = offloaded(moved, slots, COPIES, spare=2)
    state = copied(found)
    assert plain.weight_layout == found.device.layout == W16X64.name
    assert found.weight_layout == "linear"
    there = found.device.expert_map
    with found.layer_buffers.hold(found, range(E)) as weights:
        want = (t for projection in plain.projections for t in plain._parts(projection))
        for name, t in zip(weights, want, strict=True):
            in_slots = found.device.slots[name][there[there >= 0]]
            assert as_bytes(weights[name]).equal(as_bytes(t)), name
            assert as_bytes(in_slots).equal(as_bytes(t[there >= 0])), name
    of_call, steps, results = Step.of_call, list[Step](), []
    monkeypatch.setattr(Step, "of_call", lambda call: steps.append(of_call(call)) or steps[-1])
    for layer in (plain, found):
        adapt(torch.nn.Sequential(layer))
        with torch.enable_grad():
            results.append([gradients(layer, n, torch.bfloat16, n) for n in (40, 2)])
    for want, got in zip(*results, strict=True):
        assert_equal(got, want)
    assert steps[:2] == steps[2:]
    assert all(f"layout='{W16X64.name}'" in step.programs.backward for step in steps)
    assert same_state({name: found.state_dict()[name] for name in state}, state)


def test_memory_that_the_driver_does_not_pin_is_an_error_before_anything_moves(monkeypatch):
    """What was pinned is not any more; and later the same model may go there."""
    monkeypatch.setattr(pages, "PAGE", 64)
    held, room = list[int](), [5]

    def pin(address: int, nbytes: int) -> int:
        if len(held) == room[0]:
            raise BuildError("cuMemHostRegister: out of memory")
        held.append(address)
        return address

    monkeypatch.setattr(cuda, "pinned", pinned.pinned)
    monkeypatch.setattr(pinned, "pin_memory", pin)
    monkeypatch.setattr(pinned, "unpin_memory", held.remove)
    layers = [encoded("nvfp4"), encoded("nvfp4")]  # each has four large tensors
    model, (x, ids, w) = torch.nn.Sequential(*layers), tokens(9)
    want = [layer(x, ids, w) for layer in layers]

    def maker(device: str, plan: Plan) -> Any:
        shared = Shared(ROWS, H, torch.bfloat16, torch.device("cpu", 0))
        return lambda slots, spare: lambda storage: Cuda(storage, slots, spare, BOTH, shared)

    monkeypatch.setattr(offload, "_maker", maker)
    how = {"max_memory": {"pretended": "20KB"}, "kv_tokens": 0, "experts_device": "cpu"}
    with pytest.raises(PinError, match=r"could not be pinned: .*out of memory; ulimit -l is"):
        offload_(model, **how)
    gc.collect()
    assert held == []
    assert [*model] == layers
    assert all(layer(x, ids, w).equal(y) for layer, y in zip(layers, want, strict=True))
    room[0] = 8
    assert not offload_(model, **how).whole
    assert all(layer(x, ids, w).equal(y) for layer, y in zip(model, want, strict=True))
    assert len(held) == 8
