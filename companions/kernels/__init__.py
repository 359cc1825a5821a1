"""Triton kernels that serve the companions alone."""
__version__ = "0"  # a script's directory is on sys.path: who asks for the library `kernels` may find this
ULTRA_WIDTHS = (32, 64, 128)  # of a head in the ultra-fused block
EPS = 1e-5  # of norms among the fusion patterns
