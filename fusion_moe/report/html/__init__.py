"""The report as a page: one file that asks the network for nothing and runs no script but its own."""

from .page import frame, page

__all__ = ["frame", "page"]
