"""What imports what, also inside of functions, for type checkers, and by name in strings: no
circles of files, and a core that knows none of the integrations.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import networkx
from count import BESIDE

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"fusion_moe": ROOT, "fusion_moe_translators": ROOT / "translators"}
# What lies on top of the core: what exists for another package, and the command, which uses that.
OUTSIDE = ("cli", "integrations")
_NAMES = re.compile(
    r"nvfuser|thunder|vllm|sglang|transformers|peft|sm_90\b|sm_100\b", re.IGNORECASE
)
_OWN = re.compile(r"fusion_moe\.(?:" + "|".join(map(re.escape, OUTSIDE)) + r")\b")


@cache
def files() -> dict[str, Path]:
    """Modules by name, "fusion_moe.ir.core", and where they are."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in (folder / package).rglob("*.py"):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(files()[name].read_text(encoding="utf-8"))


def for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    """What stands below `if TYPE_CHECKING:`."""
    blocks = (n for n in ast.walk(tree) if isinstance(n, ast.If) and is_type_checking(n.test))
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Strings that are statements."""
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}


def imported(name: str, node: ast.AST) -> Iterator[str]:
    """The dotted names that a statement of a module imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = name.split(".") if files()[name].name == "__init__.py" else name.split(".")[:-1]
        base = parts[: len(parts) + 1 - node.level] if node.level else []
        start = ".".join([*base, *([node.module] if node.module else [])])
        yield from (f"{start}.{alias.name}" for alias in node.names)


def module_of(dotted: str) -> str:
    """The module that a dotted name is, or is in, by its long name; "" for one of another
    package.
    """
    package, _, rest = dotted.partition(".")
    long = f"{package}.integrations.{rest}"
    if ".".join(long.split(".")[:3]) in files():
        dotted = long
    while dotted and dotted not in files():
        dotted = dotted.rpartition(".")[0]
    return dotted


def edges(name: str, types: bool = True) -> set[str]:
    """The modules that a module imports or names in a string. types: for type checkers, too."""
    found = tree(name)
    left_out = docstrings(found) | (set() if types else for_type_checkers(found))
    nodes = [n for n in ast.walk(found) if n not in left_out]
    named = {module_of(dotted) for n in nodes for dotted in imported(name, n)}
    strings = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return (named | {s for s in strings if "." in s and s in files()}) - {"", name}


def is_outside(name: str) -> bool:
    return name.startswith(tuple(f"fusion_moe.{part}" for part in OUTSIDE))


def test_no_circle_of_files_outside_of_the_ir():
    graph = networkx.DiGraph(
        (name, other) for name in files() for other in edges(name) if other not in PACKAGES
    )
    circles = [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert [c for c in circles if not all(m.startswith("fusion_moe.ir.") for m in c)] == []


def test_a_circle_is_seen_wherever_the_import_stands():
    """in functions, and in strings; ir/ has the one circle that stays"""
    assert "fusion_moe.ir.text" in edges("fusion_moe.ir.core")


def test_maps_of_folders_name_files_that_there_are():
    """The docstring of a folder's __init__ says which file has what."""
    missing = [
        f"{name}: {file}"
        for name, path in files().items()
        if path.name == "__init__.py"
        for file in re.findall(r"\b\w+\.py\b", ast.get_docstring(tree(name)) or "")
        if not any(path.parent.rglob(file)) and not (ROOT / "fusion_moe" / file).exists()
    ]
    assert missing == []


def test_what_a_folder_exports_hides_none_of_its_files():
    """from .encoded import plain, before from .plain import F32, would make `plain` the file."""
    hidden = [
        f"{name}: {alias.name}"
        for name, path in files().items()
        if path.name == "__init__.py" and not is_outside(name)
        for node in tree(name).body
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        for alias in node.names
        if getattr(import_module(name), alias.name)
        is not getattr(import_module(f"{name}.{node.module}"), alias.name)
    ]
    assert hidden == []


CORE = sorted(name for name in files() if not is_outside(name))
# What `save_lora` writes are PEFT's files, as checkpoints are ModelOpt's.
FILES_OF_PEFT = "fusion_moe.lora.files"
ENTRY = "transformers_weights"  # of config.json, whoever reads it


def test_the_core_imports_no_integration():
    found = {
        (name, other) for name in CORE for other in edges(name, types=False) if is_outside(other)
    }
    assert found == set()


def test_the_core_imports_nothing_that_stands_beside_it():
    """But for names that `fusion_moe` and `fusion_moe.nn` have too, imported when asked for."""
    folders = tuple(f"fusion_moe.{folder}" for folder in BESIDE)
    beside = {name for name in files() if name.startswith(folders)}
    users = {name for name in files().keys() - beside if edges(name) & beside}
    assert users == {"fusion_moe", "fusion_moe.nn"}


def test_the_core_names_no_integration():
    """in strings that are not docstrings, and in what code calls things"""
    found = [
        f"{name}:{node.lineno}: {text}"
        for name in CORE
        if not name.startswith(FILES_OF_PEFT)
        for node, text in named(name)
        if text != ENTRY and (_NAMES.search(text) or _OWN.search(text))
    ]
    assert found == []


def named(name: str) -> Iterator[tuple[ast.AST, str]]:
    """The strings and the names of a module's code."""
    found = tree(name)
    left_out = docstrings(found)
    for node in ast.walk(found):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in left_out:
                yield node, node.value
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node, node.name
        elif isinstance(node, (ast.Name, ast.Attribute, ast.arg, ast.alias)):
            text = ast.unparse(node).rpartition(".")[2]
            yield node, text


CORE_ALONE = """
import sys, warnings
OUTSIDE = tuple(sys.argv[1].split())

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(OUTSIDE):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import torch
from torch import nn
import fusion_moe
from fusion_moe import env, options
from fusion_moe.nn import NVFP4Experts

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = (nn.Parameter(torch.randn(s)) for s in ((4, 64, 32), (4, 32, 32)))

@fusion_moe.register_converter(Mine)
def to_nvfp4(experts, config):
    return NVFP4Experts.from_float(experts.gate_up, experts.down, config.activation_format)

torch.manual_seed(0)
model = nn.ModuleDict({"experts": Mine()})
fusion_moe.quantize_(model)
call = torch.randn(6, 32), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
with torch.no_grad():
    with options.override(target="reference"):
        want = model["experts"](*call)
        found = torch.compile(model["experts"], backend="fusion_moe")(*call)
    torch.testing.assert_close(found, want)
    report = fusion_moe.explain(model["experts"], *call)
print([s.backend for f in report.fusions for s in f.segments])
fusion_moe.nn.add_lora_(model, rank=4)
with options.override(target="reference"):
    model["experts"](*call).sum().backward()
print([name for name, p in model.named_parameters() if p.grad is not None])
print("CPU, generic" in str(env.environment()))
print("dispatch" in dir(fusion_moe.FusionDefinition().ops))
print([name for name in sys.modules if name.startswith(OUTSIDE)])
"""


def test_the_core_runs_without_integrations():
    outside = " ".join(f"fusion_moe.{name}" for name in OUTSIDE)
    done = subprocess.run(
        [sys.executable, "-c", CORE_ALONE, outside], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    backends, trained, env, between_ranks, imported = done.stdout.splitlines()
    assert backends == "['cpu', 'cpu']"
    assert trained.count("_lora.B") == 2
    assert (env, between_ranks, imported) == ("True", "False", "[]")
