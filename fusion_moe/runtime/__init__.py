"""Running compiled code: kernels, and the programs that they make up."""
