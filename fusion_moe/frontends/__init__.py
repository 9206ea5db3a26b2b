"""The entry points for traced programs: torch.compile (inductor.py) and thunder.jit (thunder.py),
with regions from regions.py.
"""
