"""The public names: what `dir(fusion_moe)` shows, and what type checkers say of a user's script."""

from __future__ import annotations

import ast
import importlib.util
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cover import few

import fusion_moe

GOOD = """
import torch
import fusion_moe
from fusion_moe import FusionDefinition, NVFP4Config, errors, nn
from fusion_moe.distributed import PLANS, parallelize_
from fusion_moe.thunder import thunder_executors

model = torch.nn.Sequential(torch.nn.Linear(2, 2))
fusion_moe.quantize_(model, NVFP4Config())
layer = nn.GroupedLinear(4, 64, 32)
y: torch.Tensor = layer(torch.randn(8, 64), torch.tensor([2, 2, 2, 2]))
print(fusion_moe.explain(model, torch.zeros(1, 2)))
z: torch.Tensor = fusion_moe.ops.scaled_swiglu(torch.randn(2, 8), limit=7.0)
fd = FusionDefinition()
a = fd.define_tensor(shape=[-1, 64], dtype="f32")
halves = [fd.ops.cast(x, dtype="bf16") for x in (a, fd.ops.mul(a, 2.0))]
both = fd.ops.cat(halves, dim=0)
ends, row_of, slot_of = fd.ops.route(a, groups=fd.define_groups("g", 4))
fd.add_output(fd.ops.reshape(both, new_shape=(64, -1)))
"""

# a line with a mistake -> what checkers must quote
MISTAKES = {
    "fusion_moe.quantise_(model)": "quantise_",
    "fusion_moe.explian(model)": "explian",
    "fusion_moe.testing.check_translater": "check_translater",
    "from fusion_moe import NVFP4Confg": "NVFP4Confg",
    "from fusion_moe.distributed import parallelise_": "parallelise_",
    "fusion_moe.quantize_(torch.zeros(1))": "Tensor",
    "nn.GroupedLinear(4, 64)": "out_features",
    "errors.ShapError": "ShapError",
    "fusion_moe.ops.scaled_swiglu(torch.zeros(2, 8), 1.0)": "float",
    "fusion_moe.ops.fused_expert": "fused_expert",
    "fd.ops.cst(a)": "cst",
    "fd.ops.cast(a, dtyp='bf16')": "dtyp",
    "fd.ops.route(a)": "groups",
}

NO_NAMES = {"fusion_moe.translators", "fusion_moe.compare"}  # entry points, a schema
CHECKERS = {
    "pyright": ("pyright", "--pythonpath", sys.executable),
    "mypy": ("mypy", "--follow-imports=silent", "--no-error-summary", "--cache-dir"),
}


def static_names() -> dict[str, str]:
    """The lazy names that type checkers are shown, and the module of each."""
    tree = ast.parse(Path(fusion_moe.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_dir_shows_the_public_names_and_no_others():
    assert dir(fusion_moe) == sorted(fusion_moe.__all__)
    assert len(set(fusion_moe.__all__)) == len(fusion_moe.__all__)
    assert all(hasattr(fusion_moe, name) for name in fusion_moe.__all__)


def test_dynamo_and_inductor_are_imported_once_they_are_needed():
    """They take longer than torch and all of this library."""
    slow = "{'torch._dynamo', 'torch._inductor', 'transformers', 'thunder'} & sys.modules.keys()"
    code = (
        f"import sys, torch; of_torch = {slow}; import fusion_moe, fusion_moe.env; "
        f"print(sorted({slow} - of_torch))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_with_ours()
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_type_checkers_see_the_lazy_names():
    modules = {"testing": None, "compat": "integrations"}
    assert static_names() == {**modules, **fusion_moe._LAZY}
    assert static_names().keys() <= set(fusion_moe.__all__)


def test_short_names_of_integrations_are_the_same_modules():
    import fusion_moe.distributed.clip
    import fusion_moe.integrations.distributed as long
    import fusion_moe.lora.files
    import fusion_moe.nn.lora.files

    assert fusion_moe.nn.lora.files is fusion_moe.lora.files
    assert fusion_moe.nn.Adapter is fusion_moe.lora.Adapter
    import fusion_moe.nn.trained.linear
    import fusion_moe.training.linear

    assert fusion_moe.nn.trained.linear is fusion_moe.training.linear
    assert fusion_moe.distributed is sys.modules["fusion_moe.distributed"] is long
    assert sys.modules["fusion_moe.distributed.clip"] is long.clip
    assert long.__spec__.name == long.__name__ == "fusion_moe.integrations.distributed"
    assert "fusion_moe.integrations.distributed" not in _imported("import fusion_moe")
    with pytest.raises(ModuleNotFoundError, match="No module named 'fusion_moe.distribute'"):
        importlib.import_module("fusion_moe.distribute")
    with pytest.raises(ModuleNotFoundError, match="No module named 'fusion_moe.distributed.clips'"):
        importlib.import_module("fusion_moe.distributed.clips")


def _imported(code: str) -> list[str]:
    """What a process has imported that runs this code."""
    code = f"import sys; {code}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, text=True, env=_with_ours()).split()


def test_objects_pickled_by_short_names_are_those_of_the_long():
    from fusion_moe.integrations.distributed import clip_grad_norm_

    old = b"cfusion_moe.distributed.clip\nclip_grad_norm_\n."
    assert pickle.loads(old) is clip_grad_norm_


def test_what_messages_and_pages_name_is_there():
    pytest.importorskip("transformers")
    root = Path(fusion_moe.__file__).parents[1]
    files = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("fusion_moe/**/*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    name = re.compile(r"(?<![\w./])fusion_moe(?:\.[a-zA-Z]\w*)+(?![/\w])")  # no schema, x/1
    assert not {
        (file, one)
        for file, text in texts.items()
        for one in set(name.findall(text)) - NO_NAMES
        if not one.endswith((".NAME", ".py", ".svg", ".default")) and not _is_there(one)
    }


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def test_a_misspelled_name_is_an_error():
    with pytest.raises(
        AttributeError, match="module 'fusion_moe' has no attribute 'quantise_'"
    ) as caught:
        fusion_moe.quantise_  # noqa: B018
    # with these, Python suggests the name that was meant
    assert (caught.value.name, caught.value.obj) == ("quantise_", fusion_moe)


def check(checker: str, script: str, folder: Path) -> str:
    """What a type checker prints about a script."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: pip install -e '.[typing]'")
    if checker == "pyright" and not _pyright_starts():
        pytest.skip(
            "pyright does not start: it needs Node.js and, the first time, the npm registry"
        )
    (folder / "script.py").write_text(script, encoding="utf-8")
    cache = [str(folder / "cache")] if checker == "mypy" else []
    done = _run(*CHECKERS[checker], *cache, "script.py", cwd=folder)
    return done.stdout + done.stderr


@cache
def _pyright_starts() -> bool:
    try:
        return _run("pyright", "--version", timeout=60).returncode == 0
    except subprocess.TimeoutExpired:  # without a network npm tries for minutes
        return False


def _run(
    *command: str, cwd: Path | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=_with_ours(),
        timeout=timeout,
    )


def _with_ours() -> dict[str, str]:
    """The environment of a process that has these packages, and not others that are installed."""
    ours = {
        Path(fusion_moe.__file__).parents[1],
        Path(importlib.util.find_spec("fusion_moe_translators").origin).parents[1],
    }
    installed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = {
        "MYPYPATH": os.pathsep.join(map(str, ours)),
        "PYTHONPATH": os.pathsep.join([*map(str, ours), *filter(None, installed)]),
    }
    return {**os.environ, **paths}


@pytest.mark.slow
@pytest.mark.parametrize("checker", few(CHECKERS))
def test_checkers_accept_a_script_and_report_each_mistake(checker, tmp_path):
    good = GOOD + "".join(f"fusion_moe.{name}\n" for name in fusion_moe.__all__)
    said = check(checker, good + "\n".join(MISTAKES), tmp_path).splitlines()
    lines = dict(enumerate(MISTAKES.items(), good.count("\n") + 1))
    for line, (mistake, quoted) in lines.items():
        about = [text for text in said if f"script.py:{line}:" in text]
        assert any(quoted in text for text in about), f"{mistake}\n{said}"
    assert {
        int(text.partition("script.py:")[2].partition(":")[0]) for text in said if "error:" in text
    } == set(lines)
