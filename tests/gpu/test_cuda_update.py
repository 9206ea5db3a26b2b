"""update_weights_ on a GPU: a captured graph that is replayed reads the new weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from experts import copied, float_weights, same_state

import fusion_moe
from fusion_moe import update_weights_
from fusion_moe.encodings import MXFP4, NVFP4, quantize
from fusion_moe.nn import Experts, NVFP4Experts, interleave

pytestmark = pytest.mark.gpu

# experts, hidden and intermediate features: whole tiles, and not
SIZES = [(16, 256, 128), (8, 192, 736)]


def made(encoding: object, weights: list[torch.Tensor]) -> Experts:
    if encoding is NVFP4:
        return NVFP4Experts.from_float(*weights)
    return Experts(*(quantize(t, MXFP4) for t in weights))


@pytest.mark.parametrize("encoding", [NVFP4, MXFP4], ids=lambda e: e.name)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("parts", [False, True])
def test_a_graph_replays_with_the_new_weights(encoding, size, parts):
    count, hidden, _ = size
    old, new = ([t.cuda().bfloat16() for t in float_weights(*size, seed)] for seed in (0, 7))
    module, fresh = made(encoding, old), made(encoding, new)
    for m in (module, fresh):
        fusion_moe.prepare_(m)
        assert m.weight_layout == "w16x64"
    before = [p.data_ptr() for p in module.parameters()]
    x = torch.randn(33, hidden, device="cuda", dtype=torch.bfloat16)
    ids, w = torch.randint(count, (33, 2), device="cuda"), torch.rand(33, 2, device="cuda")
    with torch.no_grad():
        want_old, want = module(x, ids, w), fresh(x, ids, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x, ids, w)
        graph.replay()
        assert torch.equal(y, want_old)
        for given, expected in (
            (dict(zip(("gate_up_proj", "down_proj"), new, strict=True)), want),
            (dict(zip(("gate_up_proj", "down_proj"), old, strict=True)), want_old),
        ):
            update_weights_(module, fresh.state_dict() if parts else given)
            graph.replay()
            assert torch.equal(y, want if parts else expected)
            assert torch.equal(y, module(x, ids, w))
    assert [p.data_ptr() for p in module.parameters()] == before
    update_weights_(module, dict(zip(("gate_up_proj", "down_proj"), new, strict=True)))
    assert same_state(module.state_dict(), fresh.state_dict())


@pytest.mark.parametrize("encoding", [NVFP4, MXFP4], ids=lambda e: e.name)
@pytest.mark.parametrize("size", [(16, 256, 256), (8, 192, 736)], ids=str)
def test_numbers_in_the_order_of_gpt_oss(encoding, size):
    """Square ones too, by the kernels that round."""
    gate_up, down = (t.cuda().bfloat16() for t in float_weights(*size, 0))
    module = made(encoding, [gate_up, down])
    module.transposed = module.interleaved = True
    fusion_moe.prepare_(module)
    before = copied(module)
    floats = {"gate_up_proj": interleave(gate_up, 1, 1).mT, "down_proj": down.mT}
    for name, t in floats.items():
        update_weights_(module, {name: t.contiguous()})
        assert same_state(module.state_dict(), before)


def test_an_unfinished_update_is_seen_in_a_replay():
    def pairs():
        yield "gate_up_proj", new[0]
        raise ConnectionError

    old, new = ([t.cuda().bfloat16() for t in float_weights(16, 256, 128, s)] for s in (0, 7))
    module = NVFP4Experts.from_float(*old)
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    ids, w = torch.randint(16, (5, 2), device="cuda"), torch.rand(5, 2, device="cuda")
    with torch.no_grad():
        module(x, ids, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x, ids, w)
        with pytest.raises(ConnectionError):
            update_weights_(module, pairs())
        graph.replay()
        assert y.isnan().all()


def sender(queue: Any, done: Any) -> None:
    """Another process: pairs of names and tensors on the GPU, by their IPC handles."""
    for name, t in zip(("gate_up_proj", "down_proj"), float_weights(16, 256, 128, 7), strict=True):
        queue.put((name, t.cuda().bfloat16()))
    queue.put(None)
    done.wait(60)  # the memory is its own


def test_weights_from_another_process():
    """A trainer sends handles; the module reads the trainer's memory, one weight after the
    other.
    """
    spawn = torch.multiprocessing.get_context("spawn")
    queue, done = spawn.Queue(), spawn.Event()
    module = NVFP4Experts.from_float(*(t.cuda() for t in float_weights(16, 256, 128)))
    fusion_moe.prepare_(module)
    process = spawn.Process(target=sender, args=(queue, done))
    process.start()
    try:
        update_weights_(module, iter(partial(queue.get, timeout=60), None))
        torch.cuda.synchronize()
    finally:
        done.set()
        process.join(60)
    fresh = NVFP4Experts.from_float(*(t.cuda().bfloat16() for t in float_weights(16, 256, 128, 7)))
    assert same_state(module.state_dict(), fresh.state_dict())


def test_seconds_of_a_layer_of_qwen3_30b(capsys):
    """128 experts of 2048 and 768 features: 48 such layers are to take at most half a second."""
    weights = [
        torch.randn(128, *s, device="cuda", dtype=torch.bfloat16)
        for s in ((1536, 2048), (2048, 768))
    ]
    module = NVFP4Experts.from_float(*weights)
    fusion_moe.prepare_(module)
    given = dict(zip(("gate_up_proj", "down_proj"), weights, strict=True))
    update_weights_(module, given)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    start.record()
    update_weights_(module, given)
    end.record()
    torch.cuda.synchronize()
    more = torch.cuda.max_memory_allocated() - held
    with capsys.disabled():
        print(
            f"\n48 layers: {48 * start.elapsed_time(end) / 1e3:.2f} s, {more / 2**30:.1f} GiB more"
        )
    assert 48 * start.elapsed_time(end) < 5000
