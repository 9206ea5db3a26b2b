"""The command line as a whole: exit codes, errors as sentences and as JSON, help, `python -m`, and
what is said without typer.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from files import MADE
from typer.testing import CliRunner

import fusion_moe
from fusion_moe.cli.app import app
from fusion_moe.errors import CheckpointError

REPO = Path(__file__).parents[2]
COMMANDS = ("inspect", "convert", "quantize", "explain", "doctor")


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, list(arguments), prog_name="fusion-moe")


def test_help():
    """What there is, with examples."""
    shown = [run("--help"), *(run(command, "--help") for command in COMMANDS)]
    assert [result.exit_code for result in shown] == [0] * len(shown)
    assert all("Examples:" in result.output for result in shown[1:])
    assert "..." not in shown[0].output.partition("Commands:")[2]
    assert run("--version").output == f"fusion_moe {fusion_moe.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("inspect",),
        ("inspect", "--nope", "."),
        ("explain", ".", "--tokens", "0"),
        ("nope",),
    ],
)
def test_usage_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


def quantized_by(method: str, folder: Path) -> Path:
    """A directory that says so."""
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": method}})
    )
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_what_is_not_read_exits_with_3_and_one_sentence(tmp_path):
    folder = quantized_by("gguf", tmp_path)
    for command in ("inspect", "explain"):
        result = run(command, str(folder))
        assert (result.exit_code, result.stdout) == (3, "")
        assert result.stderr.startswith(f"fusion-moe: {folder}: quant_method 'gguf': GGUF ")
        assert result.stderr.count("\n") == 1


def test_errors_as_json(tmp_path):
    result = run("inspect", "--json", str(quantized_by("gguf", tmp_path)))
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, result.stderr, error["kind"], error["where"]) == (
        3,
        "",
        "UnsupportedError",
        str(tmp_path),
    )
    assert error["found"].startswith("quant_method 'gguf'")
    assert set(error) == {"kind", "message", "found", "expected", "todo", "where"}


def test_problems_of_a_directory_exit_with_1(tmp_path):
    assert run("explain", str(tmp_path / "nothing")).exit_code == 1
    assert isinstance(
        run("--traceback", "explain", str(tmp_path / "nothing")).exception, CheckpointError
    )


@pytest.mark.parametrize("said", [(), ("half of it is written",)])
def test_interrupted(said, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt(*said)

    monkeypatch.setattr("fusion_moe.cli.inspect.inspection", interrupt)
    result = run("inspect", ".")
    message = f"fusion-moe: {said[0] if said else 'interrupted'}\n"
    assert (result.exit_code, result.stderr) == (130, message)


@pytest.mark.once
def test_as_a_module():
    """In a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fusion_moe.cli", "--version"],
        capture_output=True,
        text=True,
        cwd=REPO,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"fusion_moe {fusion_moe.__version__}\n",
        "",
    )


def test_nothing_that_compiles_graphs_is_imported():
    """It takes longer than all the rest. (`import fusion_moe` without it: tests/test_public.py.)"""
    given = (
        ["--help"],
        ["explain", "--help"],
        ["inspect", str(MADE / "modelopt-mixtral")],
        ["doctor"],
    )
    code = f"""
import sys, fusion_moe.cli as cli
for sys.argv[1:] in {given}:
    try:
        cli.main()
    except SystemExit:
        slow = "torch._dynamo", "torch._inductor", "transformers"
        print([m for m in sys.modules if m in slow], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.stderr == "[]\n" * len(given)


def test_without_typer():
    """A sentence that names the extra; `import fusion_moe` needs none of it."""
    code = (
        "import sys; sys.modules['typer'] = None; import fusion_moe, fusion_moe.cli as cli; "
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "fusion-moe: typer is not installed; pip install '.[cli]' in a clone of fusion_moe\n"
    )
