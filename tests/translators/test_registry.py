"""Finding translators: those of installed packages, through their entry points, and what becomes of
a package that fails.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from fusion_moe import translator
from fusion_moe.definitions import translate
from fusion_moe.errors import TranslatorError

TWICE = """
import fusion_moe

@fusion_moe.translator("their_lib::twice")
def twice(fd, x):
    return fd.ops.add(x, x)
"""
REPLACE = """
import fusion_moe
from fusion_moe.definitions import translate
translate.unregister("aten::relu")
fusion_moe.translator("aten::relu")(lambda fd, x: fd.ops.relu(x))
print(translate.find("aten::relu").where)
print(translate.find("their_lib::twice").where, len(translate.registered()) > 50)
"""
CALL = """
import torch
import fusion_moe

with torch.library._scoped_library("their_lib", "DEF") as lib:
    lib.define("once(Tensor x) -> Tensor")
    lib.impl("once", lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("their_lib::once", torch.empty_like, lib=lib)
    weight = torch.ops.fusion_moe.nvfp4_quantize(torch.ones(2, 16, 16))
    x, ends = torch.ones(3, 16), torch.tensor([1, 3], dtype=torch.int32)

    def f(x):
        return torch.ops.their_lib.once(torch.ops.fusion_moe.nvfp4_grouped_mm(x, *weight, ends))

    with torch.no_grad():
        assert torch.compile(f, backend="fusion_moe")(x).equal(f(x))
        (left,) = fusion_moe.explain(f, x).not_fused
    print(left.op, left.why)
"""


@pytest.fixture
def run(tmp_path):
    """run(code, module): what code prints, and what it says on stderr, where a package has this
    module as its entry point.
    """

    def run(code: str, module: str) -> tuple[str, str]:
        (tmp_path / "their_translators.py").write_text(module, encoding="utf-8")
        about = tmp_path / "their_lib-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-lib\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "[fusion_moe.translators]\ntheirs = their_translators\n"
        )
        path = os.pathsep.join([str(tmp_path), *sys.path])
        env = os.environ | {"PYTHONPATH": path, "FUSION_MOE_TARGET": "reference"}
        script = tmp_path / "script.py"
        script.write_text(code, encoding="utf-8")
        done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    return run


def test_translators_of_an_installed_package_are_found_and_ours_may_be_replaced(run):
    """Also where nothing has been asked for yet."""
    assert run(REPLACE, TWICE)[0].splitlines() == ["script.py:5", "their_translators.py:4 True"]


@pytest.mark.slow
@pytest.mark.once
def test_a_package_that_fails_costs_its_own_translators_alone(run):
    """eager and compiled calls work; a warning, and explain where it misses a translator, name the
    package, the line and what to do. A second translator is the error of who comes second, also
    where ours have not been asked for yet.
    """
    found, warned = run(CALL, f"{TWICE}fusion_moe.translator('aten::exp')(twice)\n")
    error = "TranslatorError: their_translators.py:4: aten::exp already has a translator, at "
    why = (
        "their_translators.py:7: the entry point theirs = their_translators of their-lib "
        f"failed: {error}pointwise.py:"
    )
    assert found.startswith(f"their_lib.once.default it has no translator; {why}")
    assert found.endswith(
        "; expected a module of the group fusion_moe.translators that imports; "
        "fix or uninstall that package"
    )
    assert warned.count(why) == 1


def test_a_function_is_no_operation():
    with pytest.raises(TranslatorError, match="the function twice in place of an operation"):

        @translator
        def twice(fd, x):
            return fd.ops.add(x, x)


@pytest.mark.parametrize("name", ["twice", "::twice", "their_lib::", ""])
def test_a_name_that_is_none(name):
    with pytest.raises(
        TranslatorError,
        match=f"test_registry.py:.* '{name}' is not the name of "
        "an operation; expected namespace::name",
    ):
        translator(name)(lambda fd, x: x)


def test_the_default_overload_has_two_names():
    function = translator("their_lib::thrice.default")(lambda fd, x: x)
    try:
        assert translate.find("their_lib::thrice").function is function
        with pytest.raises(TranslatorError, match="their_lib::thrice already has a translator"):
            translator("their_lib::thrice")(function)
    finally:
        translate.unregister("their_lib::thrice.default")
    assert translate.find("their_lib::thrice") is None


class Twice:
    """A translator with a state."""

    def __call__(self, fd, x):
        return fd.ops.add(x, x)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (functools.partial(lambda fd, x, by: fd.ops.mul(x, by), by=2.0), "test_registry.py:"),
        (Twice(), "test_registry.py:"),
        (len, "<built-in function len>"),
    ],
    ids=["partial", "object", "built in"],
)
def test_a_translator_that_is_no_plain_function(function, where):
    translator("their_lib::any")(function)
    try:
        assert translate.find("their_lib::any").where.startswith(where)
    finally:
        translate.unregister("their_lib::any")
