"""What all tests share: golden texts, hypothesis profiles, and who is skipped where."""

from __future__ import annotations

import difflib
import gc
import importlib.util
import logging
import os
import re
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from cover import left_out
from hypothesis.internal.conjecture import providers

TESTS = Path(__file__).resolve().parent
# Tests of the base lane without a GPU, within a tenth, and of `--all`: tests/tools/test_number.py.
ABOUT, ABOUT_ALL = 7_000, 11_600
GOLDEN = TESTS / "golden"
# Folders of tests that depend on no version of torch, or that the newest is enough for: the full
# lane runs none of them but for what needs nvFuser or thunder.
ONE_TORCH = frozenset(
    {
        "backends",
        "checkpoints",
        "cli",
        "families",
        "formats",
        "fuzz",
        "ir",
        "passes",
        "schedule",
        "tools",
        "integrations/nvfuser",
        "integrations/peft",
        "integrations/transformers",
        "test_cover.py",
        "test_golden_fixture.py",
    }
)
# What it runs of the others without `--all`: where torch's versions differ.
BY_TORCH = frozenset(
    {
        "integrations/thunder",
        *(f"compile/test_{name}.py" for name in ("fx_regions", "inductor")),
        *(f"ops/test_{name}.py" for name in ("compat", "fakes")),
        *("runtime/test_native.py", "translators/test_aten.py"),
        *("test_docs.py", "test_env.py"),
    }
)
# The files that take longest, some of it without a CPU.
FIRST = ("integrations/distributed/test_ranks.py", "test_docs.py", "test_packaging.py")
# In the text of files with tests that need nvFuser or thunder.
OF_FULL_LANE = re.compile(r"mark\.(nvfuser|thunder)|^from ways import", re.MULTILINE)
FULL_LANE = importlib.util.find_spec("nvfuser_direct") is not None
BEGUN, OVER = time.monotonic(), "the time of --within is over"

# hypothesis would also draw numbers that stand in modules, of those that tests before have imported
providers._get_local_constants = lambda: providers._local_constants
# Of hypothesis's own defaults, whatever CI says; on a busy machine an example takes long.
for _name, _derandomize, _examples in ("ci", True, 30), ("quick", True, 5), ("long", False, 1000):
    hypothesis.settings.register_profile(
        _name,
        hypothesis.settings.get_profile("default"),
        derandomize=_derandomize,
        max_examples=_examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run all cells of grids and tests with the mark `exhaustive` too, with more drawn "
        "examples: make test-all",
    )
    parser.addoption(
        "--rest",
        action="store_true",
        help="of --all, what `make test` leaves out, and what it runs otherwise: make test-rest",
    )
    parser.addoption(
        "--within",
        type=float,
        metavar="MINUTES",
        help="skip tests that would begin after so many minutes, and say how many",
    )
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden/ from what the code says now; then read git diff",
    )
    parser.addoption(
        "--keep-definitions",
        type=Path,
        metavar="FOLDER",
        help="keep all nvFuser definitions for tests/integrations/nvfuser/launched.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    profile = "ci" if with_rest(config) else "quick"
    hypothesis.settings.load_profile(os.environ.setdefault("HYPOTHESIS_PROFILE", profile))
    if folder := config.getoption("--keep-definitions"):
        import judge

        folder.mkdir(parents=True, exist_ok=True)
        judge.KEPT.append(folder)
    # Inductor does not ask the compiler which of the CPU's instructions it knows: 7 CPU seconds in
    # each new folder of its cache.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # its processes for Triton: no test on a CPU has any work for them
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    # servers that tests start are asked directly, whatever proxy there is for others
    os.environ["no_proxy"] = "127.0.0.1,localhost"
    # GPUs: each layer of a test would compile what it needs for counts that no test has
    os.environ.setdefault("FUSION_MOE_COMPILE_AHEAD", "0")
    if not every(config):
        os.environ.setdefault("KERNELS_OF_TESTS", "-O0")  # tests/precompiled.py
    # a worker of pytest-xdist: one thread each, and the same for what a test starts
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        config.pluginmanager.register(_StaleGoldens(config), "stale-goldens")
        config.pluginmanager.register(_HowLong(config), "how-long")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports and collected tests are is no garbage: looking through it again and again takes
    a sixth of the time of tests in Python.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which the full lane runs nothing are not imported there; those of GPUs, a quarter of
    all tests, not without one.
    """
    if collection_path == TESTS / "gpu" and not every(config):
        import torch

        return None if torch.cuda.is_available() else True
    if not FULL_LANE or every(config) or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    once = _among(ONE_TORCH, collection_path) or not _among(BY_TORCH, collection_path)
    return True if once and not OF_FULL_LANE.search(text) else None


@cache
def _among(names: frozenset[str], path: Path) -> bool:
    """Whether a file is one of these, or in one of these folders."""
    return not {TESTS / name for name in names}.isdisjoint((path, *path.parents))


@pytest.hookimpl(trylast=True)  # folders add marks of theirs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long come first: a worker that begins with one when others have nothing left
    would keep them waiting. With --within they come last: so fewer tests are left out. Tests that
    are asked for by name all run.
    """
    first = [TESTS / name for name in FIRST]
    long = {item.path for item in items if any(map(item.get_closest_marker, ("slow", "once")))}
    items.sort(
        key=lambda item: (item.path not in first, item.path not in long),
        reverse=config.getoption("--within") is not None,
    )
    for item in items:
        if _among(ONE_TORCH, item.path) and not _needs_more(item):
            item.add_marker("once")
    if not every(config):
        chosen = _of_make_test(items)
    elif not with_rest(config):
        return
    else:
        chosen = _of_all(items)
        if config.getoption("--rest"):
            chosen -= {item for item in _of_make_test(items) if not _runs_otherwise(item)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _needs_more(item: pytest.Item) -> bool:
    """Whether a test needs what only the full lane has."""
    return any(map(item.get_closest_marker, ("nvfuser", "thunder")))


def _of_make_test(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """A cover of each grid; in the full lane where torch's versions differ, and what needs it."""
    if FULL_LANE:
        items = [i for i in items if _needs_more(i) or _among(BY_TORCH, i.path)]
        items = [i for i in items if not i.get_closest_marker("once")]
    items = list(items)
    return set(items) - set(left_out(items))


def _of_all(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Every test; in the full lane a cover of what the base lane has with another torch."""
    again = (i for i in items if not (_needs_more(i) or _among(BY_TORCH, i.path)))
    return set(items) - set(left_out(again) if FULL_LANE else ())


def _runs_otherwise(item: pytest.Item) -> bool:
    """Whether a test that `make test` runs does more with --all: its kernels have -O3, it draws
    examples, or has a fixture that looks at it.
    """
    of = getattr(item, "fixturenames", ())
    return (
        _among(frozenset({"backends"}), item.path)
        or getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        or "call_by_call" in of
        or "meaning_without_all" in of
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - BEGUN > 60 * within:
        pytest.skip(OVER)
    if "torch" in sys.modules:
        # numbers that it draws depend on no test that ran before it; torch.manual_seed would keep a
        # stack for CUDA each time
        sys.modules["torch"].default_generator.manual_seed(zlib.crc32(item.nodeid.encode()))
    for mark in item.iter_markers("judges"):
        for module in mark.args:
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed: pip install -e '.[judges]'")
    for mark, module in ("nvfuser", "nvfuser_direct"), ("thunder", "thunder"):
        if item.get_closest_marker(mark) and importlib.util.find_spec(module) is None:
            pytest.skip(
                f"{module} is not installed: pip install -e '.[{mark}]'; make test has it "
                "in its full lane"
            )
    if item.get_closest_marker("once") and FULL_LANE:
        pytest.skip("run once, where nvFuser is not installed: in the base lane of make test")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU; torch.cuda.is_available() is False here")
        for mark in item.iter_markers("needs"):
            from fusion_moe.runtime import cuda

            if why := cuda.arch(torch.cuda.current_device()).why_not(mark.args):
                pytest.skip(why)
    if item.get_closest_marker("browser") and (missing := _missing_of_browser()):
        pytest.skip(missing)
    if item.get_closest_marker("compiler") and not _has_compiler():
        pytest.skip("needs a C++ compiler for Inductor's own kernels; none is on PATH")


def _missing_of_browser() -> str:
    """Why no page can be looked at; "" if one can."""
    if not shutil.which("chromium"):
        return "chromium is not on PATH: apt install chromium"
    return (
        ""
        if importlib.util.find_spec("playwright")
        else ("playwright is not installed: pip install -e '.[browser]'")
    )


@cache
def _has_compiler() -> bool:
    from fusion_moe.frontends.inductor.compile_graph import has_compiler

    return has_compiler()


@pytest.fixture(scope="session", autouse=True)
def no_trace() -> None:
    """torch writes its trace, at any level, as soon as anything listens: pytest does not, as it
    would to each logger that does not propagate. Nor does each compilation measure how fast its
    guards are, for which it empties the CPU's caches.
    """
    import torch

    logging.Logger.manager.loggerDict.pop("torch.__trace", None)
    for guards in torch._C._dynamo.guards, sys.modules.get("torch._dynamo.guards"):
        if guards is not None:
            guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(scope="session", autouse=True)
def no_terminal() -> Iterator[None]:
    """What is printed is as wide and as plain as into a file, whatever the environment asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        for name in "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE":
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def native_calls() -> None:
    """Calls go the same way in all tests, whatever was compiled before: through C++ where there is
    a compiler.
    """
    from fusion_moe import options
    from fusion_moe.runtime import build, native

    if options.current().native_calls and build.find_compiler() is not None:
        native.load()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_no_garbage() -> Iterator[None]:
    """What a file leaves behind, as caches and modules, is looked through once: after thousands of
    tests each full collection would take more than a second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def precompiled_headers() -> None:
    import precompiled

    precompiled.use()


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """Kernels are compiled with -O3: those of a model that is called often take longer without than
    a compiler with it.
    """
    import precompiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(precompiled.LEVEL, precompiled.O3)
        yield


@pytest.fixture
def call_by_call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --all, what is around the fusions of a compiled function runs as it does without a
    C++ compiler: Inductor's code for it takes longer than the rest of the test.
    """
    from fusion_moe.frontends.inductor import compile_graph

    if not every(request.config):
        monkeypatch.setattr(compile_graph, "has_compiler", lambda: False)


@pytest.fixture(scope="module")
def meaning() -> Iterator[None]:
    """Programs run in plain torch, as what they mean, but where a test says otherwise: compiling a
    kernel for each takes long.
    """
    from fusion_moe import options

    with options.override(target="reference"):
        yield


@pytest.fixture(scope="module")
def meaning_without_all(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same without --all; with it kernels run. For tests that are about neither."""
    from fusion_moe import options

    if every(request.config):
        yield
    else:
        with options.override(target="reference"):
            yield


# Golden texts -------------------------------------------------------------------------------------


@pytest.fixture
def pythons_own_recursion_limit() -> Iterator[None]:
    """Other packages raise it when they are imported."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """golden(text, name="") compares a text with tests/golden/<test file>/<test>[.<name>].txt; the
    path of tmp_path is … in it.

    `pytest --update-golden` writes what the code says now; `git diff` then shows what changed. In a
    run of all tests, `--all`, a golden that no test reads is an error (and --update-golden removes
    it).
    """
    read: set[Path] = set()

    def check(text: str, name: str = "") -> None:
        stem = _stem(request.node.nodeid, request.config)
        path = stem.with_name(stem.name + (f".{name}" if name else "") + ".txt")
        if path in read:
            raise ValueError(
                f"golden(..., name={name!r}) twice in one test; give each text its own name"
            )
        read.add(path)
        # travels with the report, also from a worker
        request.node.user_properties.append(("golden", str(path)))

        if "tmp_path" in request.fixturenames:
            text = text.replace(str(request.getfixturevalue("tmp_path")), "…")
        now = text.rstrip() + "\n"
        want = path.read_text(encoding="utf-8") if path.exists() else ""
        if now == want:
            return
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(now, encoding="utf-8", newline="\n")
            return
        shown = path.relative_to(TESTS.parent).as_posix()
        diff = difflib.unified_diff(
            want.splitlines(),
            now.splitlines(),
            shown if want else f"{shown} (missing)",
            "now",
            lineterm="",
        )
        command = f"pytest --update-golden {shlex.quote(request.node.nodeid)}"
        pytest.fail(
            "\n".join([*diff, "", f"If the new text is right: {command}", "and read git diff."]),
            pytrace=False,
        )

    return check


def _stem(nodeid: str, config: pytest.Config) -> Path:
    """The golden of a test, without name and suffix: tests/ir/test_a.py::test_b[x/y] ->
    tests/golden/ir/test_a/test_b[x-y].
    """
    file, _, test = nodeid.partition("::")
    folder = (config.rootpath / file).resolve().relative_to(TESTS).with_suffix("")
    return GOLDEN / folder / re.sub(r"[^\w.,=+\[\]-]", "-", test.replace("::", "."))


class _HowLong:
    """Says first how many tests a run of all has, and how long the last one took here, which it
    remembers in pytest's cache.
    """

    def __init__(self, config: pytest.Config):
        self.config, self.begun, self.ran, self.over = config, time.monotonic(), 0, 0
        self.lane = "full" if FULL_LANE else "base"
        self.key = f"fusion_moe/{self.lane}{'-all' * every(config)}"
        self._cache = getattr(config, "cache", None)  # without it: -p no:cacheprovider

    def pytest_report_header(self) -> str:
        if not all_asked_for(self.config):
            return ""
        if self._cache and (last := self._cache.get(self.key, None)):
            return f"{last['tests']:,} tests: the last run here took {last['minutes']:.0f} minutes"
        count = ABOUT_ALL if every(self.config) else ABOUT
        tests = f"about {count:,} tests" if self.lane == "base" else "all tests"
        return f"{tests}, most of whose time compilers take; no run of them was timed here"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "setup"
        self.over += report.skipped and OVER in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.over:
            terminalreporter.write_line(f"{self.over:,} tests did not run: {OVER}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._cache and exitstatus in (0, 1) and all_asked_for(self.config) and self.ran:
            minutes = (time.monotonic() - self.begun) / 60
            self._cache.set(self.key, {"tests": self.ran, "minutes": minutes})


class _StaleGoldens:
    """Fails a run of all tests when a golden was read by none of them. A skipped test keeps its
    goldens.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.read: set[Path] = set()
        self.skipped: list[Path] = []  # stems of tests; folders of files
        self.stale: list[Path] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.read |= {Path(path) for key, path in report.user_properties if key == "golden"}
        if report.skipped:
            self.skipped.append(_stem(report.nodeid, self.config))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(_stem(report.nodeid, self.config))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != 0 or not (every(self.config) and all_asked_for(self.config)):
            return
        self.stale = sorted(
            path
            for path in GOLDEN.rglob("*.txt")
            if path not in self.read and not self._may_be_read_elsewhere(path)
        )
        if not self.stale:
            return
        if self.config.getoption("--update-golden"):
            for path in self.stale:
                path.unlink()
        else:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.stale:
            return
        updated = self.config.getoption("--update-golden")
        terminalreporter.section(
            "goldens removed" if updated else "stale goldens: no test reads them", red=not updated
        )
        for path in self.stale:
            terminalreporter.write_line(path.relative_to(TESTS.parent).as_posix())
        if not updated:
            terminalreporter.write_line("Delete them, or run pytest --update-golden.")

    def _may_be_read_elsewhere(self, path: Path) -> bool:
        return any(
            stem in path.parents
            or (stem.parent == path.parent and path.name.startswith(f"{stem.name}."))
            for stem in self.skipped
        )


def every(config: pytest.Config) -> bool:
    """Whether the files that are asked for run with all their tests: with --all, or by name."""
    return with_rest(config) or any("::" in arg for arg in config.args)


def with_rest(config: pytest.Config) -> bool:
    """Whether what `make test` leaves out was asked for."""
    return config.getoption("--all") or config.getoption("--rest")


def all_asked_for(config: pytest.Config) -> bool:
    """Whether no test is left out by the command line."""
    narrowing = (
        "keyword",
        "markexpr",
        "deselect",
        "ignore",
        "ignore_glob",
        "lf",
        "stepwise",
        "collectonly",
        "rest",
    )
    if any(getattr(config.option, name, None) for name in narrowing):
        return False
    return any(
        TESTS.is_relative_to((config.invocation_params.dir / arg).resolve()) for arg in config.args
    )
