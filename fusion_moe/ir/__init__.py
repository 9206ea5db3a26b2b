"""The fusion IR: typed programs over rows that are divided into groups. docs/ir.md describes it.

sizes.py, types.py, signature.py    sizes that the host knows at launch; types of values, programs
core.py          Value, Op, Fusion; binding.py: symbols become numbers
kinds/           the table of operations: type rule, meaning, derivative
builder.py       FusionDefinition, by which programs are built; op_methods.py: `fd.ops`
text.py          a Fusion as Python text, and back
activation.py    a pointwise function as text
derivative.py    forward and backward of a Fusion; gradients.py: of each operation
saved.py         what the forward saves: a minimum cut; router_gradient.py: one product less
postponed.py     outputs that are computed later; effects.py: inputs that are written
flow.py          parts of programs; collectives.py: values that ranks exchange
"""
