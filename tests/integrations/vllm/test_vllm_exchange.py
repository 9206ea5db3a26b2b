"""Ranks with tokens of their own (data parallelism), whose experts send them to each other without
vLLM's collectives: in engines, and one layer by itself.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from bad_calls import messages
from experts import experts as some_experts
from served import modelopt_demo
from test_vllm_config import layer, on_cpus, parallel
from test_vllm_gpu import DEFAULT, near
from test_vllm_serving import PROMPTS, compare, generated
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig

from fusion_moe.distributed import symmetric
from fusion_moe.integrations.vllm import exchange
from fusion_moe.integrations.vllm.experts import need_served
from fusion_moe.nn import NVFP4Experts

SENDS = "fusion_moe sends tokens through memory that the ranks share"
GATHERS = "fusion_moe leaves tokens to vLLM's collectives: --additional-config says so"
GATHERED = {"fusion_moe": {"dispatch": "all_gather"}}


def generated_by_ranks(
    directory: Path, ranks: int, **options: Any
) -> list[tuple[list[dict[str, Any]], str]]:
    """As `generated`, of processes that are ranks of data parallelism: each one has a prompt less
    than the one before, so that their numbers of tokens differ.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"VLLM_DP_SIZE": ranks, "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}

    def of_rank(rank: int) -> tuple[list[dict[str, Any]], str]:
        environment = {**shared, "VLLM_DP_RANK": rank, "VLLM_ENABLE_V1_MULTIPROCESSING": 1}
        environment["VLLM_CPU_SIM_MULTI_NUMA"] = 0  # else vLLM 0.33 wants a node for each rank
        return generated(
            directory,
            {name: str(value) for name, value in environment.items()},
            prompts=PROMPTS[rank:],
            enable_expert_parallel=True,
            **options,
        )

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(of_rank, range(ranks)))


@on_cpus
@pytest.mark.slow
def test_two_processes_on_cpus(tmp_path: Path) -> None:
    """Where vLLM cannot gather tokens."""
    directory = modelopt_demo(tmp_path)
    for rank, (found, log) in enumerate(generated_by_ranks(directory, 2)):
        assert SENDS in log
        compare(directory, tmp_path, found, 1e-3, PROMPTS[rank:])


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "says"),
    [({}, SENDS), ({"additional_config": GATHERED}, GATHERS)],
    ids=["sent", "gathered"],
)
def test_an_engine_on_two_gpus(asked: dict[str, Any], says: str, tmp_path: Path) -> None:
    """In vLLM's default mode, with CUDA graphs."""
    directory = modelopt_demo(tmp_path)
    of_ranks = generated_by_ranks(directory, 2, **DEFAULT, **asked)
    assert says in of_ranks[0][1]  # the first rank of a node logs for all
    for rank, (found, _) in enumerate(of_ranks):
        near(directory, tmp_path, found, PROMPTS[rank:])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """vLLM's group of expert parallelism is this process."""
    distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    group = SimpleNamespace(device_group=distributed.group.WORLD)
    monkeypatch.setattr(exchange, "get_ep_group", lambda: group)
    yield
    distributed.destroy_process_group()


def test_fewer_tokens_than_another_rank(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens without experts are added, and change no sum."""
    torch.manual_seed(0)
    made = some_experts(4, 64, 32)
    made.first_expert = 0
    x, w = torch.randn(3, 64), torch.rand(3, 2)
    ids = torch.tensor([[0, 3], [-1, 1], [2, -1]], dtype=torch.int32)
    wanted = made(x, ids, w)
    monkeypatch.setattr(FusedMoEParallelConfig, "use_all2all_kernels", True)
    _settings(monkeypatch)
    assert exchange.sends_tokens_(made, layer(moe_parallel_config=parallel()))
    for most in 3, 5:
        sizes = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda most=most: [3, most])
        context = SimpleNamespace(dp_metadata=sizes)
        monkeypatch.setattr(exchange, "get_forward_context", lambda context=context: context)
        assert torch.equal(exchange.send(made, x, ids, w), wanted)


def test_gathered_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, this one the first: its sums have what the other one's experts add."""
    torch.manual_seed(0)
    own, other = (some_experts(2, 64, 32) for _ in range(2))
    own.first_expert, other.first_expert = 0, 2
    x, w = torch.randn(5, 64), torch.rand(5, 2)
    ids = torch.tensor([[0, 3], [-1, 1], [2, -1], [1, 2], [3, 0]], dtype=torch.int32)

    def dispatch(*given: torch.Tensor | bool) -> list[Any]:
        *tensors, parts = given
        assert not parts
        assert all(
            t.equal(all_of_it[:3]) for t, all_of_it in zip(tensors, (x, w, ids), strict=True)
        )
        return [x, w, ids]

    def combine(y: torch.Tensor, parts: bool) -> torch.Tensor:
        return (y + other(x, ids, w))[:3]

    group = SimpleNamespace(dispatch=dispatch, combine=combine)
    monkeypatch.setattr(exchange, "get_ep_group", lambda: group)
    found = exchange.gather(own, x[:3], ids[:3], w[:3], layer())
    assert found.equal((own(x, ids, w) + other(x, ids, w))[:3])


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM gathers tokens."""
    gpu = SimpleNamespace(is_cpu=lambda: False)
    for module in "exchange", "experts":
        monkeypatch.setattr(f"fusion_moe.integrations.vllm.{module}.current_platform", gpu)


def test_ranks_that_share_no_memory(
    alone: None,
    on_gpus: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(symmetric, "_why_not_shared", lambda *_: "ranks of 2 nodes")
    caplog.set_level("INFO", "vllm")
    _settings(monkeypatch)
    made, forward = some_experts(4, 64, 32), NVFP4Experts.forward
    assert not exchange.sends_tokens_(made, _of_two())
    assert made.forward.__func__ is forward
    assert "leaves tokens to vLLM's collectives: ranks of 2 nodes; expected" in caplog.text


def _of_two(experts: int = 4, **changes: Any) -> FusedMoEConfig:
    ranks = parallel(**{"ep_size": 2, "dp_size": 2, **changes})
    return layer(num_experts=experts, moe_parallel_config=ranks)


def _settings(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """vLLM's, for layers that are made after it."""
    given = {"additional_config": {}, "enable_dbo": False, "enable_sleep_mode": False}
    given |= {"enforce_eager": True, **changes}
    both = SimpleNamespace(enable_elastic_ep=False, **given)
    both.model_config = both.parallel_config = both
    monkeypatch.setattr(exchange, "get_current_vllm_config_or_none", lambda: both)


@pytest.mark.parametrize(
    ("changes", "settings", "why"),
    [
        ({}, {}, ""),
        ({"ep_size": 4, "sp_size": 2}, {}, ""),
        ({"ep_size": 4}, {}, "ranks of tensor parallelism have the same tokens"),
        ({"experts": 5}, {}, "5 experts, not equally many on each of 2 ranks"),
        ({}, {"enable_dbo": True}, "--enable-dbo"),
        ({}, {"enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({}, {"additional_config": GATHERED}, "--additional-config says so"),
    ],
)
def test_who_sends_tokens(
    changes: dict[str, Any],
    settings: dict[str, Any],
    why: str,
    on_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _settings(monkeypatch, **settings)
    need_served(_of_two(**changes))
    assert exchange.why_gathered(_of_two(**changes)) == why


@on_cpus
def test_what_is_refused_on_cpus(
    monkeypatch: pytest.MonkeyPatch, golden: Callable[[str], None]
) -> None:
    """That which vLLM would gather, and options that nobody knows."""

    def refused(settings: dict[str, Any], moe: FusedMoEConfig) -> Callable[[], None]:
        def call() -> None:
            _settings(monkeypatch, **settings)
            need_served(moe)

        return call

    _settings(monkeypatch)
    need_served(_of_two())
    features = dataclasses.replace(parallel(dp_size=2), use_ep=False)
    options = [{"dispatch": "all_gather"}, {"dispatch": "nccl"}, {"dispatched": "symmetric"}]
    golden(
        messages(
            {
                "features": refused({}, layer(moe_parallel_config=features)),
                "5 experts": refused({}, _of_two(5)),
                "compiled": refused({"enforce_eager": False}, _of_two()),
                **{
                    f"{option}": refused({"additional_config": {"fusion_moe": option}}, _of_two())
                    for option in options
                },
            }
        )
    )
