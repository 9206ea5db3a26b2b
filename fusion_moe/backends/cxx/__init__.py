"""C++ code generation that the backends with their own kernels share.

elements.py      an element of a value as C++; indices.py, statements.py: what that is made of
product_plan.py  what a product's kernel does; epilogue.py, sums.py, router.py, orders.py: parts
writer.py        a segment's struct
"""
