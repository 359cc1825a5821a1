"""What these tests hold: our three functions that other projects use."""
from fusion_lab.kernels.attention.drop_in import triangle_attention
from fusion_lab.kernels.patches import patch
from fusion_lab.kernels.triangle_multiplication.drop_in import triangle_multiplicative_update

__all__ = ["patch", "triangle_attention", "triangle_multiplicative_update"]
