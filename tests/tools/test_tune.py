"""tools/tune without a GPU: files of timings, and tables that fit them."""

from __future__ import annotations

import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusion_moe.arch import H100, H200, L4
from fusion_moe.backends.cuda import one_group
from fusion_moe.backends.cuda.heuristics import SizeClass, choose_from
from fusion_moe.backends.cuda.launch import Launch
from fusion_moe.backends.cuda.table import (
    ALWAYS,
    KINDS,
    Regime,
    parse,
    path_of,
    table_of,
)
from fusion_moe.backends.cuda.variants import SETS, Matrices
from fusion_moe.runtime import nvrtc

TUNE = Path(__file__).parents[2] / "tools" / "tune"
sys.path.append(str(TUNE))

import balance  # noqa: E402
import fit  # noqa: E402
import model  # noqa: E402
import predict  # noqa: E402
import sweep  # noqa: E402
import timings as files  # noqa: E402
from timings import Cell, Timings, way  # noqa: E402

FEW = Matrices(groups=128, k=2048, tiles=96, block=1, tile_bytes=576, tiled=True)
MANY = Matrices(groups=256, k=7168, tiles=256, block=1, tile_bytes=576, tiled=True)
AVERAGES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)


def timings(ends=(10, 40), classes_pay_at=None, of=FEW, arch=H200) -> Timings:
    """As if M8 were the fastest up to ends[0] rows of a group, then M32 up to ends[1], then M160;
    all others take twice as long.

    classes_pay_at: weights of a product from which on size classes take half of that.
    """
    used = table_of(arch)
    cells = []
    for average in AVERAGES:
        rows = average * of.groups
        fast = SETS["M8" if average <= ends[0] else "M32" if average <= ends[1] else "M160"]
        us = {
            way([SizeClass(v)]): 1.0 if v in fast else 2.0
            for name in ("M8", "M16", "M32", "M48_96", "M80", "M160")
            for v in SETS[name]
        }
        for regime in used.tiled:
            if regime.size_classes:
                only = replace(used, tiled=(Regime(ALWAYS, regime.variants, regime.size_classes),))
                pays = (
                    classes_pay_at is not None
                    and of.groups * of.tiles * 16 * of.k >= classes_pay_at
                )
                us.setdefault(way(choose_from(only, rows, of, arch)), 0.5 if pays else 4.0)
        cells.append(Cell("made up", of, average, rows, "uniform", us))
    return Timings(arch, {"device": "none"}, tuple(cells))


def losses(found, measured):
    return [f.loss for f in fit.fitted(found, measured)]


def test_a_fit_finds_the_bounds_that_the_times_have():
    measured = timings()
    assert max(losses(table_of(H200), measured)) == 2.0
    found = fit.fit(table_of(H200), measured)
    assert losses(found, measured) == [1.0] * len(AVERAGES)
    for average in (1, 3, 9, 14, 36, 300):
        chosen = choose_from(found, average * 128, FEW, H200)[0].variant
        assert chosen in SETS["M8" if average <= 10 else "M32" if average <= 40 else "M160"]


def test_a_table_that_fits_stays_as_it_is():
    measured = timings()
    found = fit.fit(table_of(H200), measured)
    assert fit.fit(found, measured) == found
    # nothing was measured
    assert [getattr(found, kind) for kind in KINDS[1:]] == [
        getattr(table_of(H200), kind) for kind in KINDS[1:]
    ]


def test_size_classes_go_where_they_do_not_pay_and_come_where_they_do():
    slow = timings(of=MANY)
    assert any(len(choose_from(table_of(H200), c.rows, MANY, H200)) > 1 for c in slow.cells)
    assert max(losses(fit.fit(table_of(H200), slow), slow)) == 1.0
    fast = timings(classes_pay_at=0)
    before, after = table_of(H200), fit.fit(table_of(H200), fast)
    assert fit.mean_loss(after, fast) < fit.mean_loss(before, fast)
    assert any(len(choose_from(after, c.rows, FEW, H200)) > 1 for c in fast.cells)
    assert not any(len(choose_from(before, c.rows, FEW, H200)) > 1 for c in fast.cells)


def test_what_was_not_measured_is_not_chosen_for_it():
    measured = timings()
    cells = tuple(
        replace(c, us={k: v for k, v in c.us.items() if "large_m_160" not in k})
        for c in measured.cells
    )
    found = fit.fit(table_of(H200), replace(measured, cells=cells))
    assert None not in [f.loss for f in fit.fitted(found, replace(measured, cells=cells))]


def test_noise_changes_nothing():
    measured = timings()
    found = fit.fit(table_of(H200), measured)
    noisy = replace(
        measured,
        cells=tuple(
            replace(c, us={k: v * (1 + 1e-4 * math.sin(i * 7 + len(k))) for k, v in c.us.items()})
            for i, c in enumerate(measured.cells)
        ),
    )
    assert fit.fit(found, noisy) == found


def test_files_are_read_as_written(tmp_path):
    for arch in (H200, replace(H200, name="another GPU", multiprocessors=78)):
        measured = timings(arch=arch)
        files.save(measured, tmp_path / "t.json")
        assert files.load(tmp_path / "t.json") == measured
    later = replace(H100, l2_bytes=H200.l2_bytes)  # what is known now counts
    files.save(Timings(later, {}, ()), tmp_path / "t.json")
    assert files.load(tmp_path / "t.json").arch is H100


def test_files_of_several_gpus_are_no_timings(tmp_path):
    for arch in (H200, H100):
        files.save(Timings(arch, {}, ()), tmp_path / arch.name)
    with pytest.raises(ValueError, match="H200, H100"):
        files.load_all([tmp_path / "H200", tmp_path / "H100"])


def test_the_report_names_what_was_chosen_and_what_is_best():
    measured = timings()
    shown = fit.shown(table_of(H200), measured)
    assert len(shown.splitlines()) == 1 + len(AVERAGES) + 3
    assert "worst 2.000" in shown
    assert fit.summary(fit.fitted(fit.fit(table_of(H200), measured), measured))[-1].startswith(
        "geometric mean 1.0000, worst 1.000"
    )
    odd = replace(measured, cells=(*measured.cells, replace(measured.cells[0], us={"x": 1.0})))
    missing, *_ = fit.summary(fit.fitted(table_of(H200), odd))
    assert missing == "1 of 13 cells: what is chosen was not measured"


def test_the_best_of_a_count_knows_all_times_but_not_the_routing():
    us = {"uniform": {"a": 1.0, "b": 1.1, "c": 2.0}, "zipf": {"a": 1.5, "b": 1.1, "c": 1.0}}
    cells = tuple(Cell("made up", FEW, 16, 128, routing, times) for routing, times in us.items())
    found = fit.best_of_counts(Timings(H200, {}, cells))
    assert [(f.chosen, f.loss) for f in found] == [("b", 1.1), ("b", 1.1)]
    assert fit.jumps(
        [fit.Fitted(cells[0], "a"), fit.Fitted(replace(cells[0], tokens=17), "c")]
    ) == [pytest.approx(2)]


@pytest.fixture
def tune(monkeypatch, capsys):
    """tune(*arguments): what the command prints. In this process, which has imported torch."""

    def tune(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(TUNE), *arguments])
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(TUNE), run_name="__main__")
        assert not done.value.code
        return capsys.readouterr().out

    return tune


def test_a_fit_from_the_command_line(tmp_path, tune):
    """Without a GPU, and writing nothing unless it is asked to."""
    files.save(timings(), tmp_path / "t.json")
    before = path_of(H200).read_bytes()
    said = tune("fit", str(tmp_path / "t.json"))
    assert "geometric mean 1.0000, worst 1.000" in said
    assert "\ntiled: up to 39, weights up to 536870912: M32\n" in said
    assert path_of(H200).read_bytes() == before
    found = fit.fit(table_of(H200), timings())
    assert parse(fit.text(found)) == found


@pytest.mark.parametrize(
    ("tiles", "parts", "want"),
    [
        ([4, 3, 2, 1], 4, (6, 5, 6, 5, 5)),
        ([1, 1, 1], 4, (2, 2, 1.5, 1.5, 1.5)),
        ([1, 1, 1], 3, (2, 2, 1 + 2 / 3, 1 + 2 / 3, 1.5)),  # of three consumers two and one
        ([2, 2, 2, 1, 1], 1, (5, 4, 5, 4, 4)),
    ],
)
def test_how_long_the_longest_of_two_blocks_works(tiles, parts, want):
    found = balance.spans(np.array(tiles, float), 2, parts)
    assert list(found) == ["in order", "back and forth", "last wave in parts", "both", "even"]
    assert tuple(found.values()) == pytest.approx(want)


def test_how_evenly_blocks_work_from_the_command_line(tmp_path, tune):
    chosen = way(choose_from(table_of(H200), 2**15, FEW, H200))
    cells = tuple(
        Cell("qwen3 gate_up", FEW, tokens, 8 * tokens, "uniform", {chosen: 500.0})
        for tokens in (1024, 4096)
    )
    files.save(Timings(H200, {}, cells), tmp_path / "t.json")
    said = tune("balance", str(tmp_path / "t.json"), "--tokens", "2000", "5000")
    _, line, last = said.splitlines()
    floor = 2 * 2**15 * FEW.tiles * 16 * FEW.k / 780e6
    assert line.startswith(f"uniform  qwen3 gate_up          {500 / floor:8.2f} ")
    assert last == f"uniform: {500 / floor:.3f} of the floor"


@pytest.mark.parametrize(
    "path", sorted((TUNE / "timings").glob("*.json")), ids=lambda path: path.name
)
def test_tables_in_use_fit_their_timings(path):
    measured = files.load(path)
    found = fit.fitted(table_of(measured.arch), measured)
    known = [f.loss for f in found if f.loss is not None]
    assert len(known) > 0.95 * len(found)
    assert math.exp(sum(map(math.log, known)) / len(known)) < 1.1


@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
@pytest.mark.parametrize("part", sweep.PARTS)
def test_what_a_sweep_times(part):
    """All kernels that may be the fastest, and what is chosen; rows come as kernels read them."""
    task = sweep.Task(sweep.Layer("small", 32, 4, 512, 256), part, "w16x64")
    product, order = task.product()
    names = [("activations", "codes", "block_scale", "decode_scale", "ends")[i] for i in order]
    assert [v.type.dtype for v in product.fusion.inputs] == [
        {
            "activations": "bf16",
            "codes": "u8",
            "block_scale": "f8e4m3",
            "decode_scale": "f32",
            "ends": "i32",
        }[name]
        for name in names
    ]
    assert product.matrices.block == (2 if part == "gate_up" else 1)
    for tokens in (1, 64, 4096):
        rows = tokens * 4
        ways = sweep.ways(table_of(H200), product.matrices, rows, H200)
        assert ways[0] == choose_from(table_of(H200), rows, product.matrices, H200)
        assert len({way(w) for w in ways}) == len(ways) > 1 or tokens == 4096
        for classes in ways:
            assert all(c.variant.fits(product.matrices, H200) for c in classes)
            made = Launch(sweep.Forced(product, classes)).choose(
                {product.fusion.symbols[0]: rows}, H200
            )
            assert [kernel.name for kernel in made.kernels] == [c.variant.name for c in classes]


def test_a_regime_that_begins_after_the_last_is_not_moved():
    """Those at the end are for GPUs without wgmma."""
    found = fit.fit(table_of(H200), timings())
    assert found.tiled[-2:] == table_of(H200).tiled[-2:]
    assert isinstance(found.tiled[0], Regime)


# Products of one group ----------------------------------------------------------------------------


def of_one_group(constants: one_group.Constants) -> Timings:
    """What such a model says of a few matrices."""
    cells = []
    for tiles, k in ((32, 2048), (256, 4096), (512, 8192)):
        of = Matrices(1, k, tiles, 1, 576, True)
        for rows in (1, 12, 48, 130, 700):
            us = {
                v.name: one_group.microseconds(v, rows, of, H200, constants)
                for v in one_group.VARIANTS
                if v.fits(of, H200)
            }
            cells.append(Cell("made up", of, rows, rows, "uniform", us))
    return Timings(H200, {"device": "none"}, tuple(cells))


def test_a_model_is_fitted_to_times():
    pytest.importorskip("scipy")
    used = one_group.constants()
    measured = of_one_group(
        replace(used, stage=2 * used.stage, wait=1.5 * used.wait, exchange=3 * used.exchange)
    )
    found = of_one_group(model.fit([measured]))
    for want, got in zip(measured.cells, found.cells, strict=True):
        assert min(got.us.values()) == pytest.approx(min(want.us.values()), rel=0.05)


def test_the_model_chooses_what_was_measured_to_be_fast():
    for name in ("h200.json", "h100.json"):
        measured = files.load(TUNE / "timings" / name)
        cells = tuple(cell for cell in measured.cells if one_group.admits(cell.matrices))
        known = [
            loss for loss in losses(table_of(measured.arch), replace(measured, cells=cells)) if loss
        ]
        assert len(known) > 500
        assert math.exp(np.mean(np.log(known))) < 1.01
        assert max(known) < 1.2


def test_a_table_is_not_fitted_to_products_of_one_group():
    assert fit.fit(table_of(H200), of_one_group(one_group.constants())) == table_of(H200)


# Predicted times ----------------------------------------------------------------------------------


def measured_on(arch, every: int = 16) -> Timings:
    found = files.load(TUNE / "timings" / path_of(arch).name)
    return replace(found, cells=found.cells[::every])


def test_a_gpu_predicts_itself():
    h200 = measured_on(H200)
    of_itself = predict.predicted(h200, H200)
    for cell, same in zip(h200.cells, of_itself.cells, strict=True):
        ratios = [us / cell.us[name] for name, us in same.us.items()]
        assert min(ratios) > 0.999
        assert max(ratios) < 1.15  # that of heavy groups alone is below its floor by even groups


def test_times_follow_bandwidth_where_memory_counts_and_multiprocessors_where_work_does():
    h200 = measured_on(H200)

    def reading(cell):
        return predict._memory(cell, H200) / cell.us[cell.best]

    few, many = max(h200.cells, key=reading), max(h200.cells, key=lambda cell: cell.average)
    slow = replace(H200, memory_bandwidth=H200.memory_bandwidth / 4)
    small = replace(H200, multiprocessors=33, tensor_rate=H200.tensor_rate / 4)
    for cell, follows, other in ((few, slow, small), (many, small, slow)):
        at, us = h200.cells.index(cell), cell.us[cell.best]
        times = [predict.predicted(h200, gpu).cells[at].us[cell.best] for gpu in (follows, other)]
        assert times[0] > 2.5 * us
        assert times[1] < 2.5 * us


def test_gpus_that_were_timed_say_how_good_predictions_are():
    found = predict.quality(measured_on(H100), measured_on(H200))
    low, middle, high = found.errors
    assert 0.85 < low < middle < high < 1.15
    assert abs(middle - 1) < 0.05
    assert max(found.losses) < 1.1
    assert str(found).startswith("H100 by H200: predicted times are 0.")


def test_tables_of_gpus_without_wgmma_are_the_predicted_ones():
    measured = files.load(TUNE / "timings" / path_of(H200).name)
    assert fit.text(predict.table(measured, L4)) == path_of(L4).read_text(encoding="utf-8")
