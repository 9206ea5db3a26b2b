"""The documentation site: `make docs` builds it, with warnings as errors and without the
network.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import fusion_moe

project = "fusion_moe"
author = "The fusion_moe authors"
project_copyright = author
version = release = fusion_moe.__version__

extensions = ["myst_parser", "outside"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # links to headings as GitHub spells them
highlight_language = "none"
# written pages begin with headings of the level that they have in another page
suppress_warnings = ["myst.header"]
smartquotes = False  # "..." and quotes are what they are

html_theme = "furo"
html_title = f"fusion_moe {version}"
html_copy_source = False
html_show_sphinx = False

# `make docs-links` fetches external links; `make docs` does not.
linkcheck_timeout = 15
linkcheck_anchors = False
