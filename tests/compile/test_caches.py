"""Inductor's and AOTAutograd's caches are hit from process to process, and never serve what other
translators, options or sources made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_moe import options, translator
from fusion_moe.definitions import translate
from fusion_moe.frontends.inductor.fusion_pass import FusionPass

HERE = Path(__file__).parent
USER = """
from fusion_moe import translator

@translator("test_caches::scale", version="{version}")
def scale(fd, x):
    return fd.ops.mul(x, {version})
"""


def _install_metadata(folder: Path) -> None:
    """What an installed copy says, so that torch.compile finds the backend by its name."""
    (group,) = re.findall(
        r"\[project.entry-points.torch_dynamo_backends\]\n(.+?)\n\n",
        (HERE.parents[1] / "pyproject.toml").read_text(),
        re.DOTALL,
    )
    info = folder / "fusion_moe-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fusion_moe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\n" + group.replace('"', ""))


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """process("as before", ..., version=2) -> the caches' answers in a new process; version: of a
    user's translator.
    """
    folder = tmp_path_factory.mktemp("caches")
    root = HERE.parents[1]

    def run(*situations: str, version: int = 2, **environment: str) -> dict[str, dict]:
        (folder / "user_translator.py").write_text(USER.format(version=version))
        _install_metadata(folder)
        path = os.pathsep.join(map(str, (folder, HERE.parent, root, root / "translators")))
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            **environment,
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "cache_process.py"), *situations],
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout.splitlines()[-1])
        assert all(r["right"] for r in results.values())
        return {name: {"fx": r["fx"], "aot": r["aot"]} for name, r in results.items()}

    return run


MISS, HIT = {"fx": False, "aot": False}, {"fx": True, "aot": True}


@pytest.mark.slow
@pytest.mark.compiler
def test_caches_are_hit_from_process_to_process_and_only_by_the_same(process):
    assert process("as before", PYTHONHASHSEED="1") == {"as before": MISS}
    changed = ("other sources", "another translator", "other options in force")
    assert process("as before", *changed, "other options given", PYTHONHASHSEED="2") == {
        "as before": HIT,
        **dict.fromkeys(changed, MISS),
        "other options given": HIT,  # the options are the key, wherever they come from
    }
    assert process("as before", version=3) == {"as before": MISS}
    assert process("as before", version=2, PYTHONOPTIMIZE="0") == {"as before": HIT}


def test_a_translator_without_a_version_turns_caching_off_and_says_so(caplog):
    caplog.set_level("INFO", "fusion_moe")
    before = FusionPass(options.current()).uuid()
    assert before is not None
    uuids = {}
    for version in ("", "1", "2"):
        translator("test_caches::scale", version=version)(lambda fd, x: fd.ops.mul(x, 2.5))
        try:
            uuids[version] = FusionPass(options.current()).uuid()
        finally:
            translate.unregister("test_caches::scale")
    assert uuids[""] is None
    assert len({before, uuids["1"], uuids["2"]}) == 3
    assert [r.getMessage() for r in caplog.records if "test_caches::scale" in r.getMessage()] == [
        "compiled code is not cached: the translator of test_caches::scale has no version; pass "
        "one to fusion_moe.translator"
    ]
    assert FusionPass(options.current()).uuid() == before
