"""Layers over groups of rows that are trained in floating point.

linear.py, activations.py, sequential.py, fusions.py
                 the layers, made of stages.py: what a layer adds to a program
grouped_parameters.py, splits.py, channels.py
                 weights of all groups, rows of groups, results beside the first one
tracked.py, main_grad.py, delayed.py, held.py
                 backwards that write; copies in 8 bits that microbatches keep
"""
