"""HTML made of elements: all text in it is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Html(str):
    """Markup. Any other str is text, which is escaped."""

    __slots__ = ()


def element(name: str, *children: str | None, **attributes: object) -> Html:
    """An element. Attributes that are None are left out; `class_` is `class`, `data_x` is
    `data-x`.
    """
    shown = "".join(
        f' {_name(key)}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{shown}>{joined(children)}</{name}>")


def joined(children: Iterable[str | None]) -> Html:
    """Children one after the other; None is left out."""
    return Html("".join(x if isinstance(x, Html) else escape(x) for x in children if x is not None))


def section(title: str, *children: str | None, **attributes: object) -> Html:
    """A part of the page under a heading."""
    return element("section", element("h2", title), *children, **attributes)


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
