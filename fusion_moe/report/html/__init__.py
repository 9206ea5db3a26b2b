"""Reports and differences as pages: files that ask the network for nothing and run no script but their own."""

from .diff import diff_page
from .page import frame, page

__all__ = ["diff_page", "frame", "page"]
