"""The page: a template, its style, its script, and the sections that a report has."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template

from ..data import ReportData
from .glossary import glossary
from .graph import graph
from .heading import heading
from .markup import joined
from .panes import panes
from .stages import stages
from .tables import launches, loads, segments, times

_SECTIONS = (heading, graph, panes, segments, times, loads, launches, stages, glossary)


def page(report: ReportData) -> str:
    """The whole file. Its content security policy forbids loading anything and running any script
    but the page's own.
    """
    script = _part("script.js")
    return Template(_part("page.html")).substitute(
        style=_part("style.css"),
        script=script,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
        body=joined(part(report) for part in _SECTIONS),
    )


def frame(text: str) -> str:
    """A page inside a notebook, isolated from the rest of it."""
    style = "width: 100%; height: 42rem; border: 1px solid #8888"
    return (
        f'<iframe sandbox="allow-scripts" title="fusion_moe report" style="{style}" '
        f'srcdoc="{escape(text)}"></iframe>'
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
