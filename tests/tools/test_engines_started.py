"""tools/engines_gpu/started.py: what was compiled travels, and is found again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")
TOOLS = Path(__file__).parents[2] / "tools" / "engines_gpu"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("engines_started", TOOLS / "started.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_was_compiled_travels(started: ModuleType, tmp_path: Path) -> None:
    """But neither the library of the pretended GPU, nor what another Python would not load."""
    caches, pieces = tmp_path / "here" / "caches", tmp_path / "pieces"
    kept = ["fusion_moe/a.cubin", "jit/sm90a/name/build-1/deps-2/name.so", "triton/X/k.cubin"]
    left = ["fusion_moe/a.cubin.lock", "fusion_moe/pretended_gpu/1/libcuda.so.1"]
    for name in kept + left + ["triton/Y/__triton_launcher.so"]:
        (caches / name).parent.mkdir(parents=True, exist_ok=True)
        (caches / name).write_text(name)
    started.keep(caches, pieces)
    started.pack.unpack(pieces, tmp_path / "there")
    found = [p for p in (tmp_path / "there").rglob("*") if p.is_file()]
    assert sorted(str(p.relative_to(tmp_path / "there" / "caches")) for p in found) == kept
    assert {p.read_text() for p in found} == set(kept)


def test_modules_that_travelled_are_found_by_name(started: ModuleType, tmp_path: Path) -> None:
    """Whatever compilers and headers a machine has."""
    (added,) = started.pack.ENGINES["sglang"].appended.values()
    names: dict[str, object] = {}
    exec(added, names)
    key = names["compute_build_key"](object(), build_file="any")
    scope = tmp_path / "name" / f"build-{key}"
    assert names["find_prebuilt"](scope=scope, module_name="name") is None
    (scope / "deps-1").mkdir(parents=True)
    (scope / "deps-1" / "name.so").touch()
    assert names["find_prebuilt"](scope=scope, module_name="name") == scope / "deps-1" / "name.so"
