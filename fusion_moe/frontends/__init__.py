"""Traced programs: regions of a graph (regions.py) become Fusions. inductor/ is torch.compile's
door; thunder.jit's is `fusion_moe.thunder`.
"""
