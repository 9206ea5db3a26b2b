"""Makes matplotlib's SVGs small enough to be committed: what looks the same, without metadata and
repeated styles.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
_DIGITS = 1  # behind the point, of hundreds of points
_NUMBER = re.compile(r"-?\d+\.\d+")


def small(text: str) -> str:
    """The same picture."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(text)
    _drop(root)
    names = dict.fromkeys(
        re.findall(r"#([\w-]+)[\")]", ElementTree.tostring(root, encoding="unicode"))
    )
    short, styles = {name: f"n{i}" for i, name in enumerate(names)}, dict[str, str]()
    for element in root.iter():
        _shorten(element, short, styles)
    _unwrap(root)
    _merge(root)
    _share(root)
    sheet = ElementTree.Element(f"{{{_SVG}}}style")
    sheet.text = "*{stroke-linejoin:round;stroke-linecap:butt}" + "".join(
        f".{name}{{{style}}}" for style, name in styles.items()
    )
    root.insert(0, sheet)
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>") + "\n"


def _drop(root: ElementTree.Element) -> None:
    """Metadata; and clips, since axes show all of their data."""
    for parent in list(root.iter()):
        parent.attrib.pop("clip-path", None)
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style", "clipPath"):
                parent.remove(child)


def _shorten(element: ElementTree.Element, short: dict[str, str], styles: dict[str, str]) -> None:
    """One element: names, those that nothing refers to left out, spaces and digits; its style as a
    class.
    """
    attributes = element.attrib
    if name := attributes.pop("id", ""):
        attributes |= {"id": short[name]} if name in short else {}
    for name in {_LINK, "href"} & attributes.keys():
        attributes["href"] = re.sub(r"(?<=#)[\w-]+", lambda m: short[m[0]], attributes.pop(name))
    for name in {"d", "x", "y", "width", "height", "transform"} & attributes.keys():
        attributes[name] = " ".join(_NUMBER.sub(_rounded, attributes[name]).split())
    if not set("CQ") & set(attributes.get("d", "C")):
        attributes["d"] = attributes["d"].replace("L ", "")  # what follows a move is a line
    if style := re.sub(r"\s*([:;])\s*", r"\1", attributes.pop("style", "")):
        attributes["class"] = styles.setdefault(style, f"s{len(styles)}")
    element.tail = None
    if not (element.text or "").strip():
        element.text = None


def _merge(root: ElementTree.Element) -> None:
    """Open lines that look the same and follow each other, as one path: grids, frames."""
    for parent in root.iter():
        last: ElementTree.Element | None = None
        for child in list(parent):
            is_line = (
                child.tag.endswith("}path")
                and "id" not in child.attrib
                and "z" not in child.attrib["d"]
            )
            if is_line and last is not None and last.attrib["class"] == child.attrib["class"]:
                last.attrib["d"] += f" {child.attrib['d']}"
                parent.remove(child)
            elif not child.tag.endswith("}text"):  # the labels of a grid's lines stand beside it
                last = child if is_line else None


def _share(root: ElementTree.Element) -> None:
    """Markers that follow each other and look the same get their look from a group."""
    for parent in list(root.iter()):
        group: ElementTree.Element | None = None
        for child in list(parent):
            look = child.attrib.get("class", "")
            if not child.tag.endswith("}use") or not look:
                group = None
            elif group is None or group.attrib["class"] != look:
                group = ElementTree.Element(f"{{{_SVG}}}g", {"class": look})
                parent.insert(list(parent).index(child), group)
            if group is not None:
                parent.remove(child)
                del child.attrib["class"]
                group.append(child)


def _rounded(number: re.Match[str]) -> str:
    """Scales keep their digits."""
    value = float(number[0])
    return number[0] if abs(value) < 0.1 else f"{round(value, _DIGITS):g}"


def _unwrap(parent: ElementTree.Element) -> None:
    """Groups that say nothing give way to what is in them; empty ones go."""
    for child in list(parent):
        _unwrap(child)
        if child.tag in (f"{{{_SVG}}}g", f"{{{_SVG}}}defs") and (
            len(child) == 0 or (child.tag.endswith("}g") and not child.attrib)
        ):
            at = list(parent).index(child)
            parent[at : at + 1] = list(child)
