"""Hatchling's build backend, with the metadata that it leaves out under pip. Without them pip would
build a wheel, and compile its kernels, while it says that it prepares metadata.

No hook here adds dependencies, which is what Hatchling leaves them out for.
"""

import os

_of_pip = os.environ.pop("PIP_BUILD_TRACKER", None)

from hatchling.build import *  # noqa: E402, F403

if _of_pip is not None:
    os.environ["PIP_BUILD_TRACKER"] = _of_pip
