"""Adapters beside frozen weights: low-rank factors that train, merged, saved and loaded."""
