"""The bodies of the operations: what runs in eager, their derivatives, their casts under
autocast.

eager.py         the bodies of the operations and of `fusion_moe::run`
autograd.py      their derivatives; batched.py: under vmap
autocast.py      their casts under torch.autocast
stored.py        weights in other layouts than the caller's
"""
