"""The bodies of the operations: what runs in eager, their derivatives, their casts under
autocast.
"""
