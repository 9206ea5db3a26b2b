"""Experts in the host's memory beside a pretended device: whatever is copied, computed or there
already, the result is the plain module's, bit for bit.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from bad_calls import messages
from cover import few
from experts import experts, float_weights, routed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fusion_moe
from fusion_moe.distributed import parallelize_
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.errors import UnsupportedError
from fusion_moe.nn import Experts, swiglu
from fusion_moe.offload import requester
from fusion_moe.offload.cache import Cache
from fusion_moe.offload.experts import OffloadedExperts
from fusion_moe.offload.pretended import Pretended
from fusion_moe.offload.split import Constants
from fusion_moe.offload.worker import Worker

E, H, I = 8, 64, 32
# cpu_start, cpu_expert, cpu_expert_beside, cpu_row, copy_start, copy_expert,
# copy_expert_beside, gpu_expert
COMPUTES = Constants(0, 1, 1, 0, 0, 10**9, 10**9, 0)
COPIES = Constants(0, 10**9, 10**9, 0, 0, 1, 1, 0)
BOTH = Constants(0, 100, 110, 1, 0, 100, 110, 1)
SPLITS = {"computes": COMPUTES, "copies": COPIES, "both": BOTH}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def offloaded(
    plain: Experts, constants: Constants = BOTH, slots: int = 4, spare: int = 2, every: int = 0
) -> OffloadedExperts:
    cache = Cache(len(plain.down_proj), slots)
    return OffloadedExperts.of(
        plain, lambda storage: Pretended(storage, slots, spare, constants), cache, every
    )


def tokens(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, ...]:
    """Some slots of which have no expert."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, E, generator=g).argsort(-1)[:, :3]
    ids[torch.rand(count, 3, generator=g) < 0.1] = -1
    x = torch.randn(count, H, generator=g).to(dtype)
    return x, ids, torch.rand(count, 3, generator=g)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("slots", "spare"), [(4, 2), (0, 1), (1, 0), (E, 2)])
def test_equal_to_the_plain_module(split, slots, spare):
    plain = experts(E, H, I)
    found = offloaded(plain, SPLITS[split], slots, spare, every=2)
    for count in (0, 1, 5, 40):
        for dtype in (torch.bfloat16, torch.float32):
            args = tokens(count, dtype, seed=count)
            assert found(*args).equal(plain(*args)), (count, dtype)
    c = found.counters
    assert c.steps == 8
    assert c.hits + c.misses == 2 * sum(int((tokens(n, seed=n)[1] >= 0).sum()) for n in (5, 40, 1))
    assert (c.misses > 0) == (slots < E)
    assert bool(c.copied) == (slots < E and spare > 0 and split != "computes")
    assert bool(c.computed) == (slots < E and (spare == 0 or split != "copies"))
    assert c.bytes_copied == (c.copied + c.loaded) * found.storage.nbytes


def encoded(name: str, **more) -> Experts:
    up, down = float_weights(E, H, I)
    return Experts(quantize(up, ENCODINGS[name]), quantize(down, ENCODINGS[name]), **more)


@pytest.mark.parametrize("name", few(["mxfp4", "fp8", "int4", "bf16"], 2))
def test_encodings(name):
    plain, args = encoded(name), tokens(20)
    assert offloaded(plain)(*args).equal(plain(*args))


@pytest.mark.parametrize(
    "more",
    few(
        [
            {"activation": swiglu(interleave=8, limit=7.0, alpha=1.702, up_offset=1.0)},
            {"scale_on": "input"},
            {"activation_format": "int8"},
            {"activation_format": "fp8"},  # which weights in few bits do without
        ]
    ),
    ids=lambda more: next(iter(more)),
)
def test_variants(more):
    biases = torch.randn(E, 2 * I).bfloat16(), torch.randn(E, H).bfloat16()
    plain = encoded("mxfp4", gate_up_bias=biases[0], down_bias=biases[1], **more)
    for dtype in (torch.bfloat16, torch.float32):
        args = tokens(20, dtype)
        assert offloaded(plain)(*args).equal(plain(*args))


def test_reference():
    """The reference evaluates the steps on one device."""
    with fusion_moe.options.override(target="reference"):
        plain, args = experts(E, H, I), tokens(6)
        found = offloaded(plain)
        assert found(*args).equal(plain(*args))
        assert found.counters.computed


def test_a_worker_that_is_gone_or_late(monkeypatch, caplog):
    """The step is whole nevertheless, and says so once."""
    own = Worker(1)
    monkeypatch.setattr(Worker, "_of_process", own)
    monkeypatch.setattr(requester, "LIMIT", 0.05)
    plain, args = experts(E, H, I), tokens(6)
    found, want = offloaded(plain, COMPUTES), plain(*args)
    assert found(*args).equal(want)
    warned = len(caplog.records)
    own.pause()
    assert found(*args).equal(want)
    assert "without their worker: it took too long" in caplog.text
    own.stop()
    for _ in range(2):
        assert found(*args).equal(want)
    assert len(caplog.records) == warned + 2
    assert "it has ended" in caplog.text or "worker has ended" in caplog.text


def test_options():
    """Autocast's dtype; and, in row order, a row's bits whatever is beside it."""
    plain, args = experts(E, H, I), tokens(20, torch.float32)
    found = offloaded(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert found(*args).equal(plain(*args))
        assert found(*args).dtype == torch.bfloat16
    with fusion_moe.options.override(order="row"):
        whole, (x, ids, w) = found(*args), args
        assert whole.equal(plain(*args))
        assert found(x[:1], ids[:1], w[:1]).equal(whole[:1])


def test_leading_dimensions():
    plain = experts(E, H, I)
    x, ids, w = tokens(6)
    given = x.view(2, 3, H), ids.view(2, 3, 3), w.view(2, 3, 3)
    found = offloaded(plain)(*given)
    assert found.shape == (2, 3, H)
    assert found.equal(plain(*given))


def test_cache_learns():
    """Experts that are used come; the table changes between steps, results do not."""
    plain = experts(E, H, I)
    found = offloaded(plain, COMPUTES, slots=3, every=5)
    x, ids, w = routed(2, H)  # only the last two
    args = x, ids + E - 2, w
    want, before = plain(*args), found.device.expert_map.clone()
    for _ in range(20):
        assert found(*args).equal(want)
    assert (before >= 0).nonzero().flatten().tolist() == [0, 1]
    assert (found.device.expert_map >= 0).nonzero().flatten().tolist() == [E - 2, E - 1]
    assert found.counters.loaded == 4  # two at the beginning
    c = found.counters
    assert c.misses == 5 * 14 + 5 * 7  # one expert came after 5 steps, the other one after 10
    assert c.hit_rate == 1 - c.misses / (20 * 14)
    assert "on the device=2" in repr(found)


def test_bad_input(golden):
    plain = experts(E, H, I)
    found, (x, ids, w) = offloaded(plain), tokens(3)
    past, below = ids.clone(), ids.clone()
    past[1, 2], below[1, 2] = E, -2
    golden(
        messages(
            {
                "past the last": lambda: found(x, past, w),
                "below none": lambda: found(x, below, w),
                "features": lambda: found(x[:, :-1], ids, w),
                "rows": lambda: found(x, ids[:2], w[:2]),
                "elsewhere": lambda: found(x.to("meta"), ids, w),
            }
        )
    )
    assert found(x, ids, w).equal(plain(x, ids, w))  # nothing is left over


def test_modes_may_change():
    """What the first step makes is written to by others."""
    plain = experts(E, H, I)
    found, args = offloaded(plain, COMPUTES, every=1), tokens(20)
    with torch.inference_mode():
        want = plain(*args).clone()
        assert found(*args).equal(want)
    assert found(*args).equal(want)


def test_nan():
    plain, (x, ids, w) = experts(E, H, I), tokens(9)
    x[4, 3], w[2, 1] = torch.nan, torch.nan
    found, want = offloaded(plain)(x, ids, w), plain(x, ids, w)
    assert found.isnan().any(1).tolist() == want.isnan().any(1).tolist()
    assert found.nan_to_num().equal(want.nan_to_num())


def test_no_training(golden):
    found = offloaded(experts(E, H, I))
    golden(
        messages(
            {
                "parameters": lambda: found.requires_grad_(True),
                "requantized weights": lambda: fusion_moe.prepare_(found, weights="fp8"),
            }
        )
    )


def test_not_divided_between_ranks():
    found = torch.nn.Sequential(offloaded(experts(E, H, I)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(UnsupportedError, match="0: shares of it; expected experts on one"):
            parallelize_(found, mesh)
    finally:
        dist.destroy_process_group()
        del mesh
        gc.collect()


def test_state_dicts():
    """As those of the plain module; what is loaded goes into slots too."""
    plain, other, args = experts(E, H, I), experts(E, H, I, seed=1), tokens(20)
    want = other(*args)
    found = offloaded(plain)
    assert found.state_dict().keys() == plain.state_dict().keys()
    found.load_state_dict(other.state_dict())
    assert found(*args).equal(want)
    third = experts(E, H, I, seed=2)
    fusion_moe.update_weights_(found, third.state_dict())
    assert found(*args).equal(third(*args))
    fourth = experts(E, H, I, seed=3)
    found.load_state_dict(fourth.state_dict(), assign=True)  # copied: devices read that memory
    assert found(*args).equal(fourth(*args))
    fusion_moe.update_weights_(found, other.state_dict())
    assert found.to(torch.float16).to("meta") is found  # it stays where it is
    assert found(*args).equal(want)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="state_dict"):
            make(found)


def test_new_weights_in_the_order_of_the_float_module():
    plain = experts(E, H, H, seed=1)  # square
    plain.transposed, (gate_up, down) = True, float_weights(E, H, H, 1)
    found, args = offloaded(plain), tokens(20)
    want = found(*args)
    for name, t in (("gate_up_proj", gate_up), ("down_proj", down)):
        fusion_moe.update_weights_(found, {name: t.mT})
        assert found(*args).equal(want)


def test_compiled():
    plain, args = experts(E, H, I), tokens(7)
    found = offloaded(plain)

    def call(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return found(x, ids, w) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert compiled(*args).equal(plain(*args) * 2)


def test_deleted():
    number, args = offloaded(experts(E, H, I))._number, tokens(7)
    with pytest.raises(UnsupportedError, match="deleted"):
        torch.ops.fusion_moe.offloaded_experts(*args, number)


def test_threads():
    """Calls of one module in several threads, while its cache changes; another module beside it."""
    plain = experts(E, H, I)
    found, other = offloaded(plain, BOTH, every=1), offloaded(plain, COPIES, every=1)
    args = [tokens(n, seed=n) for n in range(1, 9)]
    want, wrong = [plain(*a) for a in args], list[int]()

    def work(first: int) -> None:
        with torch.no_grad():
            for i in range(first, first + 16):
                for module in (found, other):
                    if not module(*args[i % 8]).equal(want[i % 8]):
                        wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert found.counters.steps == other.counters.steps == 48


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_fork():
    """A child computes with what it has, on one thread: OpenMP's threads are the parent's."""
    plain, args = experts(E, H, I), tokens(5)
    found = offloaded(plain)
    want = plain(*args)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os._exit(0 if found(*args).equal(want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert found(*args).equal(want)
