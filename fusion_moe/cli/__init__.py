"""The command line `fusion-moe`, also as `python -m fusion_moe.cli`. A file for each command;
output.py prints what one returns.

A command checks its arguments before it calls `load` of start.py, which imports torch and takes
seconds: its module imports neither torch nor rich, nor what imports them. What needs them is a file
beside it, as run_model.py is beside run.py.

Exit codes: 0 fine, 1 problems, 2 usage, 3 unsupported, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys

from .start import PROBLEMS, STOPPED, UNSUPPORTED, end

__all__ = ["main"]

_NEEDS = ("typer", "rich", "safetensors")


def main() -> None:
    """Runs the command that the process was called with."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not that of `nohup`
        signal.signal(signal.SIGINT, end)
    import logging  # once Ctrl-C is quiet
    import warnings

    stopped = list[int]()
    atexit.register(lambda: stopped and os._exit(*stopped))  # registered first, so called last
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fusion-moe: %(message)s"))
    logging.getLogger("fusion_moe").addHandler(handler)
    warnings.formatwarning = lambda message, *_, **__: f"fusion-moe: {message}\n"
    try:
        from .app import app

        app(prog_name="fusion-moe")
    except ModuleNotFoundError as error:
        if error.name not in _NEEDS:
            raise
        from ..messages.extras import install

        print(f"fusion-moe: {error.name} is not installed; {install('cli')}", file=sys.stderr)
        sys.exit(UNSUPPORTED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python writes at its end
        where = error.filename or "the output"
        print(f"fusion-moe: {where}: not written: {error.strerror}", file=sys.stderr)
        sys.exit(PROBLEMS)
    except SystemExit as ending:
        if ending.code == STOPPED:  # else a KeyboardInterrupt that passed `exec` is what ends it
            stopped.append(STOPPED)
        raise
    finally:  # Ctrl-C once more ends what threads still do, without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
