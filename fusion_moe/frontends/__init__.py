"""The doors through which traced programs come: torch.compile (inductor.py)."""
