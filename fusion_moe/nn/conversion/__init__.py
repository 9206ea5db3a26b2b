"""From the modules of other libraries to frozen ones: `quantize_` and its converters."""
