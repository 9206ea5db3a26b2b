"""Inductor's and AOTAutograd's caches are hit from process to process, and never serve what other
translators, options or sources made.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from fusion_moe import options, translator
from fusion_moe.definitions import translate
from fusion_moe.frontends import fingerprint
from fusion_moe.frontends.inductor.fusion_pass import FusionPass

HERE = Path(__file__).parent
USERS = {
    "user_translator.py": """
from fusion_moe import translator
from user_helper import helper

@translator("test_caches::scale")
def scale(fd, x):
    return helper(fd, x)
""",
    "user_helper.py": """
def helper(fd, x):
    return fd.ops.mul(x, {factor})
""",
}


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
    """process("as before", ..., factor=2) -> the caches' answers in a new process; `factor` is in
    what a user's translator calls.
    """
    folder = tmp_path_factory.mktemp("caches")
    root = HERE.parents[1]

    def run(*situations: str, factor: int = 2, **environment: str) -> dict[str, dict]:
        for name, source in USERS.items():
            (folder / name).write_text(source.format(factor=factor))
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
    assert process("as before", factor=3) == {"as before": MISS}  # what a user's translator calls
    assert process("as before", factor=2, PYTHONOPTIMIZE="0") == {"as before": HIT}


# ------------------------------------------------------------------------------------- fingerprints


def built(source: str, name: str = "f", **names) -> types.FunctionType:
    """A function as a notebook has it: without a file."""
    scope = {"__name__": "a_notebook", **names}
    exec(compile(source, "<cell 1>", "exec"), scope)
    return scope[name]


SOURCE = "def f(fd, x):\n    return fd.ops.mul(x, 2.5)"


def test_lines_and_files_do_not_matter():
    moved = built("\n\n\n# a comment\n" + SOURCE)
    assert fingerprint.of_function(built(SOURCE)) == fingerprint.of_function(moved)
    assert (
        moved.__code__ != built(SOURCE).__code__
        or moved.__code__.co_firstlineno != built(SOURCE).__code__.co_firstlineno
    )


@pytest.mark.parametrize(
    "other",
    [
        SOURCE.replace("2.5", "2.25"),
        SOURCE.replace("mul", "add"),
        SOURCE.replace("x)", "x, y=3)"),
        SOURCE.replace("x, 2.5", "x, factor"),
        SOURCE.replace("    return", "    x = x\n    return"),
    ],
)
def test_other_code_has_another_fingerprint(other):
    assert fingerprint.of_function(built(SOURCE)) != fingerprint.of_function(
        built(other, factor=2.5)
    )


def test_what_a_function_closes_over_and_reads_counts():
    closing = (
        "def make(factor):\n    def f(fd, x):\n        return fd.ops.mul(x, factor)\n    return f"
    )
    make = built(closing, "make")
    assert fingerprint.of_function(make(2)) == fingerprint.of_function(make(2))
    assert fingerprint.of_function(make(2)) != fingerprint.of_function(make(3))
    reading = SOURCE.replace("2.5", "FACTOR")
    assert fingerprint.of_function(built(reading, FACTOR=2)) != fingerprint.of_function(
        built(reading, FACTOR=3)
    )
    helped = "def g(x):\n    return {}\ndef f(fd, x):\n    return g(x)"
    assert fingerprint.of_function(built(helped.format(1))) != fingerprint.of_function(
        built(helped.format(2))
    )
    recursive = "def f(fd, x):\n    return f(fd, x)"
    digest = fingerprint.of_function(built(recursive))
    assert digest is not None
    assert digest == fingerprint.of_function(built(recursive))
    endless: list = []
    endless.append(endless)
    assert unknown(make(endless)) == "values that contain themselves"


def unknown(function) -> str:
    with pytest.raises(fingerprint.NoFingerprint) as error:
        fingerprint.of_function(function)
    return str(error.value)


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """imported(name, source) -> the module that a file contains. Called again with other source,
    the module that is loaded again.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = set()

    def load(name: str, source: str):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        made.add(name)
        return (
            importlib.reload(sys.modules[name])
            if name in sys.modules
            else importlib.import_module(name)
        )

    yield load
    for name in made:
        sys.modules.pop(name, None)


TRANSLATORS = [
    "import helpers_of_a_user\ndef f(fd, x):\n    return helpers_of_a_user.scale(fd, x)",
    "from helpers_of_a_user import scale\ndef f(fd, x):\n    return scale(fd, x)",
    "from helpers_of_a_user import Scale\ndef f(fd, x):\n    return Scale.by(fd, x)",
    "import functools, helpers_of_a_user\nf = functools.partial(helpers_of_a_user.scale)",
    "from helpers_of_a_user import TABLE\ndef f(fd, x):\n    return TABLE['scale'](fd, x)",
]
HELPERS = """
import functools
FACTOR = 2.0

@functools.cache
def factor():
    return FACTOR

def scale(fd, x):
    return fd.ops.mul(x, factor())

class Scale:
    @staticmethod
    def by(fd, x):
        return scale(fd, x)

TABLE = {"scale": scale}
"""


@pytest.mark.parametrize("source", TRANSLATORS)
def test_what_a_translator_calls_in_another_module_counts(source, imported):
    helpers = imported("helpers_of_a_user", HELPERS)
    first = fingerprint.of_function(imported("translators_of_a_user", source).f)
    assert fingerprint.of_function(imported("translators_of_a_user", source).f) == first
    helpers.FACTOR = 3.0  # the same source, another value
    other = fingerprint.of_function(imported("translators_of_a_user", source).f)
    imported("helpers_of_a_user", HELPERS.replace("mul", "add"))  # loaded again after an edit
    edited = fingerprint.of_function(imported("translators_of_a_user", source).f)
    assert len({first, other, edited}) == 3


def test_a_translator_with_a_file_counts_with_the_globals_that_it_reads(imported):
    module = imported("translators_of_a_user", "FACTOR = 2.0\n" + SOURCE.replace("2.5", "FACTOR"))
    first = fingerprint.of_function(module.f)
    module.FACTOR = 3.0
    assert fingerprint.of_function(module.f) != first


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import os\ndef f(fd, x):\n    return fd.ops.mul(x, float(os.environ['K']))",
            "os: the module os",
        ),
        (
            "from os import getenv\ndef f(fd, x):\n    return fd.ops.mul(x, float(getenv('K')))",
            "getenv: the module os",
        ),
        (
            "def f(fd, x):\n    return fd.ops.mul(x, float(open('K').read()))",
            f"open: the module {open.__module__}",
        ),
        ("def f(fd, x):\n    return fd.ops.mul(x, globals()['K'])", "what globals() finds"),
        (
            "def f(fd, x):\n    from helpers import K\n    return fd.ops.mul(x, K)",
            "an import inside of f",
        ),
    ],
)
def test_what_no_digest_can_follow_has_no_fingerprint(source, why):
    assert unknown(built(source)) == why


def test_a_decorated_translator_is_what_it_wraps():
    def decorated(f):
        @functools.wraps(f)
        def wrapper(*args):
            return f(*args)

        return wrapper

    same, other = (decorated(built(source)) for source in (SOURCE, SOURCE.replace("2.5", "2.25")))
    assert fingerprint.of_function(same) == fingerprint.of_function(decorated(built(SOURCE)))
    assert fingerprint.of_function(same) != fingerprint.of_function(other)


def test_code_of_torch_is_told_by_its_name():
    closing = "def make(op):\n    def f(fd, x):\n        return op(x)\n    return f"
    make = built(closing, "make")
    start = time.perf_counter()
    digests = {
        fingerprint.of_function(make(op))
        for op in (torch.nn.functional.silu, torch.nn.functional.gelu, torch.nn.functional.relu)
    }
    assert len(digests) == 3
    assert time.perf_counter() - start < 0.5


def test_sets_and_nested_code_are_told_in_one_order():
    """the order of a set of strings differs from process to process"""
    source = (
        "def f(fd, x):\n    return [fd.ops.mul(y, 2) for y in x if y in {'a', 'b', 'c', 'd', 'e'}]"
    )
    code = (
        f"scope = {{'__name__': 'n'}}\nexec({source!r}, "
        "scope)\nprint(fingerprint.of_function(scope['f']))"
    )
    code = f"from fusion_moe.frontends import fingerprint\n{code}"
    root = HERE.parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "translators")))}
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**env, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert next(iter(digests)).strip() not in ("", "None")


def test_a_value_without_a_fingerprint_turns_caching_off_and_says_so(caplog):
    state = object()
    assert unknown(built(SOURCE.replace("2.5", "state"), state=state)) == (
        "state: a value of type builtins.object"
    )
    translator("test_caches::opaque")(built(SOURCE.replace("2.5", "state"), state=state))
    try:
        assert FusionPass(options.current()).uuid() is None
        assert FusionPass(options.current()).uuid() is None
    finally:
        translate.unregister("test_caches::opaque")
    assert [r.getMessage() for r in caplog.records if "test_caches::opaque" in r.getMessage()] == [
        "compiled code is not cached: the translator of test_caches::opaque depends on what has "
        "no fingerprint, "
        "state: a value of type builtins.object"
    ]
    assert FusionPass(options.current()).uuid() is not None


def test_all_translators_that_come_with_the_library_have_fingerprints():
    assert all(fingerprint.of_function(t.function) for t in translate.registered())
