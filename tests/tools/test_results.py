"""Pages of benchmarks/results/ that scripts write, and which pages and scripts docs/ names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path += [
    str(Path(__file__).resolve().parents[2] / d) for d in ("benchmarks", "tools/engines_gpu")
]

import cpu_moe_page
import h200_page
import page as serving_page
import results

REPO = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(p.relative_to(REPO).as_posix() for p in REPO.glob("docs/**/*.md"))]


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Where pages go; nothing is drawn."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(h200_page, "RESULTS", tmp_path)
    for module in (h200_page, cpu_moe_page):
        monkeypatch.setattr(module, "draw", lambda *_: None)
    return tmp_path


def cell(card: str, us: float = 5.0) -> dict[str, Any]:
    ours = {"us": us, "error": 1e-3, "spread": 0.01}
    return {
        "model": "qwen3",
        "part": "mlp",
        "tokens": 1,
        "routing": "uniform",
        "floor_us": 4.0,
        "provenance": {"date": "D", "card": f"NVIDIA {card} of some kind"},
        "contenders": {"fusion_moe": ours, "torch": {"us": 10.0, "error": 1e-3, "spread": 0.01}},
    }


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_scripts_that_there_are(page):
    text = (REPO / page).read_text(encoding="utf-8")
    for script in re.findall(r"benchmarks/\w+\.py", text):
        assert (REPO / script).exists(), script


def test_each_card_has_its_page(written):
    file = h200_page.page([cell("H200"), {**cell("H200", us=20.0), "tokens": 3}])
    assert file == written / "cells_h200.md"
    text = file.read_text()
    assert "2 cells: fusion_moe is 1.00x as fast" in text
    assert "slower by more than 3%: Qwen3-30B-A3B mlp 3." in text
    assert "| model | 1 |" in text
    assert "| Qwen3-30B-A3B | 5.0, 2.00x |" in text
    assert "| Qwen3-30B-A3B | mlp | 3 | 4.0 | 20.0 |  |  | 10.0 |  |" in text
    h200_page.page([cell("B200", us=7.0)])
    assert "| Qwen3-30B-A3B | 7.0, 1.43x |" in (written / "cells_b200.md").read_text()


def test_a_wrong_result_has_no_time(written):
    wrong = cell("H200")
    wrong["contenders"]["fusion_moe"]["error"] = 1.0
    text = h200_page.page([wrong]).read_text()
    assert "Nothing to compare with was measured." in text
    assert "| Qwen3-30B-A3B | mlp | 1 | 4.0 |  |  |  | 10.0 |  |" in text


def test_cells_with_fp8_have_a_page(written):
    (written / "quality_fp8.md").write_text("# A\n\nWritten.\n\nTold.\n\n| rows | +0.01 % |\n")
    row = cell("H100", us=8.0) | {"model": "minimax", "tokens": 512, "routing": "zipf"}
    row["contenders"] |= {
        "fp8": {"us": 6.0, "error": 0.05},
        "both": {"us": 6.1, "error": 0.05},
        "vllm": {"us": 5.9, "error": 0.05},
        "humming w4a8 grouped": {"us": 3.0, "error": 0.3},  # which is none
        "dense fp8": {"us": 5.0},
    }
    file = h200_page.fp8_page([row])
    assert file == written / "fp8_h100.md"
    text = file.read_text()
    assert "| MiniMax-M2 (zipf) | 6.0, 0.75 |" in text
    assert "| MiniMax-M2 (zipf) | 512 | 8.0 | 6.0 | 6.1 |  |  |  | 5.9 |  |  |  | 5.0 |" in text
    assert "1 cells with peers; one is faster than all of ours in: MiniMax-M2 (zipf) 512." in text
    assert text.endswith("Told.\n\n| rows | +0.01 % |\n")


def result(threads: int, peer: str) -> dict[str, Any]:
    rows = [
        {"name": name, "of": "nvfp4", "error": 0.01, "seconds": {"1": [1e-3, 2e-3, 3e-3]}}
        for name in ("reading", "fusion_moe, nvfp4", peer)
    ]
    return {
        "model": "small",
        "note": "",
        "threads": threads,
        "others": "none",
        "missing": ["other, b"],
        "peers": {peer.split(",")[0]: "1 (x)"},
        "rows": rows,
    }


def test_layers_on_a_cpu_of_several_files(written):
    machine = {"cpu": "C", "cores": 2, "tier": "amx"}
    files = [
        {"machine": machine, "results": [result(1, "kt, a"), result(2, "kt, a")]},
        {"machine": machine, "results": [result(1, "other, b")]},
    ]
    file = cpu_moe_page.page(files)
    assert file == written / "layers_amx.md"
    first, second = file.read_text().split("small, 2 threads")
    assert "small, 1 threads; none; kt 1 (x); other 1 (x):" in first
    line = "0.01 | 2 1.00x (100%) |"
    assert f"| kt, a | {line}\n| other, b | {line}" in first
    assert "not built" not in first
    assert "| other, b | not built for this CPU, or these sizes |  |" in second
    beside = cpu_moe_page.beside("kt", cpu_moe_page.merged(files)).splitlines()
    assert beside[2] == "| small, 1 | a | 0.01 / 0.01 | 2, 1.00x | 100% |"
    files[1]["machine"] = machine | {"cpu": "D"}
    with pytest.raises(ValueError, match="files of 2 machines"):
        cpu_moe_page.page(files)


def test_the_page_of_serving(written):
    """Times as fast as the fastest of the others; what differs in numbers."""

    def engine(ms: float, logprob: float) -> dict[str, Any]:
        kernels = {"small_m_1x1": 500 * ms, "topkGating": 9.0, "void humming<A>": 100.0}
        times = {"ms": [ms, ms, 9.0], "gpu_us": 1e3 * ms, "kernels": kernels}
        return {
            "gpu": "a GPU",
            "start_s": 60.0,
            "reserved_gib": 3.0,
            "decode": {"1": times, "8": times},
            "prefill": times,
            "lengths": {"longest_extra_ms": 12.0, "longest_ratio": 1.25},
            "numbers": [{"tokens": [1, 2], "logprobs": [logprob]}],
        }

    kinds = {"fusion_moe": engine(2.0, -1.0), "vllm": engine(3.0, -1.5), "marlin": engine(4.0, -1)}
    kinds["adapters"] = (slow := engine(2.5, -1.0)) | {"adapted": slow["decode"]}
    soaked = {"seconds": 9.0, "clients": 64, "malformed": {"refused with 400": 3}, "answers": 5}
    soaked |= {"apart": [0.03] * 999, "most apart": 0.1, "grown_mib": [0, 1]}
    soaked |= {"restart_s": 70.0, "apart after a restart": 0.0}
    servers = {"nvfp4": {"fusion_moe": {"start_s": 60.0, "soak": soaked}}}
    kinds["died"] = {"gpu": "a GPU", "decode": {"1": {"ms": [1.0]}}}
    plain = {"numbers": [{"logprobs": [-1.0, -2.0]}], "start_s": 3.0}
    drafts = {"numbers": [{"logprobs": [-1.0, -2.25]}], "drafts, taken": [9, 4]}
    cases = {"plain": plain, "mtp": drafts, "tensorizer": {"failed": "exit status 1"}}
    record = {"versions": {"vllm": "0.32.0"}, "engines": {"nvfp4": kinds}, "servers": servers}
    record |= {"cases": {"glm": cases}}
    serving_page.page(record)
    text = (written / "serving.md").read_text()
    assert "| ratio by the GPU | 1.50x | 1.50x | 1.50x |" in text
    assert "died" not in text
    assert "| mtp | 0.2500 | drafts, taken: [9, 4] |" in text
    assert "| tensorizer |  | failed: exit status 1 |" in text
    assert "| fusion_moe, ms by the GPU, experts alone | 1.1 | 1.1 | 1.1 |" in text
    assert "| adapters, in all requests, ms by the clock | 2.5 | 2.5 |  |" in text
    assert "| 60 | 3.00 | 12 | 1.25x |" in text
    assert "Malformed: 3 refused with 400. Memory grew by 0 MiB on the GPU, 1 on the host." in text
    assert "with vllm by 0.5000 on average, 0.500 at most; the same 24 tokens for 1 of 1" in text
