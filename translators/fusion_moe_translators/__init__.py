"""The built-in translators, one file for each family of operations. They import only what a user's
translator may import.
"""

from . import compat, gather, grouped, moe, pointwise, shapes

__all__ = ["compat", "gather", "grouped", "moe", "pointwise", "shapes"]
