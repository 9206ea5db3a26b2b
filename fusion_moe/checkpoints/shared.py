"""Parts that stand for several weights, such as one scale for all shards of a table: each weight
gets them under its own name.

    …table.weight_scale               of …table.shard_0.weight, …table.shard_1.weight
    …experts.up_proj.weight_scale_2   of …experts.0.up_proj.weight, …experts.1.up_proj.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from .headers import Entry, Read, Reads
from .schemes import SCHEMES, Scheme, StoredPart


def given_to_each(tensors: Mapping[str, Entry], read: Read) -> tuple[dict[str, Entry], Reads]:
    """The tensors, with those of several weights once for each of these, and what reads them.

    Only weights that have not all parts of any scheme get some.
    """
    suffixes = {part.suffix for scheme in SCHEMES for part in scheme.parts[1:]}
    elements = {scheme.parts[0].suffix for scheme in SCHEMES} - {""}
    alone = {
        name
        for suffix in suffixes - {""}
        for name in tensors
        if name.endswith(suffix)
        and not any(name.removesuffix(suffix) + of in tensors for of in elements)
    }
    entries, reads = dict(tensors), Reads()
    if not alone:
        return entries, reads
    weights = [(s, name) for s in SCHEMES for name in _weights(s, tensors)]
    missing_of = {
        (scheme, name): [p for p in scheme.parts if not _is(p, tensors.get(name + p.suffix))]
        for scheme, name in weights
    }
    whole = {name for (_, name), missing in missing_of.items() if not missing}
    for (_, name), missing in missing_of.items():
        around = {part.suffix: _around(name, part.suffix, alone) for part in missing}
        if name in whole or not all(
            _is(part, tensors.get(of)) for part, of in zip(missing, around.values(), strict=True)
        ):
            continue
        for suffix, of in around.items():
            entries[name + suffix] = replace(tensors[of], name=name + suffix)
            reads[name + suffix] = partial(read, of)
            entries.pop(of, None)
    return entries, reads


def _is(part: StoredPart, entry: Entry | None) -> bool:
    return entry is not None and entry.dtype in part.dtypes


def _weights(scheme: Scheme, tensors: Mapping[str, Entry]) -> Iterator[str]:
    """The names of what may be elements of weights."""
    elements = scheme.parts[0]
    for name, entry in tensors.items():
        if elements.suffix and name.endswith(elements.suffix) and _is(elements, entry):
            yield name.removesuffix(elements.suffix)


def _around(name: str, suffix: str, alone: set[str]) -> str:
    """The nearest part that a weight may share: that of its name without a number, or of a module
    around it; "" if there is none.
    """
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    names = [".".join(words[:i] + words[i + 1 :]) for i in reversed(numbers)]
    names += [".".join(words[:end]) for end in range(len(words) - 1, 0, -1)]
    return next((one + suffix for one in names if one + suffix in alone), "")
