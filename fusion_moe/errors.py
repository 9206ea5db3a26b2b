"""Every error of the library. Each says what was found, what was expected, what to do, and where.

The classes also derive from the builtin that a caller would expect (`ValueError`, `TypeError`, ...), so that code which knows
nothing of fusion_moe can catch them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """Base of all errors of fusion_moe.

    found: what was seen, with names and numbers; expected: what would have been right; todo: what the user can do;
    where: the operation, argument, module or source line it is about.
    """

    def __init__(self, found: str, *, expected: str = "", todo: str = "", where: str = ""):
        self.found, self.expected, self.todo, self.where = found, expected, todo, where
        parts = [found, expected and f"expected {expected}", todo]
        super().__init__((f"{where}: " if where else "") + "; ".join(p for p in parts if p))

    def at(self, where: str) -> Error:
        """The same error with a place in front, for callers that know more about it."""
        place = f"{where}: {self.where}" if self.where else where
        return type(self)(self.found, expected=self.expected, todo=self.todo, where=place)


class ShapeError(Error, ValueError):
    """Sizes that disagree, or a size that the format cannot take (K not a multiple of 16)."""


class DtypeError(Error, TypeError):
    """A tensor of another dtype than the operation takes."""


class DeviceError(Error, ValueError):
    """Tensors of one call that live on different devices."""


class GroupsError(Error, ValueError):
    """Group ends or expert ids that decrease, are negative, or reach past the rows or groups there are."""


class NonFiniteError(Error, ValueError):
    """NaN or infinity, which quantization would lose silently."""


class UnsupportedError(Error, NotImplementedError):
    """Something that is right to ask for but that this target, model or version cannot do."""


class OptionError(Error, ValueError):
    """An unknown option, or a value that the option does not take."""


class BuildError(Error, RuntimeError):
    """A kernel that was not compiled or does not load. The message has the compiler's first errors and says where the source is."""


class FusionError(Error, ValueError):
    """A Fusion that does not verify; the message shows the operation among its neighbours."""


class ParseError(Error, ValueError):
    """Text that is not a printed Fusion, or no table of kernels."""


class CheckpointError(Error, ValueError):
    """A checkpoint that is incomplete, contradicts itself, or is stored in a way that is not read. The message has file and tensor."""


class TranslatorError(Error, RuntimeError):
    """A translator that failed, returned another type than its operation's fake, or is registered twice."""


class Untranslatable(Error):
    """Raised by a translator to refuse a call: `raise Untranslatable("K = 24 is not a multiple of 16")`.

    The call stays an ordinary call of the operation, and `explain` shows the sentence.
    """


def need_one_of(name: str, value: object, known: Iterable[str], *, todo: str = "", where: str = "") -> None:
    """OptionError unless an option has one of the values that it takes. todo: what to do if none of them is like it."""
    choices = tuple(known)
    if value not in choices:
        todo = did_you_mean(str(value), choices) or todo
        raise OptionError(f"{name} = {value!r}", expected=f"one of {', '.join(choices)}", todo=todo, where=where)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to do about a name that is not known: "did you mean 'y'?", or "" if none is like it."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else ""
