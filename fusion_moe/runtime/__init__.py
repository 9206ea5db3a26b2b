"""Running what was compiled: kernels, and the programs they make up."""
