"""Where thunder is not installed, or does not import: one sentence when it is asked for, nothing
before.
"""

from __future__ import annotations

import sys

import pytest

from fusion_moe.errors import UnsupportedError
from fusion_moe.thunder import thunder_executors


def test_thunder_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "thunder", None)
    with pytest.raises(
        UnsupportedError,
        match=r"thunder is not installed; expected lightning-thunder .*pip install "
        r"'\.\[thunder\]' in a clone",
    ):
        thunder_executors()


def test_thunder_that_does_not_import_with_this_torch(monkeypatch, tmp_path):
    for name in [n for n in sys.modules if n.partition(".")[0] == "thunder"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "thunder"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\ntorch.Tensor.no_such_method\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UnsupportedError, match="thunder does not import with torch .*no_such_method"
    ):
        thunder_executors()
