"""The doors through which traced programs come: torch.compile (inductor.py) and thunder.jit (thunder.py), with regions from regions.py."""
