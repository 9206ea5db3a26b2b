"""The command line as a whole: exit codes, errors as sentences and as JSON, help, `python -m`, and
what is said without typer.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from inspect import signature
from pathlib import Path

import pytest
from cover import few

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from files import MADE
from typer.testing import CliRunner

import fusion_moe
from fusion_moe.cli.app import app
from fusion_moe.errors import CheckpointError

REPO = Path(__file__).parents[2]
COMMANDS = (
    *("run", "bench", "inspect", "convert", "quantize"),
    *("eval", "explain", "compare", "plan", "doctor", "serve"),
)


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", ".", "hi", "--tokens", "abc"), "'--tokens': 'abc' should be a valid integer;"),
        (("serve", ".", "--port", "0"), "'--port': '0' should be greater than or equal to 1;"),
        (("plan", ".", "--link", "fast"), "'--link': 'fast' should be a valid number;"),
    ],
)
def test_a_bad_number_is_said(arguments, said):
    """What was found, and what was expected."""
    pytest.importorskip("typer", minversion="0.29")  # before, click's sentences have both
    assert run(*arguments).stderr.startswith(f"fusion-moe: invalid value for {said}")


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

    monkeypatch.setattr("fusion_moe.cli.inspect_directory.inspect_directory", interrupt)
    result = run("inspect", str(MADE / "modelopt-mixtral"))
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_without_room_is_a_sentence():
    command = [sys.executable, "-m", "fusion_moe.cli", "--version"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPO)
    assert done.returncode == 1
    assert done.stderr == "fusion-moe: the output: not written: No space left on device\n"


def test_nothing_that_compiles_graphs_is_imported():
    """It takes longer than all the rest. (`import fusion_moe` without it: tests/test_public.py.)"""
    given = (["inspect", str(MADE / "modelopt-mixtral")], ["doctor"])
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


NONE, MIXTRAL = "/nonexistent", str(MADE / "modelopt-mixtral")
MODEL = str(REPO / "examples" / "tiny_qwen3_moe")
LONG = "a" * 300
# arguments that are wrong by themselves -> the exit code
WRONG = {
    ("nope",): 2,
    ("inspect", "--nope", "."): 2,
    ("inspect", NONE): 1,
    ("inspect", MIXTRAL, "--against", NONE): 1,
    ("run", NONE, "hi"): 1,
    ("run", MODEL): 2,
    ("run", MODEL, "hi", "--device", "tpu"): 2,
    ("run", MODEL, "hi", "--record", "run.png"): 2,
    ("run", MODEL, "hi", "--gpu-memory", "1..5GB"): 2,
    ("run", MODEL, "hi", "--gpu-memory", "4GB", "--device", "cpu"): 2,
    ("run", MODEL, "hi", "--offload-folder", "."): 2,
    ("run", MIXTRAL, "hi"): 1,
    ("bench", NONE): 1,
    ("bench",): 2,
    ("bench", "--config", "nope"): 2,
    ("convert", NONE, "out"): 1,
    ("convert", MIXTRAL, MODEL): 1,
    ("quantize", NONE, "out"): 1,
    ("quantize", MODEL, MIXTRAL): 1,
    ("eval", NONE, "--text", __file__): 1,
    ("eval", MODEL, "--text", NONE): 2,
    ("explain", NONE): 1,
    ("explain", MIXTRAL, "--gpu", "H1000"): 2,
    ("explain", MIXTRAL, "--save", "report.png"): 2,
    ("plan", NONE): 1,
    ("plan", MIXTRAL, "--gpu", "H1000"): 2,
    ("plan", MIXTRAL, "--gpu-memory", "much"): 2,
    ("plan", MIXTRAL, "--tokens", "512"): 2,  # which only --train reads
    ("plan", MIXTRAL, "--no-checkpointing"): 2,
    ("plan", MIXTRAL, "--train", "--kv-tokens", "512"): 2,
    ("plan", MIXTRAL, "--train", "--tflops", "0"): 2,
    ("compare", NONE, NONE): 2,
    ("serve", NONE): 1,
    ("serve", MODEL, "--port", "99999"): 2,
    # names that no file can have
    ("inspect", LONG): 2,
    ("inspect", MIXTRAL, "--against", LONG): 2,
    ("run", LONG, "hi"): 2,
    ("run", MODEL, "hi", "--record", LONG): 2,
    ("run", MODEL, "hi", "--offload-folder", LONG): 2,
    ("bench", LONG): 2,
    ("bench", "--config", LONG): 2,
    ("convert", LONG, "out"): 2,
    ("convert", MIXTRAL, LONG): 2,
    ("quantize", LONG, "out"): 2,
    ("quantize", MODEL, LONG): 2,
    ("eval", LONG, "--text", __file__): 2,
    ("eval", MODEL, "--text", LONG): 2,
    ("eval", MODEL, "--text", __file__, "--against", LONG): 2,
    ("explain", LONG): 2,
    ("explain", MIXTRAL, "--save", LONG): 2,
    ("plan", LONG): 2,
    ("plan", MIXTRAL, "--offload-folder", LONG): 2,
    ("serve", LONG): 2,
    ("compare", LONG, __file__): 2,
    ("compare", __file__, LONG): 2,
}
_IN_ONE = """
import io, json, runpy, sys
from contextlib import redirect_stderr, redirect_stdout

sys.argv[0] = "-m"
sys.orig_argv[1:] = ["-m", "fusion_moe.cli"]  # a process that was started so
found = []
for sys.argv[1:] in json.loads(sys.stdin.read()):
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_module("fusion_moe.cli", run_name="__main__")
    except SystemExit as end:
        heavy = {"torch", "transformers", "numpy", "safetensors"} & sys.modules.keys()
        found.append([end.code or 0, out.getvalue(), err.getvalue(), sorted(heavy)])
print(json.dumps(found))
"""


def in_one_process(*arguments: tuple[str, ...]) -> list:
    """Exit code, stdout, stderr, and which of the packages that take long were imported."""
    given = json.dumps(arguments)
    done = subprocess.run(
        [sys.executable, "-c", _IN_ONE], input=given, capture_output=True, text=True, cwd=REPO
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_torch_is_not_imported_for_help_and_wrong_arguments():
    helps = [("--version",), ("--help",), *((name, "--help") for name in COMMANDS)]
    found = in_one_process(*helps, *WRONG)
    for arguments, code, (got, out, err, heavy) in zip(
        [*helps, *WRONG], [*[0] * len(helps), *WRONG.values()], found, strict=True
    ):
        assert (got, heavy) == (code, []), arguments
        if arguments in WRONG and arguments != ("inspect", NONE):  # whose result it is
            assert err.startswith("fusion-moe: "), arguments
            assert (out, err.count("\n")) == ("", 1), arguments


def test_a_wrong_path_is_answered_at_once():
    """Without torch, whose import takes seconds."""
    command = [sys.executable, "-X", "importtime", "-m", "fusion_moe.cli", "run", NONE, "hi"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 1
    imported = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "fusion_moe" in imported
    assert not {"torch", "transformers"} & {*imported}


def test_operations_are_registered_by_a_plain_import_and_by_a_command():
    code = "import {}, torch; print(torch.ops.fusion_moe.route)"
    for first in ("fusion_moe", "sys; sys.argv = ['fusion-moe']; import fusion_moe"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(first)], capture_output=True, text=True, cwd=REPO
        )
        assert (done.stdout, done.returncode) == ("fusion_moe.route\n", 0), done.stderr


@pytest.mark.parametrize("seconds", few([0.1, 0.3, 0.8, 1.5, 2.5], 2))
def test_ctrl_c_while_a_command_starts(seconds):
    """So many seconds of CPU time after what catches it is there: a line at most, and the exit code
    of shells.
    """
    code = "from fusion_moe.cli import main; print(flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "explain", MIXTRAL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == "\n"
    stat, begun = Path(f"/proc/{process.pid}/stat"), None
    while process.poll() is None:
        ticks = sum(map(int, stat.read_text().rpartition(") ")[2].split()[11:13]))
        begun = ticks if begun is None else begun
        if ticks - begun >= seconds * os.sysconf("SC_CLK_TCK"):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) in [(130, "fusion-moe: interrupted\n"), (0, "")]


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


def test_what_commands_know_without_importing_it():
    """Names and numbers that stand in modules which import torch."""
    from fusion_moe.cli import bench, explain, plan, run as of_run
    from fusion_moe.offload.plan import KV_TOKENS
    from fusion_moe.recorder import Run
    from fusion_moe.report import Report

    transformers_bench = pytest.importorskip("fusion_moe.integrations.transformers.bench")
    assert tuple(transformers_bench.SIZES) == bench.SIZES
    assert tuple(transformers_bench.MODES) == bench.MODES
    assert tuple(Report._forms) == explain.SAVED
    assert tuple(Run._forms) == of_run.RECORDS
    assert f"[default: {KV_TOKENS}]" in str(signature(plan.plan).parameters["kv_tokens"])
