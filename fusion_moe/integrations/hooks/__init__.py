"""What the optional folders add to the core, by its hooks (plugins.py): a file for each of them.

Entry points of this package name these files, as those of any other package would. They import what
they stand for only when it is used.
"""
