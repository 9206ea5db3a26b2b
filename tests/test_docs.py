"""A page of the documentation is true: its Python blocks, run as the one file that they are, print
the text blocks below them.

Blocks below `<!-- needs: thunder -->`, `nvfuser` or `gpu` run where there is one, with those that
they build on; those below `checkpoint` where CPUs can, on small ones. `pytest --update-golden`
writes what is printed into the page. (`make docs` fails where a warning comes of building the
site.)
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tiny_qwen3 import qwen3_moe

import fusion_moe
from fusion_moe import backends, target
from fusion_moe.checkpoints import quantize
from fusion_moe.nn import NVFP4Experts

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(
    r"(?:<!-- needs: (?P<needs>\w+) "
    r"-->\n)?```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?",
    re.DOTALL,
)
END, LAST = (
    "\f\n",
    "\v\n",
)  # printed after each block, from the empty line between two; after each page
# They run in one process, one after the other, each as a file of its own: importing takes longer
# than most blocks.
PAGES = (
    "checkpoints.md",
    "start/quickstart.md",
    "start/first_compile.md",
    *(f"guides/{name}.md" for name in ("generate", "export", "finetune", "rl")),
    "guides/distributed.md",
    "guides/cuda_graphs.md",
    "training.md",
    "reference/options.md",
    "reference/errors.md",
    *(f"extend/{name}.md" for name in ("backends", "converters", "encodings", "layouts")),
    "translators.md",
)
FILES = {"translators.md": "geglu.py"}  # where a page says what it is called
# Python that is part of what surrounds it, or needs files that are not here.
NOT_RUN = {"explain.md", "guides/hub_kernel.md", "ir.md", "nvfuser.md"}


def blocks_of(page: str) -> list[re.Match[str]]:
    return list(BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")))


def cases() -> Iterator[object]:
    """Pages that have blocks with needs, and those needs: what runs where they are met."""
    for page in PAGES:
        if needs := sorted({b["needs"] for b in blocks_of(page)} - {None, "checkpoint"}):
            marks = [getattr(pytest.mark, need) for need in needs]
            yield pytest.param(page, set(needs), id=f"{page}-{'-'.join(needs)}", marks=marks)


# Without --all what is around fusions is called, as by conftest's call_by_call.
RUN = f"""
import precompiled, runpy, sys, traceback
from fusion_moe.frontends.inductor import compile_graph
precompiled.use()
if precompiled.level() != precompiled.O3:
    compile_graph.has_compiler = lambda: False
for file in sys.argv[1:]:
    try:
        runpy.run_path(file, run_name="__main__")
    except Exception:
        traceback.print_exc(file=sys.stdout)
    print({LAST!r}, end="", flush=True)
"""


def printed(pages: Sequence[str], have: set[str], folder: Path, **others: str) -> dict[str, str]:
    """What each page prints. Of blocks that cannot run there are only the lines, so that all others
    stand where the reader has them. others: programs that run before, and print too.
    """
    files = [folder / f"{name}_first.py" for name in others]
    for file, text in zip(files, others.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    for page in pages:
        parts = [
            b["code"] if run else "\n" * b["code"].count("\n")
            for b, run in zip(blocks_of(page), runs(page, have), strict=True)
        ]
        files.append(folder / FILES.get(page, f"{Path(page).stem}.py"))
        files[-1].write_text(
            "".join(f"{part}print({END!r}, end='')\n" for part in parts), encoding="utf-8"
        )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *files], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(zip((*others, *pages), done.stdout.split(LAST)[:-1], strict=True))


def runs(page: str, have: set[str]) -> list[bool]:
    """Which blocks run: without more those that need nothing; with more those that need it, and of
    the others those that bind what they use, or bind something and print nothing.
    """
    used, found = set[str](), list[bool]()
    for block in reversed(blocks_of(page)):
        body, needs = ast.parse(block["code"]).body, block["needs"]
        names = [n for n in ast.walk(ast.Module(body, [])) if isinstance(n, ast.Name)]
        bound = {name for statement in body for name in bound_by(statement)}
        silent = bool(bound) and block["shown"] is None
        found.append(needs in have if needs else not have or silent or not bound.isdisjoint(used))
        if found[-1]:
            used |= {name.id for name in names if isinstance(name.ctx, ast.Load)}
    return found[::-1]


def bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if not isinstance(statement, ast.Assign):
        return set()
    return {
        name.id
        for target in statement.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def as_printed(block: re.Match[str], out: str) -> str:
    """A block of the page, with what it prints below it."""
    if block["shown"] is None:
        assert out == "", f"the page does not show what this prints:\n{block['code']}"
        return block[0]
    return (
        block.string[block.start() : block.start("shown")]
        + out
        + block.string[block.end("shown") : block.end()]
    )


def check(page: str, have: set[str], out: str, update: bool) -> None:
    """The page is as it would be with what its blocks print."""
    text, blocks = (DOCS / page).read_text(encoding="utf-8"), blocks_of(page)
    assert (text.count("```python"), text.count("```text")) == (
        len(blocks),
        sum(b["shown"] is not None for b in blocks),
    )
    outs = out.split(END)
    assert len(outs) == len(blocks) + 1, out
    now = text
    each = zip(blocks, outs[:-1], runs(page, have), strict=True)
    for block, shown, run in reversed(list(each)):
        if run:
            now = now[: block.start()] + as_printed(block, shown) + now[block.end() :]
    if update:
        (DOCS / page).write_text(now, encoding="utf-8")
    else:
        assert now.splitlines() == text.splitlines(), (
            "if what is printed is right: pytest --update-golden"
        )


@pytest.fixture(scope="module")
def outs(request, tmp_path_factory) -> dict[str, str]:
    """Of the pages that tests ask for, and of QUOTED."""
    items = [i for i in request.session.items if "outs" in i.fixturenames]
    pages = [i.callspec.params["page"] for i in items if hasattr(i, "callspec")]
    return printed(pages, set(), tmp_path_factory.mktemp("pages"), quoted=QUOTED)


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES)
def test_blocks_print_what_the_page_shows(page, outs, request):
    check(page, set(), outs[page], request.config.getoption("--update-golden"))


@pytest.mark.parametrize(("page", "have"), list(cases()))
def test_blocks_that_need_more(page, have, tmp_path, request):
    out = printed([page], have, tmp_path)[page]
    check(page, have, out, request.config.getoption("--update-golden"))


@pytest.mark.once
def test_blocks_that_need_a_checkpoint(tmp_path):
    """With a small model under each name; `tiny-nvfp4` is made by the README."""
    floats = tmp_path / "Qwen3-30B-A3B"
    qwen3_moe(num_experts=4, hidden_size=64, moe_intermediate_size=32).save_pretrained(floats)
    quantize(floats, tmp_path / "tiny-nvfp4")
    for name in "DeepSeek-V4", "gpt-oss-20b":
        quantize(floats, tmp_path / name, to="mxfp4")
    pages = "checkpoints.md", "guides/distributed.md"
    for page, out in printed(pages, {"checkpoint"}, tmp_path).items():
        check(page, {"checkpoint"}, out, update=False)


@pytest.mark.exhaustive
def test_the_block_of_trl(tmp_path):
    """On the CPU; what is printed has times."""
    pytest.importorskip("trl")
    quantize(DOCS.parent / "examples" / "tiny_qwen3_moe", tmp_path / "tiny-nvfp4")
    assert (
        "'train_loss'"
        in printed(["guides/finetune.md"], {"checkpoint"}, tmp_path)["guides/finetune.md"]
    )


def test_every_page_with_python_is_run():
    with_python = {
        page for file in DOCS.rglob("*.md") if blocks_of(page := file.relative_to(DOCS).as_posix())
    }
    assert with_python == {*PAGES} | NOT_RUN


def messages() -> list[str]:
    """The messages of this library that the page of errors has as headings."""
    headings = re.findall(
        "^### `(.+)`$", (DOCS / "faq.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    # of transformers, of torch
    return [
        h
        for h in headings
        if not h.startswith(("Unknown quantization type", "We failed to resolve"))
    ]


def raised() -> Iterator[str]:
    """What the calls that the page is about raise, or warn of."""
    ops, x = torch.ops.fusion_moe, torch.randn(5, 64)
    weight = ops.nvfp4_quantize(torch.randn(4, 64, 64))
    tracked = (*weight[:2], weight[2].clone().requires_grad_())
    ends, ids, w = torch.tensor([1, 2, 3, 5]), torch.full((5, 2), 5), torch.rand(5, 2)
    experts = [
        NVFP4Experts.from_float(torch.randn(4, 128, 64), torch.randn(4, 64, 64), f)
        for f in ("bf16", "nvfp4")
    ]
    for call in (
        lambda: fusion_moe.quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4))),
        lambda: ops.nvfp4_quantize(torch.zeros(4, 24)),
        lambda: ops.nvfp4_grouped_mm(x, *weight, ends),
        lambda: ops.nvfp4_grouped_mm(x, *tracked, ends.int()).sum().backward(),
        lambda: experts[0](x, ids, w),
        lambda: experts[1](x, ids.clamp(max=3), w),
        lambda: target.check_formats(backends.TARGETS["cuda"], "int8", "experts"),
    ):
        with pytest.raises(fusion_moe.errors.Error) as error:
            call()
        yield str(error.value)
    with pytest.warns(UserWarning, match="ignored") as warned:
        fusion_moe.options.from_environment({"FUSION_MOE_TARGT": "cpu"})
    yield str(warned[0].message)


def test_messages_are_those_of_the_page():
    """Raised here, or, where that takes a GPU or another machine, in the code."""
    code = "".join(
        file.read_text(encoding="utf-8") for file in (DOCS.parent / "fusion_moe").rglob("*.py")
    )
    said = "\n".join(raised())
    missing = [
        m
        for m in messages()
        if not all(part in said for part in m.split("…"))
        and not all(part in code for part in m.split("…"))
    ]
    assert not missing


# Prints the pages that do not quote the code as it is.
QUOTED = f"""
import runpy
pages = runpy.run_path({str(DOCS.parent / "tools" / "reference.py")!r})["pages"]()
assert len(pages) == 5
print(*[page for page, text in pages.items() if page.read_text(encoding="utf-8") != text])
"""


@pytest.mark.once
def test_pages_quote_the_code_as_it_is(outs):
    """In a process in which no other test, and no page yet, has registered operations."""
    assert outs["quoted"].split() == [], "python tools/reference.py"


def test_pages_do_not_say_who_wrote_them():
    """By another user's home the same pages are written."""
    pages = (DOCS / "reference").glob("*.md")
    assert [page.name for page in pages if str(Path.home()) in page.read_text("utf-8")] == []
