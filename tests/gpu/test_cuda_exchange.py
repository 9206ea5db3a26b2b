"""Ranks that store into each other's memory, on one GPU, each with a stream of its own: they
compute what the reference does, through many replays of graphs with delays, and end when one is
silent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.distributed.collectives import Together
from fusion_moe.distributed.exchange import cuda as collective, peers
from fusion_moe.distributed.exchange.kinds import PEERS
from fusion_moe.encodings import ENCODINGS, FP8_E8M0, NVFP4, quantize
from fusion_moe.errors import RankError
from fusion_moe.integrations.distributed.symmetric import region_bytes
from fusion_moe.layouts import LAYOUTS

pytestmark = pytest.mark.gpu
E, H, I, K, ROOM = 8, 512, 256, 3, 600
LONG, SHORT = 60_000_000_000, 500_000_000  # nanoseconds
REPLAYS = 10_000
Given = tuple[Tensor, Tensor, Tensor]


class Ranks:
    """All of a group: their memory, streams and shares of the experts."""

    format, rows, layout = "nvfp4", "bf16", "linear"

    def __init__(self, count: int, limit: int = LONG):
        self.count, self.each = count, -(-E // count)
        nbytes = region_bytes(count, ROOM, 2 * H)
        self.memory = [torch.full((nbytes // 8,), -1).cuda() for _ in range(count)]
        addresses = [t.data_ptr() for t in self.memory]
        cuda = torch.device("cuda")
        self.peers = [peers.issue(PEERS + count, "g", cuda) for _ in range(count)]
        for rank, handle in enumerate(self.peers):
            peers.tell(handle, [rank, 7, ROOM, 2 * H, *addresses])
        for t in self.memory:
            t[:3] = torch.tensor([0, limit, 0])
        self.streams = [torch.cuda.Stream() for _ in range(count)]
        g = torch.Generator().manual_seed(0)
        whole = [torch.randn(E, n, k, generator=g) / k**0.5 for n, k in ((2 * I, H), (H, I))]
        self.shares = [
            [self.stored(w[r * self.each :][: self.each]) for w in whole] for r in range(count)
        ]
        self.on_gpu = [
            [[t.cuda() for t in self.packed(part)] for part in share] for share in self.shares
        ]
        for stream in self.streams:  # no memory is asked of the driver while a rank waits
            with torch.cuda.stream(stream):
                sizes = 64 << 20, *[1 << 20] * 8
                _ = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes]
        torch.cuda.synchronize()

    def stored(self, weight: Tensor) -> list[Tensor]:
        return [*quantize(weight, NVFP4)]

    def packed(self, parts: list[Tensor]) -> Sequence[Tensor]:
        return LAYOUTS[self.layout].pack(*parts, encoding=ENCODINGS[self.format])

    def call(self, rank: int, given: Given, capacity: int = 0, device: str = "cuda") -> Any:
        on_gpu = device == "cuda"
        memory = self.peers[rank] if on_gpu else torch.zeros(PEERS + self.count).long()
        return torch.ops.fusion_moe.fused_experts(
            *given,
            *(self.on_gpu if on_gpu else self.shares)[rank],
            weight_format=self.format,
            weight_layout=self.layout if on_gpu else "linear",
            activation_format=self.rows,
            first_expert=rank * self.each,
            peers=memory,
            across="g",
            of_experts=E,
            capacity=capacity,
        )

    def prepare(self, given: Sequence[Given], capacity: int = 0) -> None:
        """Compiles and loads everything before a rank waits."""
        with fusion_moe.preparing():
            for rank, mine in enumerate(given):
                self.call(rank, mine, capacity)
        torch.cuda.synchronize()

    def run(self, given: Sequence[Given], capacity: int = 0) -> list[Any]:
        given = [on_gpu(mine) for mine in given]
        self.prepare(given, capacity)
        found = []
        for rank, mine in enumerate(given):
            with torch.cuda.stream(self.streams[rank]):
                found.append(self.call(rank, mine, capacity))
        fusion_moe.synchronize()
        return found

    def want(self, given: Sequence[Given], capacity: int = 0) -> list[Any]:
        with options.override(target="reference"):
            return Together(self.count).run(
                lambda rank: self.call(rank, given[rank], capacity, "cpu")
            )


class Coded(Ranks):
    """Rows travel in e4m3 codes, with their scales."""

    format, rows = "fp8_e8m0", "fp8"

    def stored(self, weight: Tensor) -> list[Tensor]:
        return [*quantize(weight, FP8_E8M0)]


class Tiled(Ranks):
    """Weights in an order that large-M kernels read, too: rows travel in theirs."""

    layout = "w16x64"


class Training(Ranks):
    """Experts in bf16, and what a call makes with the gradients of all that has one."""

    format = "bf16"

    def stored(self, weight: Tensor) -> list[Tensor]:
        return [weight.bfloat16()]

    @torch.enable_grad()
    def call(self, rank: int, given: Given, capacity: int = 0, device: str = "cuda") -> Any:
        x, ids, w = (t.detach() for t in given)
        weights = chain(*(self.on_gpu if device == "cuda" else self.shares)[rank])
        wanted = [t.requires_grad_() for t in (x, w, *weights)]
        y = super().call(rank, (x, ids, w), capacity, device)
        return [y.detach(), *torch.autograd.grad(y, wanted, given[0].flip(-1))]


def tokens(count: int, seed: int) -> Given:
    """Some slots of which name no expert."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, E, generator=g).argsort(-1)[:, :K]
    ids = ids.masked_fill(torch.rand(count, K, generator=g) < 0.1, -1)
    return torch.randn(count, H, generator=g).bfloat16(), ids, torch.rand(count, K, generator=g)


def on_gpu(given: Given) -> Given:
    x, ids, w = (t.cuda() for t in given)
    return x, ids, w


def assert_alike(found: Sequence[Tensor], want: Sequence[Tensor], limit: float = 1e-2) -> None:
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape
        assert (a.cpu().float() - b.float()).norm() <= limit * b.float().norm()


@pytest.fixture(autouse=True)
def share_of_a_gpu(monkeypatch):
    """All blocks of all ranks run at once."""
    monkeypatch.setattr(collective, "_blocks", lambda arch: arch.multiprocessors // 5)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield
    torch.cuda.synchronize()


@pytest.mark.parametrize(("count", "kind"), [(2, Ranks), (4, Ranks), (4, Coded), (4, Tiled)])
def test_ranks_compute_what_the_reference_does(count, kind):
    """Equally many tokens and different numbers, none among them; calls of other sizes follow."""
    ranks = kind(count)
    for numbers, capacity in (
        *(((n,) * count, 0) for n in (1, 7, ROOM, 3)),
        *((tuple((5 * r) % 9 for r in range(count)), most) for most in (9, 19)),
        ((0,) * count, 4),
    ):
        given = [tokens(n, seed) for seed, n in enumerate(numbers)]
        assert_alike(ranks.run(given, capacity), ranks.want(given, capacity))


@pytest.mark.parametrize("kind", [Ranks, Coded])
def test_not_a_number_arrives(kind):
    """Of the bits that stand for words that have not come, which codes never have: in its own token
    alone.
    """
    ranks, given = kind(2), [tokens(6, seed) for seed in range(2)]
    for x, ids, _ in given:
        ids[0] = torch.tensor([0, 1, E - 1])  # of both ranks
        x[0] = torch.full((H,), -1, dtype=torch.int16).view(x.dtype)
    for found in ranks.run(given):
        assert found[0].isnan().all()
        assert found[1:].isfinite().all()


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_train_as_the_reference_does(count):
    """Forward and backward of all ranks, equally many tokens and different numbers."""
    ranks = Training(count)
    for numbers, capacity in ((5,) * count, 0), (tuple((5 * r) % 9 for r in range(count)), 9):
        given = [tokens(n, seed) for seed, n in enumerate(numbers)]
        found, want = ranks.run(given, capacity), ranks.want(given, capacity)
        for a, b in zip(found, want, strict=True):
            assert_alike(a, b, limit=2e-2)


@pytest.mark.parametrize(("count", "kind"), [(2, Ranks), (4, Ranks), (4, Coded)])
def test_replays_with_delays_repeat(count, kind):
    """Two graphs of a rank in turns, of other sizes and tokens, each after a delay of its own."""
    ranks, rng = kind(count), random.Random(0)
    every = [[tokens(n, 10 * n + r) for r in range(count)] for n in (5, 17)]
    wants = [ranks.run(given) for given in every]
    wrong = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(count)]
    graphs, kept = [], []
    for given, want in zip(every, wants, strict=True):
        of_ranks, given = [], [on_gpu(mine) for mine in given]
        for rank, mine in enumerate(given):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=ranks.streams[rank]):
                found = ranks.call(rank, mine)
                wrong[rank] += (found != want[rank]).any()
            of_ranks.append(graph)
        graphs.append(of_ranks)
        kept.append(given)  # graphs read them
    torch.cuda.synchronize()
    for i in range(REPLAYS):
        of_ranks = graphs[rng.random() < 0.5]
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                if rng.random() < 0.2:
                    torch.cuda._sleep(rng.randrange(100_000))  # cycles
                of_ranks[rank].replay()
        if i % 500 == 499:  # so that no queue is full when another rank is waited for
            fusion_moe.synchronize()
    assert not any(int(n) for n in wrong)
    assert len({int(t[0]) for t in ranks.memory}) == 1


def test_a_silent_rank_is_named():
    """By the next call, which does not wait again; sums lack what it did not send."""
    ranks, given = Ranks(2, SHORT), [on_gpu(tokens(6, seed)) for seed in range(2)]
    ranks.run(given)
    for _ in range(2):
        with torch.cuda.stream(ranks.streams[0]):
            found = ranks.call(0, given[0])
        with pytest.raises(RankError, match="rank 1"):
            fusion_moe.synchronize()
        assert found.isfinite().all()
