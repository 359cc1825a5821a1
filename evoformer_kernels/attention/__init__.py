"""Biased, gated attention with its derivative: kernels, operators, whole sub-layers, a drop-in function."""
