"""Finding translators: those of an installed package, through its entry point."""

import os
import subprocess
import sys

MODULE = """
import fusion_moe

@fusion_moe.translator("their_lib::twice")
def twice(fd, x):
    return fd.ops.add(x, x)
"""
ASK = """
from fusion_moe import translate
found = translate.find("their_lib::twice")
print(found.where, len(translate.registered()) > 50)
"""


def test_translators_of_an_installed_package_are_found(tmp_path):
    (tmp_path / "their_translators.py").write_text(MODULE)
    about = tmp_path / "their_lib-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-lib\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fusion_moe.translators]\ntheirs = their_translators\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    out = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["their_translators.py:4", "True"]
