"""Every error of the library. Each says what was found, what was expected, what to do, and where.

The classes also derive from the builtin that a caller would expect (`ValueError`, `TypeError`,
...), so that code which knows nothing of fusion_moe can catch them.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable


class Error(Exception):
    """Base of all errors of fusion_moe.

    found: what was seen, with names and numbers; expected: what would have been right; todo: what
    the user can do; where: the operation, argument, module or source line that the error is about.
    The message is safe to print (`printable`).
    """

    def __init__(self, found: str, *, expected: str = "", todo: str = "", where: str = ""):
        self.found, self.expected, self.todo, self.where = found, expected, todo, where
        parts = [found, expected and f"expected {expected}", todo]
        super().__init__(
            printable((f"{where}: " if where else "") + "; ".join(p for p in parts if p))
        )

    def at(self, where: str) -> Error:
        """The same error with `where` put in front of its place, for callers that know more about
        it.
        """
        place = f"{where}: {self.where}" if self.where else where
        return type(self)(self.found, expected=self.expected, todo=self.todo, where=place)

    def advise(self, todo: str) -> Error:
        """The same error with one more thing that the user can do."""
        both = f"{self.todo}, or {todo}" if self.todo else todo
        return type(self)(self.found, expected=self.expected, todo=both, where=self.where)


class ShapeError(Error, ValueError):
    """Sizes that disagree, or a size that the format cannot take (K not a multiple of 16)."""


class DtypeError(Error, TypeError):
    """A tensor whose dtype the operation does not take."""


class DeviceError(Error, ValueError):
    """Tensors of one call that are on different devices."""


class GroupsError(Error, ValueError):
    """Group ends that decrease, or group ends or expert ids that are negative or past the last row
    or group.
    """


class NonFiniteError(Error, ValueError):
    """NaN or infinity, which quantization would lose silently."""


class UnsupportedError(Error, NotImplementedError):
    """A valid request that this target, model or version cannot fulfil."""


class OptionError(Error, ValueError):
    """An unknown option, or a value that the option does not take."""


class BuildError(Error, RuntimeError):
    """A kernel that did not compile or does not load. The message has the compiler's first errors
    and says where the source is.
    """


class PinError(Error, RuntimeError):
    """Memory of the host that could not be pinned for a GPU."""


class WorkerError(Error, RuntimeError):
    """Rows of offloaded experts that the CPU did not compute for a GPU: its worker ended, was late,
    or found bad input.
    """


class RankError(Error, RuntimeError):
    """Another rank of a group that sent nothing in time, or is in another call than this one."""


class FusionError(Error, ValueError):
    """A Fusion that fails verification; the message shows the operation among its neighbours."""


class ParseError(Error, ValueError):
    """Text that is not a printed Fusion, or not a table of kernels."""


class CheckpointError(Error, ValueError):
    """A checkpoint that is incomplete, contradicts itself, or is stored in an unsupported way. The
    message names file and tensor.
    """


class TranslatorError(Error, RuntimeError):
    """A translator that failed, returned a type other than that of its operation's fake, or is
    registered twice.
    """


class PluginError(Error, RuntimeError):
    """An installed package whose entry point fails, or whose backend is for another version of the
    interface.
    """


class Untranslatable(Error):
    """Raised by a translator to refuse a call: `raise Untranslatable("K = 24 is not a multiple of
    16")`.

    The call remains an ordinary call of the operation, and `explain` shows the sentence.
    """


def printable(text: str) -> str:
    """The text with all but printable characters and line breaks escaped: names in files may hold
    escape sequences for terminals.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def in_one_line(words: object) -> str:
    """What another library says, which may quote a whole file, as a part of a message."""
    return textwrap.shorten(str(words), 1000, placeholder=" ...")


_MANY = 16  # names that a message lists


def need(value: object, of: type, *, expected: str, todo: str = "", where: str = "") -> None:
    """OptionError unless `value` is of a class."""
    if not isinstance(value, of):
        actual = f"a {type(value).__name__}"
        raise OptionError(actual, expected=expected, todo=todo, where=where)


def need_one_of(
    name: str, value: object, known: Iterable[str], *, todo: str = "", where: str = ""
) -> None:
    """OptionError unless `value` is one of the known ones. todo: advice if none of them resembles
    it.
    """
    choices = tuple(known)
    if value not in choices:
        todo = did_you_mean(str(value), choices) or todo
        raise OptionError(
            f"{name} = {value!r}", expected=one_of(str(value), choices), todo=todo, where=where
        )


def one_of(name: str, known: Iterable[str]) -> str:
    """The known names as a message lists them: of many, those that resemble the unknown one."""
    choices = [*known]
    if len(choices) <= _MANY:
        return f"one of {', '.join(choices)}"
    near = difflib.get_close_matches(name, choices, _MANY // 2, 0.0)
    return f"one of {', '.join(near)} and {len(choices) - len(near)} others"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Advice about an unknown name: "did you mean 'y'?", or "" if no known name resembles it."""
    spelled = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), list(spelled), 1)
    return f"did you mean {spelled[near[0]]!r}?" if near else ""
