"""PEFT's LoRA on encoded weights: layers of PEFT, with its names, shapes and state, whose factors
our programs read.

`install` puts them into PEFT, which makes a layer for each weight that a configuration targets:
`target_parameters` for the weights of experts, `target_modules` for linear layers.

install.py       what PEFT does with layers; layers.py: the layers
"""

from .install import install

__all__ = ["install"]
