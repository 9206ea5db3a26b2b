"""C++ text that the backends with kernels of their own share: indices, elements, and the plan of a grouped product."""
