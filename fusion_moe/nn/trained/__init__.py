"""Layers over groups of rows that are trained in floating point."""
