"""How the optional dependencies of this package are installed."""


def install(extra: str) -> str:
    """What to run for one of them."""
    return "pip install cuda-bindings nvidia-cuda-nvrtc, of torch's CUDA version"
