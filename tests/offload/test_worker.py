"""The worker: answers requests, says when it is gone, and ends with its process or its models."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch

from fusion_moe.compile import program_of
from fusion_moe.definitions.operations import SPECS, bind, eager_types, fusion_of
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.ir.text import text
from fusion_moe.offload import worker
from fusion_moe.offload.pinned import Staging
from fusion_moe.offload.worker import Worker

pytestmark = pytest.mark.compiler
E, H, INNER, ROWS = 4, 64, 32, 8
SECONDS = 300  # that no answer takes, on a busy machine either


@pytest.fixture
def own():
    made = Worker(2)
    yield made
    made.stop()


def empty_model(of: Worker) -> tuple[worker.Model, int]:
    """A model whose programs make nothing."""
    model = of.model(Staging(worker.request_buffers(ROWS, 2 * H), pin=False))
    return model, model.layer(model.programs([(ROWS, worker.nothing(ROWS))]), [])


class Layer:
    """Experts whose rows a worker computes."""

    def __init__(self, model: worker.Model):
        g = torch.Generator().manual_seed(0)
        self.weights = [
            list(quantize(torch.randn(E, n, k, generator=g), NVFP4))
            for n, k in ((2 * INNER, H), (H, INNER))
        ]
        tensors = model.staging.tensors
        self.x = tensors["rows"].view(torch.bfloat16).view(ROWS, H)
        self.ids = tensors["ids"].view(torch.int32).view(ROWS, 1)
        self.w = tensors["weights"].view(torch.float32).view(ROWS, 1)
        self.y = tensors["results"].view(torch.bfloat16).view(ROWS, H)
        made = [(rows, self.plan(rows)) for rows in (1, 2, 4, ROWS)]
        given = [t for weight in self.weights for t in weight]
        self.model, self.number = model, model.layer(model.programs(made), given)

    def arguments(self, rows: int) -> dict[str, object]:
        up, down = self.weights
        given = {"x": self.x[:rows], "ids": self.ids[:rows], "w": self.w[:rows]}
        return {**given, "gate_up": up, "down": down, "weight_format": "nvfp4"}

    def plan(self, rows: int):
        call = bind(SPECS["fused_experts"], (), self.arguments(rows))
        fusion = fusion_of("fused_experts", eager_types(call), call.others)
        program = program_of(text(fusion), torch.device("cpu"))
        tensors = list(call.tensors.values())
        plan = program.joined.plan_in(program.sizes(tensors, {})).numbers(tensors)
        assert plan is not None
        return plan


def test_rows_are_those_of_the_operation(own):
    layer = Layer(own.model(Staging(worker.request_buffers(ROWS, 2 * H), pin=False)))
    g = torch.Generator().manual_seed(1)
    for rows in (1, 3, ROWS, 2):
        layer.x.copy_(torch.randn(ROWS, H, generator=g))
        layer.ids.copy_(torch.randint(0, E, (ROWS, 1), generator=g))
        layer.w.fill_(1)
        want = torch.ops.fusion_moe.fused_experts(**layer.arguments(rows))
        layer.y.fill_(7)
        assert layer.model.wait(layer.model.submit(layer.number, rows), SECONDS) == ""
        assert torch.equal(layer.y[:rows], want)
    assert layer.model.busy(layer.number) > 0


def test_bad_input_is_refused_and_the_worker_goes_on(own):
    layer = Layer(own.model(Staging(worker.request_buffers(ROWS, 2 * H), pin=False)))
    layer.ids.fill_(E)
    assert "bad input" in layer.model.wait(layer.model.submit(layer.number, 2), 20)
    layer.ids.fill_(0)
    assert layer.model.wait(layer.model.submit(layer.number, 2), SECONDS) == ""
    assert "bad input" in layer.model.wait(layer.model.submit(99, 2), SECONDS)  # no such layer
    assert "bad input" in layer.model.wait(layer.model.submit(layer.number, ROWS + 1), 20)


def cpu_seconds_of(seconds: float) -> float:
    """In which this thread does nothing."""
    before = sum(os.times()[:2])
    time.sleep(seconds)
    return sum(os.times()[:2]) - before


def test_it_wakes_up_and_naps(own):
    model, layer = empty_model(own)
    for pause in (0, 0.05, 0.3):
        time.sleep(pause)
        assert model.wait(model.submit(layer, 1), SECONDS) == ""
    time.sleep(0.2)
    assert any(cpu_seconds_of(0.5) < 0.25 for _ in range(10))  # other threads may work meanwhile


def test_a_worker_that_ended_is_told_at_once():
    own = Worker(2)
    model, layer = empty_model(own)
    own.stop()
    start = time.monotonic()
    assert "ended" in model.wait(model.submit(layer, 1), 20)
    assert time.monotonic() - start < SECONDS / 2


def test_a_late_worker_is_given_up(own):
    model, layer = empty_model(own)
    own.pause()
    request = model.submit(layer, 1)
    assert "too long" in model.wait(request, 0.05)
    own.pause(False)
    assert model.wait(request, SECONDS) == ""


@pytest.mark.exhaustive
def test_models_come_and_go_while_others_are_used(own):
    model, layer = empty_model(own)
    ended = threading.Event()
    said: list[str] = []

    def use():
        while not ended.is_set():
            said.append(model.wait(model.submit(layer, 1), SECONDS))

    thread = threading.Thread(target=use)
    thread.start()
    for _ in range(20):
        other, its = empty_model(own)
        assert other.wait(other.submit(its, 1), SECONDS) == ""
        del other
        gc.collect()
    ended.set()
    thread.join()
    assert set(said) == {""}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_has_its_own():
    parents = Worker.of_process()
    model, layer = empty_model(parents)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            parents.stop()
            mine, its = empty_model(Worker.of_process())
            status = 0 if mine.wait(mine.submit(its, 1), SECONDS) == "" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Worker.of_process() is parents
    assert model.wait(model.submit(layer, 1), SECONDS) == ""
