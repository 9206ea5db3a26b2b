"""Inductor's and AOTAutograd's caches are hit from process to process, and never serve what other
translators, options or sources made; hits are reported and logged like misses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fusion_moe import options, translator
from fusion_moe.definitions import digest, translate
from fusion_moe.frontends.inductor import fusion_pass
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.ops import grouped_mm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def process(
    folder: Path, trace: str, *others: str, **environment: str
) -> tuple[dict[str, Any], str, int]:
    """The caches' answers in a new process, what it reports, and how many artifacts it logs."""
    path = os.pathsep.join(map(str, (folder, HERE.parent, ROOT, ROOT / "translators")))
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCH_TRACE": str(folder / trace),
        **environment,
    }
    command = [sys.executable, str(HERE / "cache_process.py"), *others]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logged = "".join(p.read_text() for p in (folder / trace).iterdir())
    hits, report = json.loads(done.stdout.splitlines()[-1])
    return hits, report, logged.count('"name": "fusion_moe_fusions"')


@pytest.mark.slow
@pytest.mark.compiler
def test_caches_are_hit_from_process_to_process_and_only_by_the_same(tmp_path):
    # what an installed copy says, so that torch.compile finds the backend by its name
    (group,) = re.findall(
        r"\[project.entry-points.torch_dynamo_backends\]\n(.+?)\n\n",
        (ROOT / "pyproject.toml").read_text(),
        re.DOTALL,
    )
    info = tmp_path / "fusion_moe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fusion_moe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\n" + group.replace('"', ""))
    missed, told, logged = process(tmp_path, "first", PYTHONHASHSEED="1")
    assert missed == {"as before": [False, False]}
    other = "cache_process::never"
    hit, told_again, logged_again = process(tmp_path, "again", other, PYTHONHASHSEED="2")
    assert hit == {"as before": [True, True], other: [False, False]}
    assert told == told_again
    assert "1 graph, 1 fusion with 2 segments for cpu" in told
    assert (logged, logged_again) == (2, 3)  # each of a forward; a miss also of its backward


def uuid() -> Any:
    return FusionPass(options.current()).uuid()


def test_what_is_compiled_depends_on_translators_options_and_sources(caplog, monkeypatch):
    """A translator without a version turns caching off and says so."""
    caplog.set_level("INFO", "fusion_moe")
    before = uuid()
    assert before is not None
    uuids = {}
    for version in ("", "1", "2"):
        translator("test_caches::scale", version=version)(lambda fd, x: fd.ops.mul(x, 2.5))
        try:
            uuids[version] = uuid()
        finally:
            translate.unregister("test_caches::scale")
    assert uuids[""] is None
    with options.override(contract_rounding=False):
        uuids["options"] = uuid()
        # the options are the key, wherever they come from
        assert uuids["options"] == FusionPass(options.current()).uuid()
    assert uuid() == before
    monkeypatch.setattr(fusion_pass, "library_digest", lambda: "other")
    uuids["sources"] = uuid()
    assert len({before, *uuids.values()}) == 6
    assert [r.getMessage() for r in caplog.records if "test_caches::scale" in r.getMessage()] == [
        "compiled code is not cached: the translator of test_caches::scale has no version; pass "
        "one to fusion_moe.translator"
    ]


@pytest.mark.compiler
def test_other_backends_compile_again_for_other_sources(monkeypatch):
    """Code from caches would call operations as they were, and derivatives."""
    ends = torch.tensor([3], dtype=torch.int32)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(x, [w], ends, weight_format="bf16").relu()

    def misses() -> int:
        torch._dynamo.reset()
        counters.clear()
        x, w = (t.bfloat16().requires_grad_() for t in (torch.randn(3, 16), torch.randn(1, 8, 16)))
        torch.compile(f, backend="inductor")(x, w).sum().backward()
        return counters["aot_autograd"]["autograd_cache_miss"]

    with torch._inductor.utils.fresh_cache():
        assert [misses(), misses()] == [1, 0]
        monkeypatch.setattr(digest, "library_digest", lambda: "other")
        digest.tag_caches.cache_clear()
        with torch.compiler.config.patch(cache_key_tag=""):
            assert [misses(), misses()] == [1, 0]
            assert torch.compiler.config.cache_key_tag == " fusion_moe other"
