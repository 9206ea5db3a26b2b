"""Reports as pages: files that load nothing from the network and run no script but their own."""

from .page import frame, page

__all__ = ["frame", "page"]
