"""Models larger than the GPU: experts in the host's memory, some of them on the GPU too."""
