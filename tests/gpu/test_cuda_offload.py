"""Experts in the host's memory beside a GPU: the plain module's results, whatever is there, copied
or computed by the CPU; in CUDA graphs, while the cache changes, and when the worker fails.
"""

from __future__ import annotations

import gc
import threading
import time
from functools import cache

import pytest
import torch
from torch import Tensor

import fusion_moe
from fusion_moe.encodings import ENCODINGS, Quantized, quantize
from fusion_moe.errors import GroupsError, UnsupportedError, WorkerError
from fusion_moe.layouts.w16x64 import W16X64
from fusion_moe.lora.adapter import add_lora_
from fusion_moe.nn import Experts, swiglu
from fusion_moe.offload.cache import Cache
from fusion_moe.offload.cuda import Cuda, shared_of
from fusion_moe.offload.experts import OffloadedExperts
from fusion_moe.offload.offload import _into_files
from fusion_moe.offload.split import Constants
from fusion_moe.offload.worker import Worker
from fusion_moe.runtime.host_memory import pages

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]
E, H, I, K = 32, 512, 256, 4
ALL = E + 8  # slots, with spare ones
# cpu_start, cpu_expert, cpu_expert_beside, cpu_row, copy_start, copy_expert,
# copy_expert_beside, gpu_expert
COMPUTES = Constants(0, 1, 1, 0, 0, 10**9, 10**9, 0)
COPIES = Constants(0, 10**9, 10**9, 0, 0, 1, 1, 0)
BOTH = Constants(0, 100, 110, 1, 0, 100, 110, 1)
SPLITS = {"computes": COMPUTES, "copies": COPIES, "both": BOTH}


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield
    fusion_moe.synchronize()


@cache
def weights(encoding: str, seed: int) -> list[Quantized]:
    g = torch.Generator().manual_seed(seed)
    floats = [torch.randn(E, n, k, generator=g) / k**0.5 for n, k in ((2 * I, H), (H, I))]
    return [quantize(w, ENCODINGS[encoding]) for w in floats]


def layer(encoding: str = "nvfp4", seed: int = 0, **more) -> Experts:
    """On the CPU."""
    return Experts(*weights(encoding, seed), **more)


def offloaded(
    of: Experts, slots: int, constants: Constants = BOTH, every: int = 0, spare: int = 0, **shared
) -> OffloadedExperts:
    """spare: usually so many that all have kernels for the same number of matrices."""

    def make(storage):
        ours = shared_of(storage, torch.device("cuda", 0), **shared)
        return Cuda(storage, slots, spare or ALL - slots, constants, ours)

    return OffloadedExperts.of(of, make, Cache(E, slots), every)


def on_cpu(of: Experts, *args: Tensor) -> Tensor:
    """What a module on the CPU computes."""
    return of(*[t.cpu() for t in args]).cuda()


def call(tokens: int, seed: int = 0, experts: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """Some slots of which have no expert."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=g)[:, :experts].argsort(-1)[:, :K]
    ids[torch.rand(tokens, K, generator=g) < 0.1] = -1
    x, w = torch.randn(tokens, H, generator=g).bfloat16(), torch.rand(tokens, K, generator=g)
    return x.cuda(), ids.cuda(), w.cuda()


def assert_near(found: Tensor, want: Tensor) -> None:
    """Up to the roundings of rows to bf16, in another order of sums along K."""
    assert found.isfinite().all()
    apart = (found.float() - want.float()).abs().max().item()
    assert apart <= 0.02 * want.float().abs().max().item(), apart


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("slots", [0, 7, E // 2, E])
def test_equal_to_the_plain_module(split, slots):
    plain = layer()
    found = offloaded(plain, slots, SPLITS[split])
    for tokens in (1, 8, 40):
        args = call(tokens, seed=tokens)
        want = on_cpu(plain, *args)
        for ids in (args[1], args[1].int()):
            assert_near(found(args[0], ids, args[2]), want)
    fusion_moe.synchronize()
    c = found.counters
    named = 2 * sum(int((call(n, seed=n)[1] >= 0).sum()) for n in (1, 8, 40))
    assert c.steps == 6
    assert c.hits + c.misses == named
    assert bool(c.misses) == (slots < E)
    assert bool(c.copied) == (slots < E and split != "computes")
    assert bool(c.computed) == (slots < E and (split != "copies"))


def test_all_ways_give_the_same_bits_where_only_the_gpu_computes():
    plain = layer()
    whole, copied = offloaded(plain, E), offloaded(plain, 8, COPIES)
    for tokens in (1, 8, 40):
        args = call(tokens, seed=tokens)
        assert torch.equal(whole(*args), copied(*args))


@pytest.mark.parametrize("slots", [0, 7, E])
def test_a_graph_is_replayed_with_other_ids(slots):
    plain = layer()
    found = offloaded(plain, slots)
    x, ids, w = call(8)
    found(x, ids, w)
    fusion_moe.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = found(x, ids, w)
    for seed in range(20):
        for t, other in zip((x, ids, w), call(8, seed), strict=True):
            t.copy_(other)
        graph.replay()
        assert_near(y, on_cpu(plain, x, ids, w))
    fusion_moe.synchronize()
    assert found.counters.steps == 21


def test_the_cache_learns_while_steps_run():
    plain = layer()
    found = offloaded(plain, 20, every=2)

    def step(seed: int) -> None:
        x, ids, w = call(8, seed, experts=12)
        args = x, torch.where(ids < 0, ids, E - 1 - ids), w  # none of them is there at first
        assert_near(found(*args), on_cpu(plain, *args))

    for seed in range(50):
        step(seed)
    c = found.counters
    assert c.loaded >= 19 + 12  # those that were there at first, too
    assert c.hits
    for seed in range(5):
        step(seed)
    assert found.counters.misses - c.misses < c.misses / 10


def test_a_long_step_streams_experts():
    plain = layer()
    args = call(300)
    want = on_cpu(plain, *args)
    for slots, spare in ((0, ALL), (24, 16), (E, 8)):
        found = offloaded(plain, slots, spare=spare, capacity=64)
        for _ in range(2):
            assert_near(found(*args), want)
        c = found.counters
        assert c.hits + c.misses == 2 * int((args[1] >= 0).sum())


def test_a_long_step_is_not_captured():
    found = offloaded(layer(), 8, capacity=64)
    args = call(300)
    found(*args)
    with (
        pytest.raises(UnsupportedError, match="in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        found(*args)


@pytest.mark.parametrize(
    "more", [{"scale_on": "input"}, {"activation": swiglu(limit=7.0, alpha=1.7)}]
)
def test_other_layers(more):
    plain = layer(**more)
    found, args = offloaded(plain, 7), call(8)
    assert_near(found(*args), on_cpu(plain, *args))


def test_bad_ids_are_told_as_on_the_gpu():
    found = offloaded(layer(), 7)
    x, ids, w = call(8)
    good = found(x, ids, w)
    bad = ids.clone()
    bad[1, 2] = E
    found(x, bad, w)
    torch.cuda.synchronize()
    with pytest.raises(GroupsError, match=f"= {E} is out of range"):
        fusion_moe.synchronize()
    assert torch.equal(found(x, ids, w), good)


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4", "int4", "nf4", "fp8", "mxfp8", "bf16"])
@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("slots", [0, 7])
def test_gradients_of_adapters_are_those_of_experts_on_the_gpu(slots, in_files, encoding, tmp_path):
    """Bit for bit: of layers that are fetched ahead, in one order and in the other."""
    shared, models = {}, []
    for away in (False, True):
        layers = [layer(encoding, seed) for seed in range(3)]
        if away:
            for of in layers if in_files else ():
                with pages.in_files(tmp_path):
                    _into_files(of)
            layers = [offloaded(of, slots) for of in layers]
            for of in layers:
                of._shared = shared
        models.append(torch.nn.ModuleList(layers).cuda())
        add_lora_(models[-1], rank=4)
        g = torch.Generator().manual_seed(1)
        for p in (p for p in models[-1].parameters() if p.requires_grad):
            p.data.copy_(torch.randn(p.shape, generator=g) / 10)
    for seed, tokens in enumerate((1000, 1, 40, 1000)):
        results = []
        for model in models:
            x, ids, w = call(tokens, seed)
            y = x.requires_grad_()
            with torch.enable_grad():
                for of in model:
                    y = y + of(torch.nn.functional.layer_norm(y, (H,)), ids, w.requires_grad_())
                y.float().square().mean().backward()
            factors = [p.grad for p in model.parameters() if p.requires_grad]
            results.append([y.detach(), x.grad, w.grad, *factors])
        assert len(results[0]) == 3 + 3 * 4
        assert all(map(torch.equal, *results)), tokens


def test_a_worker_that_ended_is_an_error():
    found = offloaded(layer(), 7, COMPUTES)
    args = call(8)
    found(*args)
    fusion_moe.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found(*args)
    Worker.of_process().stop()
    start = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5
    with pytest.raises(WorkerError, match="it has ended"):
        fusion_moe.synchronize()
    again = offloaded(layer(), 7, COMPUTES)  # with a new worker
    again(*args)


def test_a_late_worker_is_an_error_within_the_limit():
    found = offloaded(layer(), 7, COMPUTES, limit=0.2)
    args = call(8)
    found(*args)
    fusion_moe.synchronize()
    worker = found.device.shared.model.worker
    worker.pause()
    start = time.monotonic()
    found(*args)
    torch.cuda.synchronize()
    assert 0.2 <= time.monotonic() - start < 5
    worker.pause(False)
    with pytest.raises(WorkerError, match="it is late, after 2"):
        fusion_moe.synchronize()
    with pytest.raises(WorkerError, match="it failed before"):
        found(*args), fusion_moe.synchronize()


def test_two_models_at_once():
    plains = [layer(seed=seed) for seed in (0, 1)]
    founds = [offloaded(p, 7) for p in plains]
    wanted = [[on_cpu(p, *call(8, seed)) for seed in range(30)] for p in plains]
    errors: list[BaseException] = []

    def use(want: list[Tensor], found: OffloadedExperts) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for seed in range(30):
                    assert_near(found(*call(8, seed)), want[seed])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=pair) for pair in zip(wanted, founds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_model_is_deleted_while_its_step_runs():
    args = call(40)
    want = on_cpu(layer(), *args)
    for _ in range(5):
        found = offloaded(layer(), 7)
        y = found(*args)
        del found
        gc.collect()
        assert_near(y, want)


def test_all_experts_there_cost_no_word_to_the_worker():
    found = offloaded(layer(), E)
    box = found.device.shared.staging.tensors["box"].view(torch.int64)
    for tokens in (1, 8, 64):
        found(*call(tokens))
    fusion_moe.synchronize()
    assert int(box[0]) == 0


def test_homes_in_files(tmp_path):
    """Steps copy nothing from there; the cache does, and long steps."""
    plain = layer()
    with pages.in_files(tmp_path):
        _into_files(plain)
    found = offloaded(plain, 8, COPIES, every=2, spare=4)
    assert found.storage.in_files
    for tokens in (1, 8, 40, 3, 200):
        args = call(tokens, seed=tokens)
        assert_near(found(*args), on_cpu(plain, *args))
        assert bool(found.counters.copied) == (tokens == 200)
    assert found.counters.computed
    assert found.counters.loaded >= 7


def test_a_long_step_without_room_for_copies():
    plain, args = layer(), call(40)
    found = offloaded(plain, 20, spare=1, capacity=64)
    assert_near(found(*args), on_cpu(plain, *args))


def test_biases():
    g = torch.Generator().manual_seed(5)
    biases = {
        "gate_up_bias": torch.randn(E, 2 * I, generator=g),
        "down_bias": torch.randn(E, H, generator=g),
    }
    plain = layer("mxfp4", **biases)
    found, args = offloaded(plain, 7), call(8)
    assert_near(found(*args), on_cpu(plain, *args))


@pytest.mark.parametrize(
    "encoding", ["nvfp4", "mxfp4", "int4", "uint4_64", "nf4", "fp8", "mxfp8", "bf16"]
)
def test_copied_experts_are_as_a_module_on_the_gpu_has_them(encoding):
    plain, found = layer(encoding).cuda(), offloaded(layer(encoding), E)
    device = found.device
    assert device.layout == plain.weight_layout == ("linear" if encoding == "bf16" else W16X64.name)
    want = (t for name in plain.projections for t in plain._parts(name))
    torch.cuda.synchronize()
    for (name, slots), t in zip(device.slots.items(), want, strict=True):
        assert torch.equal(slots[:E].view(torch.uint8), t.view(torch.uint8)), name
