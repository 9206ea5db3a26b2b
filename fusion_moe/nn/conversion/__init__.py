"""From the modules of other libraries to frozen ones: `quantize_` and its converters.

quantize.py      `quantize_`; qat.py: `qat_`
converters.py, grouped.py, contract.py
                 modules of others by class, and by what their forward looks like
register.py      converters of users; traced_activation.py: a model's own function as a program
"""
