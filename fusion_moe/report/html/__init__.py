"""Reports and differences as pages: files that load nothing from the network and run no script but
their own.
"""

from .diff import diff_page
from .page import frame, page

__all__ = ["diff_page", "frame", "page"]
