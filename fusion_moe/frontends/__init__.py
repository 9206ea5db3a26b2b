"""The doors through which traced programs come: torch.compile (inductor.py, with regions from fx.py and cache keys from fingerprint.py)."""
