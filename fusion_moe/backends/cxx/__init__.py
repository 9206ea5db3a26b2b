"""C++ code generation that the backends with their own kernels share: indices, elements, and the
plan of a grouped product.
"""
