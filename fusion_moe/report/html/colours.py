"""Syntax colours: HTML of Python, of which IR is a part, and of C++."""

from __future__ import annotations

import keyword
import re

from markupsafe import Markup, escape

_STRING = r"""(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
_NUMBER = r"(?P<number>\b\d[\w.]*)"
_PYTHON = re.compile(
    rf'(?P<comment>#.*)|(?P<text>"""[\s\S]*?""")|{_STRING}|{_NUMBER}'
    rf"|(?P<word>\b(?:{'|'.join(keyword.kwlist)})\b)"
)
_CPP_WORDS = """alignas auto bool break case char class const constexpr continue double else enum
    extern false float for if inline int long namespace nullptr operator private public return short
    sizeof static struct switch template this true typename unsigned using void volatile while"""
_CPP = re.compile(
    rf"(?P<comment>//.*|/\*[\s\S]*?\*/)|{_STRING}|{_NUMBER}"
    rf"|(?P<word>(?m:^\s*#\s*\w+)|\b(?:{'|'.join(_CPP_WORDS.split())}|__\w+__)\b)"
)


def coloured(text: str, *, cpp: bool = False) -> Markup:
    """The text, escaped, its tokens in spans of their class; none goes on in the next line."""
    html, end = Markup(), 0
    for token in (_CPP if cpp else _PYTHON).finditer(text):
        lines = [
            Markup('<span class="{}">{}</span>').format(token.lastgroup, line)
            for line in token[0].split("\n")
        ]
        html += escape(text[end : token.start()]) + Markup("\n").join(lines)
        end = token.end()
    return html + escape(text[end:])
