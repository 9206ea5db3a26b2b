"""Operations: schemas, fakes, and the translators that say in the IR what an operation computes.

operations.py    schemas, fakes, flops; run.py: the operation `fusion_moe::run`
translate.py     the registry of translators, all that a user's translator needs
traced.py        what a trace has, as the IR has it
walk.py, nodes.py
                 translators run over the calls of a graph
tensor_lists.py  lists of tensors as arguments
digest.py        what torch's caches know of the library
"""
