"""Failures of the system that may be over at the next call. Nothing is concluded from them: what is remembered would be wrong for good."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ..errors import BuildError

ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
TODO = "the process is out of files, processes or memory: raise its limits (ulimit -n, -u, -v), and call again"


@contextlib.contextmanager
def none_there(what: str) -> Iterator[None]:
    """Suppresses the system's errors, for what may not be there. A failure that may pass is a BuildError."""
    try:
        yield
    except OSError as error:
        if error.errno in ERRNOS:
            raise BuildError(f"{what} cannot be read or run: {error.strerror}", todo=TODO) from error
