"""Cubins that came with the package, of layers that many people run: calls of these wait for no
compiler. tools/build_cubins.py writes them when a release is built; otherwise there are none.

    came = archive(ARCHIVE)
    if layer := came.layer_of(file):        # of a name in the store
        data = cubins_of(ARCHIVE, layer).get(file)

The archive is one file of xz: a line of JSON, then the cubins. They are much alike, so that all of
them are hardly larger than those of a few layers. The line names them as the store does, by all
that they were made from: one whose source has changed since is not found.

    {"nvrtc": "13.0", "layers": {"Qwen3-30B-A3B": {"route-sm_90a-....cubin": [begin, end], ...}}}

None are used by a driver older than the NVRTC that made them. A damaged archive is as good as none,
and a warning says so.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from ..messages import warn_once
from . import driver

ARCHIVE = Path(__file__).with_name("shipped") / "cubins.xz"
_lock = threading.Lock()  # builds run in many threads; one reads for all


@dataclass(frozen=True)
class Archive:
    """nvrtc: the version of what made the cubins; layers: by a name for people, the files of the
    store that calls of any number of tokens need, each with its place after the line.
    """

    nvrtc: str = ""
    layers: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)

    def layer_of(self, file: str) -> str:
        """The first layer that needs a file; "" if none does."""
        return next((layer for layer, files in self.layers.items() if file in files), "")

    @property
    def why_not(self) -> str:
        """Why the cubins are not used here; "" if they are."""
        if not self.layers:
            return "no cubins came with this installation"
        major, minor = map(int, self.nvrtc.split("."))
        try:
            new_enough = driver.version_number() >= 1000 * major + 10 * minor
        except Exception:  # of cuda-bindings, which has a class for each thing
            return "no CUDA driver loads"
        return "" if new_enough else f"they need a driver of CUDA {self.nvrtc} or newer"


@cache
def archive(path: Path) -> Archive:
    """What an archive lists; nothing if it is not there or is damaged."""
    with _warned_of_damage(path), _opened(path) as file:
        return Archive(**json.loads(file.readline()))
    return Archive()


def cubins_of(path: Path, layer: str) -> Mapping[str, bytes]:
    """The cubins of a layer of an archive, by file; none if it is damaged."""
    with _lock:
        return _read(path, layer)


@cache
def _read(path: Path, layer: str) -> Mapping[str, bytes]:
    """Those, which are kept: later calls need others of them."""
    with _warned_of_damage(path), _opened(path) as file:
        file.readline()
        data, places = file.read(), archive(path).layers[layer]
        return {name: data[begin:end] for name, (begin, end) in places.items()}
    return {}


def _opened(path: Path) -> IO[bytes]:
    import lzma  # here, since a Python may be built without it

    return lzma.open(path)


@contextlib.contextmanager
def _warned_of_damage(path: Path) -> Iterator[None]:
    """Ends the block at an error, with a warning unless there is no archive."""
    try:
        yield
    except FileNotFoundError:
        return
    except Exception as error:  # whatever a damaged file may lead to
        why = f"{type(error).__name__}: {error}"
        warn_once(f"{path} cannot be read ({why}); kernels in it are compiled; install it again")
