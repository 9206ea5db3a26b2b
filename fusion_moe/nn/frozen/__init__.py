"""Layers with quantized weights that are not trained."""
