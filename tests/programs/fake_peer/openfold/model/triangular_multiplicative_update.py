"""Alg. 11 and 12 with the parameter names of OpenFold."""
from tests.kernels.patches.stand_ins import OpenFoldMultiplication as TriangleMultiplicativeUpdate  # noqa: F401
