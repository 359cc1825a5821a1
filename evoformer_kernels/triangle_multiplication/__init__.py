"""Triangle multiplication with its derivative: kernels, operators, a drop-in function."""
