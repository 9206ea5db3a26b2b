"""What comes before the work of a command: exit codes, Ctrl-C, and the import of the library."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

FINE, PROBLEMS, USAGE, UNSUPPORTED = range(4)
STOPPED = 130  # as shells have it for Ctrl-C


def load() -> None:
    """Imports the library: what a command calls once its arguments are right. From then on Ctrl-C
    is a KeyboardInterrupt, and what is begun is cleaned up; before, the process ends at once, since
    packages do not expect one while they are imported.
    """
    import rich.console  # noqa: F401  (what is printed in the end needs it)
    import safetensors  # noqa: F401

    from .. import api  # noqa: F401

    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(*_: object) -> NoReturn:
    """Ends the process, as a handler of SIGINT."""
    os.write(2, b"fusion-moe: interrupted\n")
    os._exit(STOPPED)
