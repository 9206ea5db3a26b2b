"""Whole programs in one parallel region: the bits do not depend on the number of threads, nor on
what runs beside them.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_tiers import TIERS, program, same, same_on_any_threads
from fusions import fusion_of_call
from test_cpu_kernels import random_weight
from test_cpu_training import experts

from fusion_moe.errors import GroupsError
from fusion_moe.ir.derivative import differentiate

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("amx"), pytest.mark.slow]

EXPERTS, HIDDEN, INTERMEDIATE, SLOTS = 6, 272, 144, 3


def layer(tokens: int, tier: str):
    """A program of an expert layer with NVFP4 weights, and inputs for it."""
    generator = torch.Generator().manual_seed(tokens)
    x, w = (
        torch.randn(tokens, HIDDEN, generator=generator).bfloat16(),
        torch.rand(tokens, SLOTS, generator=generator),
    )
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :SLOTS].contiguous()
    gate_up, down = (
        random_weight(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        random_weight(EXPERTS, HIDDEN, INTERMEDIATE),
    )
    fusion = fusion_of_call(
        "fused_experts", x, ids, w, list(gate_up), list(down), weight_format="nvfp4"
    )
    return program(fusion, tier, joined=True), [x, ids, w, *gate_up, *down]


@pytest.mark.parametrize("tokens", [0, 1, 2, 300])
@pytest.mark.parametrize("tier", TIERS)
def test_forward(tier, tokens):
    compiled, inputs = layer(tokens, tier)
    same_on_any_threads(lambda: compiled(inputs))


@pytest.mark.parametrize("tier", TIERS)
def test_backward(tier):
    """Sums of rows, too, for the router's gradient."""
    fusion, inputs, wrt = experts(torch.bfloat16, biases=True)
    made = differentiate(fusion, wrt)
    outputs = made.forward.evaluate(*inputs)
    backward = [*made.read(inputs, outputs), torch.randn(outputs[0].shape).bfloat16()]
    compiled = program(made.backward, tier, joined=True)
    same_on_any_threads(lambda: compiled(backward))


def test_several_pools_at_once():
    """Of threads that call at the same time each has a pool of its own."""
    (one, few), (many, more) = layer(1, TIERS[-1]), layer(70, TIERS[-1])
    want = one(few), many(more)

    def call(i: int):
        torch.set_num_threads(3)
        return [(one(few), many(more)) for _ in range(20)]

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(4) as pool:
            found = [each for calls in pool.map(call, range(4)) for each in calls]
    finally:
        torch.set_num_threads(before)
    for each in found:
        same(each, want)


def test_bad_input_ends_the_region():
    compiled, inputs = layer(5, TIERS[-1])
    want = compiled(inputs)
    bad = inputs[1].clone()
    bad[3, 1] = EXPERTS
    for _ in range(3):
        with pytest.raises(GroupsError, match="out of range"):
            compiled([inputs[0], bad, *inputs[2:]])
        same(compiled(inputs), want)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system binds no threads to CPUs"
)
def test_more_threads_than_the_process_has_cpus():
    """Those that wait let those that work run: without that, five threads on one CPU took six times
    as long as one thread there.
    """
    compiled, inputs = layer(70, TIERS[-1])
    want = compiled(inputs)

    def on_one_cpu():
        """In a new thread: those of OpenMP that help it are new, and have its affinity. What runs
        beside this takes time from either, for a while.
        """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return any(fastest(5) < 2 * fastest(1) + 5e-3 for _ in range(20))

    def fastest(threads: int) -> float:
        torch.set_num_threads(threads)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            found = compiled(inputs)
            times.append(time.perf_counter() - start)
            same(found, want)
        return min(times)

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(on_one_cpu).result()
    finally:
        torch.set_num_threads(before)
