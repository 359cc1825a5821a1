"""Alg. 13 and 14 with the parameter names of OpenFold."""
from tests.kernels.patches.stand_ins import OpenFoldAttention as TriangleAttention  # noqa: F401
