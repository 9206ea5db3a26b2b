"""Tokens between the ranks of a node inside of the programs that compute the experts, as two
operations, `dispatch` and `combine_from`, which the compiler knows by the hook
`plugins.operations`.

kinds.py         what they compute, and their gradients
scheduler.py     which pieces of a program ranks run together
cuda.py, cpu.py, kernels/
                 the kernels: stores into each other's memory
peers.py         the tensors that stand for that memory; faults.py: ranks that are lost
operations.py    all of that as rows of the table of operations
"""

from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"
