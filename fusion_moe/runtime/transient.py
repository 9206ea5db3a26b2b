"""Transient errors of the system. Nothing is concluded from them: what is remembered would be wrong
for good.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ..errors import BuildError

ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
TODO = (
    "the process is out of files, processes or memory: raise its limits (ulimit -n, -u, -v), "
    "and call again"
)


@contextlib.contextmanager
def missing_ok(what: str) -> Iterator[None]:
    """Suppresses an OSError, for what may not be there. BuildError for a transient one."""
    try:
        yield
    except OSError as error:
        if error.errno in ERRNOS:
            raise BuildError(
                f"{what} cannot be read or run: {error.strerror}", todo=TODO
            ) from error
