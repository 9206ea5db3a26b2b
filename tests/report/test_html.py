"""The page that a report is saved as: one file, complete, with every text escaped."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser

import pages
import pytest

from fusion_moe.report.difference import differences
from fusion_moe.report.html import page
from fusion_moe.report.html.colours import coloured

VOID = {"meta", "link", "img"}


class Read(HTMLParser):
    """The elements of a page in order, with their attributes; `unbalanced`: end tags that end
    nothing.
    """

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def report():
    return pages.explained(target="cpu")


@pytest.fixture(scope="module")
def many(report):
    """Pages of reports with and without everything that a report may have."""
    nothing = pages.fusion_moe.explain(lambda: 3)
    return {
        "plain": page(report),
        "measured": page(pages.measured(report)),
        "harmful": page(pages.harmful(report)),
        "nothing": page(nothing),
        "cuda": page(pages.explained(target="cuda")),
        "hopper": page(pages.explained(target="sm_90")),
    }


@pytest.mark.parametrize("name", ["plain", "measured", "harmful", "nothing", "cuda", "hopper"])
def test_it_is_well_formed_and_loads_and_runs_nothing_but_itself(many, name):
    read = Read(many[name])
    assert (read.open, read.unbalanced) == ([], [])
    assert len(read.all("script")) == len(read.all("style")) == 1
    loading = {"img", "iframe", "object", "embed", "video", "audio", "base", "form", "a"}
    assert not {tag for tag, _ in read.elements} & loading
    for _, attributes in read.elements:
        assert not attributes.keys() & {"src", "srcset", "action", "onclick", "onerror", "onload"}
        assert attributes.get("href") in (None, "data:,")
    style = re.search(r"<style>(.*?)</style>", many[name], re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [m["content"] for m in read.all("meta") if "http-equiv" in m]
    script = re.search(r"<script>(.*?)</script>", many[name], re.DOTALL)[1]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert policy == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "
        f"'sha256-{digest}'"
    )
    assert "innerHTML" not in script


def plain(page: str) -> str:
    """The text of a page without syntax colours, unescaped."""
    return unescape(re.sub(r'<span class="\w+">(.*?)</span>', r"\1", page))


def test_users_text_is_escaped(many):
    assert "<script>window" not in many["harmful"]
    assert "<img" not in many["harmful"]
    assert plain(many["harmful"]).count(pages.HARM) >= 10


def test_every_segment_is_in_the_graph_and_in_every_pane(report, many):
    linked = [
        attributes["data-segments"].split()
        for _, attributes in Read(many["plain"]).elements
        if "data-segments" in attributes
    ]
    for s in report.segments:
        # its box, its source line, its IR, its kernel
        assert sum(s.id in ids for ids in linked) == 4
    assert "return x + self.experts(x, ids, weights)" in plain(many["plain"])
    assert '<span class="word">return</span>' in many["plain"]
    assert "#include" in many["plain"]


def test_reasons_and_boundaries_are_there(report, many):
    text = unescape(many["plain"])
    assert all(s.boundary in text for s in report.segments)
    assert all(x.why in text for x in report.not_fused)
    listing = text[text.index("<h3>source") : text.index("<h3>IR")]
    assert "title=" not in listing
    assert all(x.why in listing for x in report.not_fused)
    marked = ", ".join(re.findall(r"<small>(.*?)</small>", listing))
    assert all(s.id in marked for s in report.segments)


@pytest.mark.parametrize(
    ("cpp", "text", "html"),
    [
        (False, "if x < 2.5e3:  # <b>", "[word if] x &lt; [number 2.5e3]:  [comment # &lt;b&gt;]"),
        (False, '"""a\nb""" + \'#\'', '[text """a]\n[text b"""] + [string \'#\']'),
        (False, "fd.ops.define(xif, i0)", "fd.ops.define(xif, i0)"),
        (
            True,
            "#include <x>\n  /* a\n if */ i64",
            "[word #include] &lt;x&gt;\n  [comment /* a]\n[comment  if */] i64",
        ),
        (True, "__global__ void f() // 1", "[word __global__] [word void] f() [comment // 1]"),
    ],
)
def test_syntax_colours(cpp, text, html):
    spans = re.sub(r"\[(\w+) (.*?)\]", r'<span class="\1">\2</span>', html)
    assert coloured(text, cpp=cpp) == spans.replace('"""', "&#34;&#34;&#34;").replace("'", "&#39;")


def test_equal_calls_with_equal_reasons_are_one_box(report):
    (call,) = report.not_fused
    calls = tuple(replace(call, source=f"model.py:{i}, in forward: ...") for i in range(6))
    text = page(replace(report, not_fused=(*calls, replace(call, why="another reason"))))
    assert text.count("<b>aten.topk.default") == 2
    assert "<b>aten.topk.default x 6</b>" in text
    assert "model.py:3, " in text
    assert "model.py:4, " not in text


def test_times_and_loads_where_there_are_some(many):
    assert "Not measured" in many["plain"]
    assert "250 us, 2.5 x memory bound" in many["measured"]
    assert "12 rows in 4 groups, at most 7, 1 empty" in many["measured"]
    assert "plain torch runs fusion0.1: no C++ compiler" in many["measured"]
    assert "small_m" in many["cuda"]
    assert "(emitted, unexecuted)" in many["cuda"]


def test_notebooks_show_it_in_a_frame(report):
    (attributes,) = Read(report._repr_html_()).all("iframe")
    assert attributes["srcdoc"] == page(report)
    assert attributes["sandbox"] == "allow-scripts"
    assert Read(report._repr_html_()).all("p") == []


def test_stages_are_told_by_what_they_change():
    assert differences("a\nb\nc", "a\nx\nc") == ["  a", "- b", "+ x", "  c"]
    assert differences("a", "a") == differences("t1 = relu(i0)", "t2 = relu(i0)") == []
    assert differences("\n".join("abcdefghi"), "\n".join("xbcdefghy")) == [
        "- a",
        "+ x",
        "  b",
        "  c",
        "...",
        "  g",
        "  h",
        "- i",
        "+ y",
    ]
