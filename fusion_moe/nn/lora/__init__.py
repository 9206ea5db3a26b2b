"""Adapters beside frozen weights: low-rank factors that train, merged, saved and loaded.

adapter.py       the factors; merging.py: merged into their weight; files/: on disk
"""
