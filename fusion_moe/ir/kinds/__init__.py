"""The table of operations. A new operation is one row in one of these files: its type rule, its
meaning, its derivative. Packages add some by the hook `plugins.operations`.
"""

from collections.abc import Iterator, Mapping

from ... import plugins
from ..core import OpKind
from . import grouped, pointwise, quantized, router, rows, shape

OWN: dict[str, OpKind] = {
    kind.name: kind
    for file in (pointwise, shape, router, rows, quantized, grouped)
    for kind in file.TABLE
}


class _Kinds(Mapping[str, OpKind]):
    """All operations, by name; those of packages when a name is not one of ours, or all are asked
    for.
    """

    def __getitem__(self, name: str) -> OpKind:
        return OWN[name] if name in OWN else _of_packages()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*OWN, *_of_packages())))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _of_packages() -> dict[str, OpKind]:
    return {kind.name: kind for operations in plugins.operations for kind in operations()}


KINDS: Mapping[str, OpKind] = _Kinds()
