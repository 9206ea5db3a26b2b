"""A page of the documentation is true: its Python blocks, run as the one file that they are, print
the text blocks below them.

Blocks below `<!-- needs: thunder -->`, `nvfuser` or `gpu` run where there is one, those below
`checkpoint` nowhere. `pytest --update-golden` writes what is printed into the page. (`make docs`
fails where a warning comes of building the site.)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

import fusion_moe
from fusion_moe import backends, target
from fusion_moe.nn import NVFP4Experts

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(
    r"(?:<!-- needs: (?P<needs>\w+) "
    r"-->\n)?```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?",
    re.DOTALL,
)
END = "\f\n"  # printed after each block, from the empty line between two
# Pages of one name run in one process, one after the other, each as a file of its own: importing
# takes longer than most blocks.
RUN = {
    "translators": ("translators.md",),
    "training": ("training.md",),
    "checkpoints": ("checkpoints.md",),
    "guides": (
        "start/quickstart.md",
        "start/first_compile.md",
        *(f"guides/{name}.md" for name in ("generate", "memory", "export", "finetune")),
        "guides/distributed.md",
    ),
    "reference": (
        "reference/options.md",
        "reference/errors.md",
        "extend/backends.md",
        "extend/converters.md",
        "extend/encodings.md",
        "extend/layouts.md",
    ),
    "cuda": ("guides/cuda_graphs.md",),
}
ONCE = {"guides", "reference", "training", "translators"}  # in the base lane alone
FILES = {"translators.md": "geglu.py"}  # where a page says what it is called
# Python that is part of what surrounds it, or needs files that are not here.
NOT_RUN = {"explain.md", "ir.md", "nvfuser.md"}


def blocks_of(page: str) -> list[re.Match[str]]:
    return list(BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")))


def cases() -> Iterator[object]:
    """Pages, and what their blocks may need: nothing, or all that any of them does, where that
    is.
    """
    for name, pages in RUN.items():
        yield pytest.param(pages, (), id=name, marks=[pytest.mark.once] if name in ONCE else [])
        if needs := sorted(
            {b["needs"] for page in pages for b in blocks_of(page)} - {None, "checkpoint"}
        ):
            yield pytest.param(
                pages,
                tuple(needs),
                id=f"{name}-{'-'.join(needs)}",
                marks=[getattr(pytest.mark, n) for n in needs],
            )


def printed(
    pages: dict[str, list[re.Match[str]]], can_run: set[str | None], folder: Path
) -> dict[str, list[str]]:
    """What each block of each page prints. Of blocks that cannot run there are only the lines, so
    that all others stand where the reader has them.
    """
    files = []
    for page, blocks in pages.items():
        parts = [
            b["code"] if b["needs"] in can_run else "\n" * b["code"].count("\n") for b in blocks
        ]
        files.append(folder / FILES.get(page, f"{Path(page).stem}.py"))
        files[-1].write_text(
            "".join(f"{part}print({END!r}, end='')\n" for part in parts), encoding="utf-8"
        )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = (
        "import precompiled, runpy, sys; precompiled.use(); "
        "[runpy.run_path(file, run_name='__main__') for file in sys.argv[1:]]"
    )
    done = subprocess.run(
        [sys.executable, "-c", run, *files], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    out = iter(done.stdout.split(END))
    return {page: list(islice(out, len(blocks))) for page, blocks in pages.items()}


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


@pytest.mark.parametrize(("pages", "have"), list(cases()))
def test_blocks_print_what_the_page_shows(pages, have, tmp_path, request):
    found, can_run = {page: blocks_of(page) for page in pages}, {None, *have}
    outs = printed(found, can_run, tmp_path)
    for page, blocks in found.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        assert (text.count("```python"), text.count("```text")) == (
            len(blocks),
            sum(b["shown"] is not None for b in blocks),
        )
        now = text
        for block, out in reversed(list(zip(blocks, outs[page], strict=True))):
            if block["needs"] in can_run:
                now = now[: block.start()] + as_printed(block, out) + now[block.end() :]
        if request.config.getoption("--update-golden"):
            (DOCS / page).write_text(now, encoding="utf-8")
        else:
            assert now.splitlines() == text.splitlines(), (
                "if what is printed is right: pytest --update-golden"
            )


def test_every_page_with_python_is_run():
    with_python = {
        page for file in DOCS.rglob("*.md") if blocks_of(page := file.relative_to(DOCS).as_posix())
    }
    assert with_python == {page for pages in RUN.values() for page in pages} | NOT_RUN


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


@pytest.mark.once
def test_pages_quote_the_code_as_it_is():
    """In a process of its own: other tests register operations."""
    tool = DOCS.parent / "tools" / "reference.py"
    compare = (
        f"import runpy; pages = runpy.run_path({str(tool)!r})['pages']()\n"
        "assert len(pages) == 5\n"
        "print(*[page for page, text in pages.items() if page.read_text(encoding='utf-8') != text])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", compare], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [], "python tools/reference.py"
