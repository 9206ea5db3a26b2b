"""Layers with quantized weights that are not trained.

packed.py        layouts in memory; adaptable.py: adapters; projections.py, base.py: base classes
experts.py, custom.py, grouped.py, llama4.py, quantized_linear.py
                 the layers
folded.py        weights read as FP8; prepare.py: `prepare_`; update.py: `update_weights_`
"""
