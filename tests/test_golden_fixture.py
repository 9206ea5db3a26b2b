"""The golden fixture of conftest.py: missing, changed, updated and stale texts, in one process and
in two.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

# before a pytester does and forgets it again: torch cannot be imported twice in one process
import torch

pytest_plugins = ["pytester"]

CONFTEST, IMPORTED, COVER = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("conftest.py", "precompiled.py", "cover.py")
)
TWO_TESTS = textwrap.dedent("""
    import pytest

    def test_plain(golden):
        golden("one\\ntwo")
        golden("three", name="other")

    @pytest.mark.parametrize("x", ["a/b"])
    class TestClass:
        def test_method(self, golden, x):
            golden(x)
""")
MARKED = textwrap.dedent("""
    import pytest

    @pytest.mark.gpu
    def test_gpu():
        raise AssertionError

    @pytest.mark.judges("no_such_judge")
    def test_judge():
        raise AssertionError
""")
GOLDENS = {
    "test_plain.txt": "one\ntwo\n",
    "test_plain.other.txt": "three\n",
    "TestClass.test_method[a-b].txt": "a/b\n",
}


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with our conftest.py and two tests in tests/sub/test_inside.py that read three
    goldens.
    """
    pytester.makeini("[pytest]\ntestpaths = tests\nmarkers =\n    gpu\n    judges")
    write(pytester, "tests/conftest.py", CONFTEST)
    write(pytester, "tests/precompiled.py", IMPORTED)
    write(pytester, "tests/cover.py", COVER)
    write(pytester, "tests/sub/test_inside.py", TWO_TESTS)
    for name, text in GOLDENS.items():
        write(pytester, f"tests/golden/sub/test_inside/{name}", text)
    return pytester


def write(project: pytest.Pytester, path: str, text: str) -> Path:
    file = project.path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_missing_goldens_fail_and_say_how_to_accept_them(project):
    """With a command that is quoted for the shell, and what differs."""
    folder = project.path / "tests/golden/sub/test_inside"
    (folder / "test_plain.txt").unlink()
    (folder / "TestClass.test_method[a-b].txt").write_text("a\nb\n")
    result = project.runpytest()
    result.assert_outcomes(failed=2)
    said = result.stdout.str()
    assert "tests/golden/sub/test_inside/test_plain.txt (missing)" in said
    assert "\n+one\n+two\n" in said
    assert "pytest --update-golden tests/sub/test_inside.py::test_plain\n" in said
    assert "\n-a\n-b\n+a/b\n" in said
    assert "--update-golden 'tests/sub/test_inside.py::TestClass::test_method[a/b]'" in said


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_update_writes_missing_and_changed_and_removes_stale(workers, project):
    folder = project.path / "tests/golden/sub/test_inside"
    (folder / "test_plain.other.txt").unlink()
    write(project, "tests/golden/sub/test_inside/test_plain.txt", "old\n")
    write(project, "tests/golden/sub/test_inside/test_gone.txt", "old\n")
    assert project.runpytest(*workers, "--all", "--update-golden").ret == 0
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == GOLDENS


def test_stale_golden_fails_a_run_of_all_tests(project):
    write(project, "tests/golden/sub/test_inside/test_plain.gone.txt", "old\n")
    assert project.runpytest().ret == 0  # which may leave out what reads it
    result = project.runpytest("--all")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*stale goldens*", "tests/golden/sub/test_inside/test_plain.gone.txt"]
    )


@pytest.mark.parametrize(
    "narrowed",
    [
        ("-k", "plain"),
        ("tests/sub/test_inside.py",),
        ("--deselect", "tests/sub/test_inside.py::test_plain"),
    ],
)
def test_stale_golden_does_not_fail_a_run_of_some_tests(project, narrowed):
    write(project, "tests/golden/sub/test_inside/test_gone.txt", "old\n")
    assert project.runpytest("--all", *narrowed).ret == 0


def test_skipped_tests_and_files_keep_their_goldens(project):
    write(
        project,
        "tests/test_one.py",
        "import pytest\n@pytest.mark.skip(reason='here')\ndef test_it(golden): golden('x')\n",
    )
    write(
        project,
        "tests/test_all.py",
        "import pytest\npytest.skip('here', allow_module_level=True)\n",
    )
    for file in "test_one", "test_all":
        write(project, f"tests/golden/{file}/test_it.txt", "x\n")
        write(project, f"tests/golden/{file}/test_it.more.txt", "x\n")
    result = project.runpytest("--all")
    assert result.ret == 0, result.stdout.str()


def test_the_same_name_twice_is_an_error(project):
    write(
        project, "tests/test_twice.py", "def test_it(golden):\n    golden('a')\n    golden('b')\n"
    )
    write(project, "tests/golden/test_twice/test_it.txt", "a\n")
    project.runpytest("tests/test_twice.py").stdout.fnmatch_lines(["*twice in one test*"])


def test_gpu_and_judges_are_skipped_with_a_reason(project, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write(project, "tests/test_marks.py", MARKED)
    result = project.runpytest_inprocess("-rs", "tests/test_marks.py")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*no_such_judge is not installed*"])
    result.stdout.fnmatch_lines(["*needs a CUDA GPU*"])
