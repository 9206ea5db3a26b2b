"""The page in chromium: clicks find segments, nothing is requested, nothing is executed, and it
fits narrow and wide, light and dark.

`pytest -m browser --basetemp=folder` keeps the screenshots.
"""

from __future__ import annotations

import shutil

import pages
import pytest
import torch
from test_backward import HIDDEN, TOKENS, Layer as Training

from fusion_moe import explain

pytestmark = pytest.mark.browser
SIZES = ((1280, 900), (400, 800))


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """opened(report, **context) -> a page, after which nothing was logged and nothing requested but
    the file itself.
    """
    said, requested, contexts = [], [], []

    def open_(report, **context):
        file = tmp_path / "report.html"
        report.save(file)
        contexts.append(chromium.new_context(**context))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: requested.append(request.url) if request.url != file.as_uri() else None,
        )
        page.goto(file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert (said, requested) == ([], [])


@pytest.fixture(scope="module")
def report():
    return pages.measured(pages.explained(target="cpu"))


def selected(page):
    """What is marked, and whether it can be seen in its pane."""
    return page.eval_on_selector_all(
        ".pane .selected",
        """marked => marked.map(e => {
            const pane = e.closest(".scroll").getBoundingClientRect();
            const at = e.getBoundingClientRect();
            return [e.dataset.segments, at.top >= pane.top - 1 && at.top < pane.bottom];
        })""",
    )


def test_a_segment_is_found_in_every_pane(opened, report):
    page = opened(report)
    for s in report.segments:
        page.click(f".box[data-segments='{s.id}']")
        assert page.get_attribute(f".box[data-segments='{s.id}']", "aria-pressed") == "true"
        assert selected(page) == [["fusion0.0 fusion0.1", True], [s.id, True], [s.id, True]]
    page.keyboard.press("Escape")
    assert selected(page) == []


def test_a_line_finds_its_segments(opened, report):
    page = opened(report)
    page.click(".line.fused")
    assert [ids for ids, _ in selected(page)] == [
        "fusion0.0 fusion0.1",
        *[s.id for s in report.segments] * 2,
    ]
    page.click(".pane:last-child .block >> nth=1")
    assert [ids for ids, _ in selected(page)] == ["fusion0.0 fusion0.1", "fusion0.1", "fusion0.1"]


def test_reasons_are_text(opened, report):
    page = opened(report)
    assert report.not_fused[0].why in page.inner_text(".unfused")
    assert report.segments[1].boundary in page.inner_text(".reasons >> nth=0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_can_be_read(opened, report, tmp_path, width, height, scheme):
    page = opened(report, viewport={"width": width, "height": height}, color_scheme=scheme)
    page.click(".box >> nth=1")
    page.mouse.move(0, 0)
    shot = page.screenshot(full_page=True, path=tmp_path / f"{width}-{scheme}.png")
    assert len(shot) > 20_000
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (brightness(page, "backgroundColor") > brightness(page, "color")) == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_page_of_a_run_can_be_read(opened, tmp_path, width, height, scheme):
    view = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    page = opened(pages.harmful_run(), **view)
    page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    page.screenshot(full_page=True, path=tmp_path / f"run-{width}-{scheme}.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every((i) => i.naturalWidth > 0)")
    assert (brightness(page, "backgroundColor") > brightness(page, "color")) == (scheme == "light")


def test_a_broad_graph_is_a_list_where_there_is_no_room(opened):
    """A backward, several of whose segments read from the same one."""
    broad = explain(
        Training(), torch.zeros(TOKENS, HIDDEN).bfloat16().requires_grad_(), backward=True
    )
    page = opened(broad, viewport={"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.click(f".box[data-segments='{broad.segments[-1].id}']")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert [broad.segments[-1].id, True] in selected(page)


def brightness(page, property):
    """Of a colour of the page, 0 to 255."""
    return page.evaluate(
        f"Math.max(...getComputedStyle(document.body).{property}.match(/\\d+/g).map(Number))"
    )


def test_text_that_means_harm_is_text(opened, report):
    page = opened(pages.harmful(report))
    page.click(".box >> nth=0")
    assert page.evaluate("window.harmed") is None
    assert pages.HARM in page.inner_text(".warning >> nth=0")
    assert page.locator("img, iframe").count() == 0


def test_in_a_notebook(chromium, report):
    page = chromium.new_page()
    page.set_content(f"<h1>notebook</h1>{report._repr_html_()}")
    frame = page.frame_locator("iframe")
    frame.locator(".box >> nth=1").click()
    assert frame.locator(".block.selected").count() == 2
    page.close()
