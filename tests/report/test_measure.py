"""fusion_moe.explain with measure and load: what kernels take, what they read, and the rows of each
expert.
"""

from __future__ import annotations

from dataclasses import replace

import pages
import pytest
import torch
from bad_calls import messages
from experts import experts
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_moe
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.errors import UnsupportedError
from fusion_moe.ir.text import parse
from fusion_moe.messages.units import duration
from fusion_moe.nn import NVFP4GroupedLinear
from fusion_moe.report import Measured
from fusion_moe.report.measure import in_bf16
from fusion_moe.runtime import build, isa
from fusion_moe.runtime.host_memory import bandwidth, pages as large_pages

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 64, 32, 2
IDS = torch.tensor([[0, 1], [1, 3], [1, 0]])
W = torch.full(IDS.shape, 0.5)
ROWS = (2, 3, 0, 1, 0, 0, 0, 0)


def matrices(n, k, count):
    """Bytes of the codes and block scales of some matrices."""
    return count * n * k * 9 // 16


class Layer(torch.nn.Module):
    """Experts with ids from outside, and what their layer computed last."""

    def __init__(self):
        super().__init__()
        self.experts = experts(EXPERTS, HIDDEN, INTERMEDIATE)
        self.last = None

    def forward(self, x, ids, w):
        self.last = self.experts(x, ids, w)
        return self.last


@pytest.fixture(autouse=True)
def little_is_read(monkeypatch):
    """The bandwidth is that of a few MiB, in a cache: here it only has to be a number. Nothing is
    kept.
    """
    monkeypatch.setattr(
        bandwidth, "pool", lambda: large_pages.empty((2**22,), torch.uint8).fill_(1)
    )
    monkeypatch.setattr(bandwidth, "of", bandwidth._measured)


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    bandwidth._library.cache_clear()
    bandwidth._why_not_cpp.cache_clear()
    yield
    bandwidth._why_not_cpp.cache_clear()


@pytest.fixture
def x():
    return torch.randn(len(IDS), HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def explained(*args, **kwargs):
    with torch.no_grad():
        return fusion_moe.explain(*args, **{"measure": True, "load": True, **kwargs})


def measured_of(report):
    return [m for f in report.fusions for m in (*(s.measured for s in f.segments), f.measured)]


# What is measured ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_each_kernel_and_the_program_are_measured(x, target):
    report = explained(Layer(), x, IDS, W, target=target)
    found, speed = measured_of(report), max(report.machine.bytes_per_second, report.machine.now)
    assert len(found) == 3
    for m in found:
        assert 0 < m.shortest <= m.seconds <= m.longest
        assert m.floor == m.bytes_read / speed
    in_cpp = [s.backend for s in report.fusions[0].segments] == ["cpu", "cpu"]
    assert in_cpp == (target == "cpu" and build.find_compiler() is not None)
    assert report.machine.isa_level == (isa.selected() if in_cpp else "")
    assert (report.machine.threads, report.machine.cpus) == (
        torch.get_num_threads(),
        bandwidth.cpus(),
    )


def test_bytes_are_those_of_experts_that_have_rows(x):
    report = explained(Layer(), x, IDS, W)
    first, second, whole = measured_of(report)
    # without running, of 6 rows at most 6 experts are known to be read
    assert report.segments[0].bytes_read > first.bytes_read
    used, slots = sum(n > 0 for n in ROWS), IDS.numel()
    gate_up = matrices(2 * INTERMEDIATE, HIDDEN, used) + 2 * 4 * used
    down = matrices(HIDDEN, INTERMEDIATE, used) + 4 * used
    tokens = len(IDS) * HIDDEN * 2
    assert first.bytes_read == 8 * slots + tokens + gate_up
    # rows, ends, slots, weights
    assert (
        second.bytes_read == down + slots * INTERMEDIATE * 2 + 4 * EXPERTS + 4 * slots + 4 * slots
    )
    # and nothing of what kernels hand on
    assert whole.bytes_read == 8 * slots + tokens + gate_up + down + 4 * slots


def test_other_ways_are_measured_too(x):
    report = explained(Layer(), x, IDS, W, load=False)
    (fusion,) = report.fusions
    assert fusion.unfused.seconds > 0
    assert fusion.bf16.seconds > 0
    quiet = replace(report, machine=None)
    assert list(quiet.call_seconds) == ["here", "unfused", "bf16"]
    assert sum(quiet.time_shares.values()) == pytest.approx(1)
    assert "  bf16" in str(quiet)
    busy = replace(report.machine, preemptions=10**6)
    assert not replace(report, machine=busy).call_seconds


@pytest.mark.parametrize("encoding", ["nvfp4", "int4", "bf16"])
def test_products_in_bf16_are_those_of_the_program(encoding):
    rows, ends = torch.randn(6, 64).bfloat16(), torch.tensor([2, 2, 6], dtype=torch.int32)
    weight = list(quantize(torch.randn(3, 32, 64).bfloat16() / 8, ENCODINGS[encoding]))

    def product(rows, ends):
        return torch.ops.fusion_moe.grouped_mm(rows, weight, ends, weight_format=encoding)

    fusion = parse(fusion_moe.explain(product, rows, ends).stage("translated"))
    run, _ = in_bf16(fusion, [rows, *weight, ends], {})
    (found,) = run()
    torch.testing.assert_close(found, product(rows, ends), rtol=2e-2, atol=2e-2)


def test_the_call_is_run_as_compiled(x):
    layer = Layer()
    explained(layer, x, IDS, W)
    found = layer.last
    with torch.no_grad():
        assert torch.equal(found, torch.compile(layer, backend="fusion_moe")(x, IDS, W))


def test_one_may_be_asked_for_without_the_other(x):
    alone = [
        explained(Layer(), x, IDS, W, measure=asked == "measure", load=asked == "load")
        for asked in ("measure", "load")
    ]
    assert [r.machine is not None for r in alone] == [True, False]
    assert [r.fusions[0].measured is not None for r in alone] == [True, False]
    assert [bool(r.fusions[0].loads) for r in alone] == [False, True]
    assert ["x floor" in r.details() for r in alone] == [True, False]
    assert ["6 rows in 8 groups" in r.details() for r in alone] == [False, True]


def test_without_a_compiler_what_runs_then_is_measured(x, no_compiler):
    report = explained(Layer(), x, IDS, W)
    for s in report.fusions[0].segments:
        assert s.measured.seconds > 0
        assert "CXX='/nowhere/g++' does not run" in s.backend_why
    assert report.machine.read_by.startswith("torch's amax")


def test_weights_on_large_pages_are_counted():
    layer, x = (
        NVFP4GroupedLinear.from_float(torch.randn(4, 1024, 2048)),
        torch.randn(3, 2048).bfloat16(),
    )
    machine = explained(layer, x, torch.tensor([1, 1, 2, 3], dtype=torch.int32)).machine
    weights = layer.weight, layer.weight_scale, layer.weight_decode_scale
    assert machine.weight_bytes == layer.nbytes
    assert machine.weight_bytes_on_large_pages == large_pages.obtained(*weights)


# The rows of each expert --------------------------------------------------------------------------


def test_each_layer_has_its_load_and_the_first_is_measured(x):
    layer = Layer()

    def both(x, ids, w):
        for n in ids, ids + 4:
            x = torch.sigmoid(layer(x, n, w) @ torch.eye(HIDDEN, dtype=x.dtype))
        return x

    report = explained(both, x, IDS, W)
    (fusion,) = report.fusions
    assert fusion.times == 2
    assert [load.rows for load in fusion.loads] == [ROWS, (*ROWS[4:], *ROWS[:4])]
    assert report.details().count("fusion0     whole program") == 1


def test_rows_of_no_group_are_not_counted():
    layer = NVFP4GroupedLinear.from_float(torch.randn(3, 32, 64))
    report = explained(layer, torch.randn(9, 64), torch.tensor([2, 2, 7], dtype=torch.int32))
    assert [load.rows for load in report.fusions[0].loads] == [(2, 0, 5)]
    (measured,) = {m.bytes_read for m in measured_of(report)}
    assert measured == 2 * matrices(32, 64, 1) + 2 * 4 + 3 * 4 + 9 * 64 * 4


def test_calls_that_need_the_sizes_or_the_values_of_the_call(x):
    layer = Layer()
    args = [t.clone() for t in (x, IDS, W)]
    for t in args:
        torch._dynamo.mark_dynamic(t, 0)
    report = explained(lambda x, ids, w: layer(x, ids, w) if x.sum() > -1e9 else None, *args)
    assert [load.rows for load in report.fusions[0].loads] == [ROWS]
    assert (report.graphs, len(report.fusions[0].sizes)) == (2, 1)


def test_sizes_that_only_the_device_knows_are_known_when_it_runs(x):
    layer = Layer()
    x = x.abs() * torch.tensor([1, -1, 1])[:, None]

    def positive(x):
        some = x[x[:, 0] > 0]
        return layer(some, torch.zeros_like(some[:, :1], dtype=torch.long), some[:, :1])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fusion = explained(positive, x).fusions[0]
    assert fusion.segments[0].flops is None
    assert fusion.segments[0].measured.seconds > 0
    assert fusion.loads[0].rows == (2, *[0] * 7)


# What cannot be measured --------------------------------------------------------------------------


def test_tensors_need_values(x, golden):
    layer = Layer()
    with FakeTensorMode():
        fake = Layer()
    in_fp4 = Layer()
    in_fp4.experts.activation_format = "nvfp4"
    golden(
        messages(
            {
                "on meta": lambda: explained(layer, x.to("meta"), IDS, W),
                "a fake": lambda: explained(fake, x, IDS, W),
                "of another machine": lambda: explained(layer, x, IDS, W, target="sm_100"),
                "by another machine": lambda: explained(in_fp4, x, IDS, W),
            }
        )
    )
    assert explained(layer, x.to("meta"), IDS.to("meta"), W, measure=False, load=False).fusions


@pytest.mark.thunder
def test_what_thunder_made_is_not_run(x):
    import thunder

    with pytest.raises(
        UnsupportedError,
        match="of the result of thunder.jit; expected a module or a function; pass what",
    ):
        explained(thunder.jit(Layer()), x, IDS, W)


@pytest.mark.gpu
def test_on_a_gpu_the_load_is_shown_and_events_take_times(x):
    layer, args = Layer().cuda(), (x.cuda(), IDS.cuda(), W.cuda())
    assert explained(layer, *args, measure=False).fusions[0].loads[0].rows == ROWS
    report = explained(layer, *args)
    assert (report.machine.gpu, report.machine.now) == (
        torch.cuda.get_device_name(),
        report.machine.bytes_per_second,
    )
    (fusion,) = report.fusions
    ways = fusion.unfused, fusion.bf16
    assert all(0 < m.shortest <= m.seconds <= m.longest for m in (*measured_of(report), *ways))


# How it is told -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told():
    """A report with numbers that are the same everywhere."""
    return pages.measured(pages.explained(target="reference"))


def test_table(told, golden):
    golden(told.details())
    assert max(map(len, told.details().splitlines())) <= 120


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2.5 s"),
        (0.9996, "1 s"),
        (0.0999, "99.9 ms"),
        (1e-3, "1 ms"),
        (123.4e-6, "123 us"),
        (5e-10, "0.5 ns"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


# On a busy machine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preemptions", "now", "why"),
    [
        (0, 20e9, ""),
        (6, 15e9, ""),
        (12, 20e9, "other programs took the CPU away 12 times"),
        (0, 5e9, "memory was read at 25% of this machine's speed"),
        (7, 5e9, "7 times, and memory was read at 25%"),
    ],
)
def test_a_busy_machine_voids_times(told, preemptions, now, why):
    report = replace(told, machine=replace(told.machine, preemptions=preemptions, now=now))
    assert why in report.void
    assert bool(report.void) == bool(why)
    words = " ".join(str(report).split())
    assert (
        "! times are void: this machine was busy: " in words,
        "times its memory bound" in words,
    ) == (bool(why), not why)
    page = report._repr_html_()
    assert ("times are void" in page, "x memory bound" in page) == (bool(why), not why)
    assert "1.5 ms" in report.details()
    later = replace(
        report,
        fusions=tuple(replace(f, segments=tuple(map(slower, f.segments))) for f in report.fusions),
    )
    assert bool(fusion_moe.diff(report, later)) == (not why)


def slower(s):
    return replace(s, measured=Measured(9.0, 9.0, 9.0, s.measured.bytes_read, s.measured.floor))
