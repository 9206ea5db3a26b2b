"""Traced programs: regions of a graph (regions.py) become Fusions. inductor/ is what
torch.compile calls.
"""
