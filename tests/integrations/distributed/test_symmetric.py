"""What `parallelize_(dispatch="symmetric")` checks and allocates, without other ranks."""

from __future__ import annotations

import copy
import gc
from tempfile import mkstemp

import pytest
import torch
import torch.distributed as dist
from experts import experts

from fusion_moe import FusionDefinition
from fusion_moe.distributed import parallelize, symmetric
from fusion_moe.distributed.exchange import peers
from fusion_moe.distributed.exchange.faults import rank_error
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.errors import FusionError, OptionError, RankError, ShapeError
from fusion_moe.nn import prepare_
from fusion_moe.nn.frozen import adaptable
from fusion_moe.runtime import faults, native

HERE, THERE = ("node", "boot"), ("node", "another boot")


def test_memory_of_deepseek_is_what_the_guide_says():
    nbytes = symmetric.region_bytes(8, 8192, 7168 * 2)
    assert nbytes == pytest.approx(1.9e9, rel=0.03)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([(*HERE, None)] * 2, ""),
        ([(*HERE, None), (*THERE, None)], "ranks of 2 nodes"),
        ([(*HERE, None)] * 65, "65 ranks"),
        ([(*HERE, 0), (*HERE, 1)], ""),
        ([(*HERE, 0), (*HERE, 2)], "GPU 0 has no peer access to GPU 2"),
        ([(*HERE, 0), (*HERE, 0)], ""),  # each sees only its own
    ],
)
def test_who_shares_memory(monkeypatch, places, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    assert symmetric._why_not_shared(places, 0) == says


def test_multicast_is_off_or_refused(monkeypatch):
    for name in symmetric.NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    symmetric._forbid_multicast()
    assert symmetric.os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert symmetric.os.environ["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    with pytest.raises(OptionError, match="NCCL_NVLS_ENABLE=2; expected 0"):
        symmetric._forbid_multicast()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (((8, 512), [(7, 64)]), "rank 1 has 1 layers .7 experts of 64 features. and calls with 8"),
        (((4, 1024), [(7, 64)]), "4 tokens of 1024 bytes"),
        (((4, 512), [(7, 64), (7, 64)]), "2 layers"),
        (((4, 512), [(8, 64)]), "8 experts"),
    ],
)
def test_ranks_must_agree(other, says):
    mine = (4, 512), [(7, 64)]
    symmetric._need_agreement([mine, mine])
    with pytest.raises(OptionError, match=says):
        symmetric._need_agreement([mine, other])


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        (1, "rank 3 sent no ids of experts within 2.5 s"),
        (2, "rank 3 sent no rows of tokens within 2.5 s"),
        (3, "rank 3 sent no sums within 2.5 s"),
        (4, "rank 3 is in another layer"),
        (5, "rank 3 has more tokens"),
    ],
)
def test_faults_of_kernels_name_a_rank(phase, says):
    """As GPUs write them: the fault, the rank, the phase and milliseconds."""
    word = faults._words.new("a program")
    word.found.value = 6 << 56 | 3 << 32 | phase << 24 | 2500
    with pytest.raises(RankError, match=says):
        faults._raise([word])
    error = rank_error(phase, 3, 2.5, "dispatch")
    assert says in str(error)
    assert "in an earlier call" not in str(error)


@pytest.mark.parametrize(
    ("dispatch", "plan", "capacity", "expected"),
    [
        ("symmetric", "tp", 1.0, "plan = 'ep'"),
        ("symmetric", "ep_tp", 1.0, "plan = 'ep'"),
        ("all_to_all", "tp", 1.0, "plan = 'ep' or 'ep_tp'"),
        ("all_gather", "ep", 0.5, "dispatch = 'all_to_all'"),
        ("all_gather", "ep", 5, "dispatch = 'all_to_all' or 'symmetric'"),
    ],
)
def test_what_is_expected_is_accepted_next(dispatch, plan, capacity, expected):
    with pytest.raises(OptionError) as refused:
        parallelize._check_dispatch(plan, "sharded", dispatch, capacity, False)
    assert refused.value.expected == expected


def test_a_file_system_without_room_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(symmetric.os, "posix_fallocate", full)
    monkeypatch.setattr(symmetric.tempfile, "mkstemp", lambda *_: mkstemp(dir=tmp_path))
    assert symmetric._file_of(4096) == ("", "[Errno 28] No space left on device")
    assert not [*tmp_path.iterdir()]
    memory = symmetric.GroupMemory.__new__(symmetric.GroupMemory)
    memory.rank, memory.ranks = 0, 2
    memory._of_all = lambda x: [x, x]
    with pytest.raises(OptionError, match=r"no 8.19 kB of memory that processes share"):
        memory._in_a_file(100)


def table(layer):
    return peers._issued[layer.peers.data_ptr()].table


def test_layers_know_the_memory_that_there_is(tmp_path, monkeypatch):
    """Those that are made after the first call, too, and after memory could not grow."""

    def fails(nbytes):
        raise OSError("no room")

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        memory = symmetric.GroupMemory.of_group(dist.group.WORLD, torch.device("cpu"))
        first = memory.layer(4, 64)
        first.need(5, 2)
        second = memory.layer(4, 64)
        second.need(5, 2)
        assert table(first).tolist()[2:] == table(second).tolist()[2:]
        assert [int(table(layer)[1]) for layer in (first, second)] == [0, 1]
        assert int(table(second)[2]) == 5
        monkeypatch.setattr(memory, "_share", fails)
        with pytest.raises(OSError, match="no room"):
            first.need(9, 2)
        assert not table(first)[2:4].any()  # what was freed is in no call
        monkeypatch.undo()
        first.need(4, 2)
        assert table(first).tolist()[2:] == table(second).tolist()[2:]
        assert int(table(second)[2]) == 4
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path):
    """A call of a layer in a group of one rank, with some peers."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD.group_name
    weights = [list(quantize(torch.randn(4, 64, n), NVFP4)) for n in (64, 32)]
    x, ids, w = torch.randn(4, 64), torch.randint(4, (4, 2)), torch.rand(4, 2)
    how = {"weight_format": "nvfp4", "first_expert": 0, "of_experts": 4, "across": group}

    def call(peers, rows=4, **more):
        some = (t.repeat(3, 1)[:rows] for t in (x, ids, w))
        return torch.ops.fusion_moe.fused_experts(*some, *weights, peers=peers, **{**how, **more})

    yield call
    dist.destroy_process_group()


def of_one(call):
    layer = symmetric.GroupMemory(dist.group.WORLD, torch.device("cpu")).layer(4, 64)
    layer.need(4, 4)
    return layer


def not_handles(handle):
    """What is no handle, and what is said of it."""
    none = "is memory of no ranks"
    return [
        (handle.clone(), none),
        (torch.ones_like(handle), none),
        (peers._issued[handle.data_ptr()].table.clone(), none),
        (torch.zeros(9).long().copy_(torch.ones(9))[2:7], none),
        (handle[:0].new_full((5,), 2**47), none),
    ]


@pytest.mark.compiler
def test_only_memory_that_was_shared_is_written_to(alone):
    """Whatever the numbers in `peers` are: those of a handle are never read."""
    layer, call = of_one(alone), alone
    compiled = torch.compile(call, backend="aot_eager", dynamic=False)
    want = call(torch.zeros(5, dtype=torch.int64))  # through the process group
    native.load()
    for f in call, call, call, compiled, compiled:
        known = native.known()
        assert f(layer.peers).equal(want)
        for bad, says in not_handles(layer.peers):
            with pytest.raises(OptionError, match=says):
                f(bad)
        layer.peers.random_()
        assert f(layer.peers[:]).equal(want)
    assert native.known() == known > 0
    with pytest.raises(OptionError, match=r"memory of the group '0' in an operation of 'other'"):
        call(layer.peers, across="other")
    two = torch.cat([layer.peers, layer.peers])[:6]
    with pytest.raises(OptionError, match="is memory of no ranks"):
        call(two, of_experts=8)
    with pytest.raises(ShapeError, match=r"9 tokens of a rank, of 256 bytes each; .* at most 4"):
        call(layer.peers, 9)
    assert call(layer.peers).equal(want)


def test_memory_that_was_freed_is_refused(alone):
    layer = of_one(alone)
    handle = layer.peers
    alone(handle)
    del layer
    gc.collect()
    with pytest.raises(OptionError, match="is memory of no ranks"):
        alone(handle)


def test_programs_do_not_compute_where_memory_is():
    fd = FusionDefinition()
    ranks = fd.define_groups("s", 1, stride=4)
    x, ids, w, numbers = (
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (([4, 64], "f32"), ([4, 2], "i64"), ([4, 2], "f32"), ([5], "i32"))
    )
    peers = fd.ops.cast(numbers, dtype="i64")
    rows, *_ = fd.ops.dispatch(x, ids, w, peers, groups=ranks, experts=4, group="g")
    fd.add_output(rows)
    given = torch.randn(4, 64), torch.zeros(4, 2).long(), torch.rand(4, 2), torch.ones(5).int()
    with pytest.raises(FusionError, match="peers that are an input: addresses are never computed"):
        torch.ops.fusion_moe.run(str(fd.fusion()), given, [])


def test_ranks_requantize_weights_alike_whatever_tokens_each_has(tmp_path, monkeypatch):
    """By the capacity: what they send each other depends on what their products read."""
    monkeypatch.setattr(adaptable, "FROM", 3)
    packed, x = experts(8, 128, 128), torch.randn(2, 128).bfloat16()
    other = copy.deepcopy(packed)
    prepare_(other, weights="both")
    ids, w = torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2)
    of_few = other(x, ids, w)
    assert torch.equal(of_few, packed(x, ids, w))
    prepare_(packed, weights="fp8")
    of_many = packed(x, ids, w)
    assert not torch.equal(of_many, of_few)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        layer = symmetric.GroupMemory.of_group(dist.group.WORLD, torch.device("cpu")).layer(8, 128)
        other.first_expert = 0
        for capacity, want in (11, of_few), (12, of_many):
            layer.capacity = capacity
            layer.need(capacity, 2)
            assert torch.equal(other(x, ids, w, layer.arguments()), want)
    finally:
        dist.destroy_process_group()
