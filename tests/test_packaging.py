"""What users install: the wheel, the sdist, the editable install, beside PyPI's `translators`, and
what importing costs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from cover import few

from fusion_moe.backends.cpu import readers
from fusion_moe.runtime import build as builds, isa, native_source, shipped_cubins

# By their metadata: as soon as a process imports pip, or looks for it, setuptools can no longer be
# imported there.
INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
SITE = Path(importlib.util.find_spec("torch").origin).parents[1]  # where torch is installed
MISSING = sorted({"hatchling", "pip"} - INSTALLED)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

REPO = Path(__file__).resolve().parents[1]
PACKAGES = {
    "fusion_moe": REPO / "fusion_moe",
    "fusion_moe_translators": REPO / "translators" / "fusion_moe_translators",
}


def run(*command: object, cwd: Path = Path("/"), **environment: str) -> str:
    """Whatever the environment of the tests says to Python and pip."""
    rest = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**rest, **environment},
    )
    assert done.returncode == 0, (
        f"{' '.join(str(part) for part in command)}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def build(
    target: str, folder: Path, source: Path = REPO, compiler: str = "", kernels: str = ""
) -> Path:
    """The wheel, the editable wheel or the sdist, built as pip would, without the network.
    compiler: what makes the CPU's kernels, and what runs calls with the torch that is installed;
    kernels: for which CPUs.
    """
    environment = {"CXX": compiler} if compiler else {"HATCH_BUILD_NO_HOOKS": "true"}
    environment |= {"KERNELS_FOR": kernels}
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        target,
        "-d",
        folder,
        cwd=source,
        **environment,
    )
    (built,) = folder.iterdir()
    return built


def files_of(wheel: Path) -> set[str]:
    """The files of a wheel outside its .dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel:editable", tmp_path_factory.mktemp("editable"))


def test_wheel_holds_the_two_packages_and_nothing_else(wheel):
    """Every file of the two packages, kernel sources included, and no tests, examples or
    benchmarks.
    """
    ours = {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert files_of(wheel) == ours
    assert {name.split("/")[0] for name in ours} == set(PACKAGES)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", folder / "built")) as archive:
        archive.extractall(
            folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    return next(path for path in folder.iterdir() if path.name != "built")


def test_sdist_builds_the_same_wheel(wheel, source, tmp_path):
    assert files_of(build("wheel", tmp_path, source)) == {
        name for name in files_of(wheel) if "/shipped/" not in name
    }


def test_sdist_has_all_that_a_clone_has(source):
    """So `make demo` runs from it, with the small model. Without what is for the forge alone."""
    if not (REPO / ".git").exists():
        pytest.skip("not a clone: nothing says what belongs to it")
    tracked = run("git", "-c", "safe.directory=*", "ls-files", cwd=REPO).splitlines()
    missing = {name for name in tracked if not (source / name).exists()}
    assert {name.split("/")[0] for name in missing} <= {
        ".ci",
        ".clang-format",
        ".git-blame-ignore-revs",
        ".gitattributes",
        ".github",
    }
    assert (source / "examples/tiny_qwen3_moe/model.safetensors").stat().st_size > 10**7
    assert "examples/demo.py" in run("make", "-n", "demo", cwd=source)


def test_pip_gets_metadata_without_compiling(source, tmp_path):
    """Where hatchling has none, pip builds a wheel, in a step that is named otherwise."""
    code = (
        "import os, sys; sys.path.insert(0, 'tools'); import build_backend as b; "
        "print(b.prepare_metadata_for_build_wheel(sys.argv[1]), os.environ['PIP_BUILD_TRACKER'])"
    )
    compiler = {"CXX": "/nothing/compiles", "PIP_BUILD_TRACKER": "here"}
    said = run(sys.executable, "-c", code, tmp_path, cwd=source, **compiler).split()
    assert said[1:] == ["here"]
    assert "\nRequires-Dist: torch" in (tmp_path / said[0] / "METADATA").read_text()


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """A stand-in, which makes empty files."""
    program = tmp_path / "compiler"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo 1.0\nfor last; do :; done\ntouch "$last"\n'
    )
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("target", ["wheel", "wheel:editable"])
def test_an_install_brings_the_kernels_of_its_own_cpu(target, source, compiler, tmp_path):
    """Of its best ISA level; others are compiled on demand."""
    shutil.copytree(source, copied := tmp_path / "copy")
    build(target, tmp_path / "wheel", copied, compiler)
    shipped = {path.name for path in (copied / "fusion_moe/backends/cpu/shipped").iterdir()}
    assert shipped == {source.came_with().name for source in readers.packaged(isa.available()[0])}
    calls = {path.name for path in copied.glob("fusion_moe/runtime/shipped/*")}
    with_torch = native_source.of_folder(SITE / "torch").came_with().name
    assert calls == ({with_torch} if target == "wheel" else set())


def test_kernels_are_built_by_a_program_that_says_so(source, compiler, tmp_path):
    """As `make` has it, without any package. Without a compiler it says what follows."""
    shutil.copytree(source, copied := tmp_path / "copy")
    program = [sys.executable, "-S", "tools/build_kernels.py"]
    for cxx, said in (
        (compiler, f"compiling the CPU's kernels: {len(readers.packaged('generic'))} files for "),
        ("/nothing/compiles", "no kernels for the CPU: no C++ compiler"),
    ):
        environment = {**os.environ, "CXX": cxx}
        done = subprocess.run(program, cwd=copied, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr.startswith(said)) == (0, True), done.stderr


def test_a_distributed_wheel_brings_the_kernels_of_every_cpu(
    source, compiler, tmp_path, monkeypatch
):
    """Those that this machine looks for among them; and its tag says for which machines it is.
    Nothing compiles them here but a stand-in. CUDA kernels are in a file that is there already.
    """
    (tmp_path / "of_cuda").write_bytes(b"cubins")
    monkeypatch.setenv("CUBINS", str(tmp_path / "of_cuda"))
    wheel = build("wheel", tmp_path / "wheel", source, compiler, "all")
    with zipfile.ZipFile(wheel) as archive:
        name = shipped_cubins.ARCHIVE.relative_to(REPO).as_posix()
        assert archive.read(name) == b"cubins"
    shipped = {Path(file).name for file in files_of(wheel) - {name} if "/shipped/" in file}
    assert shipped >= {
        source.came_with().name
        for isa_level in isa.available()
        for source in readers.packaged(isa_level)
    }
    assert {name.split("-")[1] for name in shipped} == set(isa.LEVELS)
    assert native_source.of_folder(SITE / "torch").came_with().name in shipped
    assert wheel.name.endswith(
        f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl"
    )


def test_kernels_are_built_without_torch():
    """pip builds where only hatchling is installed."""
    load = "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'tools'); "
    load += "import build_kernels; build_kernels._modules(build_kernels.Path('.').resolve())"
    subprocess.run([sys.executable, "-c", load], cwd=REPO, check=True)


def test_the_workflow_runs_what_the_makefile_has():
    steps = (REPO / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    targets = re.findall(
        r"^([\w -]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"run: make ([\w-]+)", steps)) <= set(" ".join(targets).split())


def test_the_readme_is_short():
    assert len((REPO / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_what_changed_is_short():
    """Each version, under a heading of its own."""
    versions = re.split(r"^## \[", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert len(versions) > 1
    assert all(len(version.splitlines()) <= 150 for version in versions)


def test_a_wheel_has_native_code_for_pinned_torches():
    """And of each pin there is one release of torch."""
    made = run("make", "-n", "dist", "VENV_DIST=.venv-none", cwd=REPO)
    pinned = {
        version
        for file in REPO.glob("constraints*.txt")
        for version in re.findall("^torch==(.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(re.findall(r"/torch-([\d.]+)\b", made)) >= pinned


def test_an_extra_of_a_plug_in_brings_its_engine_alone(wheel):
    """Not what transformers needs for other uses: the engine brings the transformers that it
    takes.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        lines = re.findall("^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)
    always = {re.match("[a-z_-]+", line)[0] for line in lines if "extra ==" not in line}
    vllm = {re.match("[a-z_-]+", line)[0] for line in lines if "extra == 'vllm'" in line}
    assert (always, vllm) == ({"torch", "networkx"}, {"vllm"})


def test_what_is_cited_is_this_version():
    version = (
        (REPO / "fusion_moe" / "__init__.py")
        .read_text(encoding="utf-8")
        .split('__version__ = "')[1]
        .split('"')[0]
    )
    assert f"\nversion: {version}\n" in (REPO / "CITATION.cff").read_text(encoding="utf-8")
    assert version in (REPO / "CHANGELOG.md").read_text(encoding="utf-8")


# Installed, beside another `translators` ----------------------------------------------------------


class Venv:
    """A throwaway environment without torch: a probe that needs it takes it from the environment
    that runs the tests.
    """

    def __init__(self, folder: Path):
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))").strip())

    def pip(self, *args: object) -> None:
        run(
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "--disable-pip-version-check",
            "--no-input",
            "-q",
            *args,
        )

    def run(self, code: str, cwd: Path = Path("/")) -> str:
        return run(self.python, "-c", code, cwd=cwd)

    def run_with_torch(self, code: str) -> str:
        return self.run(f"import sys; sys.path.append({str(SITE)!r})\n{code}")

    def origin(self, package: str, cwd: Path = Path("/")) -> Path | None:
        """Where `import package` would come from."""
        found = self.run(
            f"from importlib.util import find_spec as f; s = f({package!r}); "
            "print(s.origin if s else '')",
            cwd,
        ).strip()
        return Path(found).resolve() if found else None


def stand_in(folder: Path) -> Path:
    """A wheel with a top-level package `translators`, as PyPI has one."""
    files = {
        "translators/__init__.py": "theirs = True\n",
        "translators/server.py": "",
        "translators-6.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: "
        "translators\nVersion: 6.0\n",
        "translators-6.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: "
        "true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(text)}\n" for name, text in files.items())
    path = folder / "translators-6.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {
            **files,
            "translators-6.0.dist-info/RECORD": record + "translators-6.0.dist-info/RECORD,,\n",
        }.items():
            archive.writestr(name, text)
    return path


@pytest.mark.once
@pytest.mark.parametrize("kind", few(["wheel", "editable"]))
def test_installs_beside_another_translators_and_leaves_it_alone(kind, request, tmp_path):
    """And torch finds the backend by its entry point."""
    venv = Venv(tmp_path / "venv")
    venv.pip("install", "--no-deps", "--no-index", stand_in(tmp_path))
    their_folder = venv.site / "translators"
    before = {path: path.read_bytes() for path in their_folder.rglob("*.py")}
    assert before

    def assert_theirs_is_intact() -> None:
        assert {path: path.read_bytes() for path in their_folder.rglob("*.py")} == before
        for cwd in Path("/"), REPO:
            assert venv.origin("translators", cwd) == their_folder / "__init__.py"

    venv.pip("install", "--no-deps", "--no-index", request.getfixturevalue(kind))
    assert_theirs_is_intact()
    for package, source in PACKAGES.items():
        folder = source if kind == "editable" else venv.site / package
        assert venv.origin(package) == folder / "__init__.py"
    code = (
        "import fusion_moe_translators; from torch._dynamo import lookup_backend as f; "
        "b = f('fusion_moe'); print(b.__module__, callable(b))"
    )
    assert venv.run_with_torch(code).split() == ["fusion_moe.frontends.inductor", "True"]

    venv.pip("uninstall", "-y", "fusion_moe")
    assert_theirs_is_intact()
    for package in PACKAGES:
        assert venv.origin(package) is None


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_what_the_readme_shows_runs_from_a_wheel_in_an_empty_folder(wheel, tmp_path):
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    (shown,) = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    ((folder, what),) = re.findall("--find-links (dist) '(.*?)'", readme)
    site, empty = tmp_path / "site", tmp_path / "empty"
    (empty / folder).parent.mkdir()
    (empty / folder).symlink_to(wheel.parent)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(*pip, "--no-deps", "--no-index", "--target", site, "--find-links", folder, what, cwd=empty)
    shutil.copytree(REPO / "examples" / "tiny_qwen3_moe", empty / "examples" / "tiny_qwen3_moe")
    commands = re.findall("^fusion-moe (run .*)$", readme, re.MULTILINE)
    assert len(commands) == 1
    commands += ["inspect tiny-nvfp4", "run tiny-nvfp4 x --tokens 1"]
    if importlib.util.find_spec("typer") is None:
        commands = []
    program = f"{code}print(fusion_moe.__file__)\n{COMMANDS}"
    (tmp_path / "shown.py").write_text(program, encoding="utf-8")
    there = {"cwd": empty, "PYTHONPATH": str(site)}
    out = run(sys.executable, tmp_path / "shown.py", *commands, **there)
    *printed, came_from = out.splitlines()
    assert Path(came_from).is_relative_to(site)
    assert printed == shown.splitlines()


@pytest.mark.exhaustive
@pytest.mark.once
@pytest.mark.compiler
@pytest.mark.skipif(importlib.util.find_spec("typer") is None, reason="typer is not installed")
def test_an_installed_wheel_runs_a_model_without_a_compiler(source, tmp_path):
    """Kernels that came with it multiply, and so did the library for calls without Python."""
    site, cache = tmp_path / "site", tmp_path / "cache"
    for library in source.rglob("shipped/*.so"):  # of a compiler that only pretends
        library.unlink()
    wheel = build("wheel", tmp_path / "wheel", source, builds.find_compiler().command[0])
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(*pip, "--no-deps", "--no-index", "--target", site, wheel)
    model = shlex.quote(str(REPO / "examples" / "tiny_qwen3_moe"))
    printed = run(
        sys.executable,
        "-c",
        COMMANDS + LOADED,
        f"run {model} 'def main():' --tokens 12",
        cwd=tmp_path,
        PYTHONPATH=str(site),
        PATH="/nothing",
        CXX="",
        FUSION_MOE_CACHE_DIR=str(cache),
    )
    assert printed.split() == ["blocks", "fprop_nvfp4", "native"]
    assert not list(cache.rglob("*.so"))
    assert sum(f.stat().st_size for f in site.rglob("*")) < 15e6


LOADED = """
import re
with open("/proc/self/maps") as maps:
    print(*sorted(set(re.findall("/site/.*/shipped/([a-z0-9_]+)-", maps.read()))))
"""


# In one process, since importing takes longest. Each succeeds, and prints something.
COMMANDS = """
import contextlib, io, runpy, shlex, sys
for command in sys.argv[1:]:
    sys.argv = ["fusion-moe", *shlex.split(command)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_module("fusion_moe.cli", run_name="__main__")
        except SystemExit as done:
            assert not done.code, command
    assert out.getvalue(), command
"""


# The cost of importing ----------------------------------------------------------------------------


def test_import_brings_little_beside_torch():
    """What costs time to import waits until it is used."""
    code = (
        "import sys, torch; before = set(sys.modules); import fusion_moe; "
        "print(*set(sys.modules) - before)"
    )
    brought = run(sys.executable, "-c", code, cwd=REPO).split()
    others = (
        {name.partition(".")[0] for name in brought}
        - {"torch", "fusion_moe"}
        - sys.stdlib_module_names
    )
    assert not others
    assert not [name for name in brought if name.startswith(("torch._dynamo", "torch._inductor"))]
