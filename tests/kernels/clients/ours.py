"""What these tests hold: our three functions that other projects use."""
from evoformer_kernels.attention.drop_in import triangle_attention
from evoformer_kernels.patches import patch
from evoformer_kernels.triangle_multiplication.drop_in import triangle_multiplicative_update

__all__ = ["patch", "triangle_attention", "triangle_multiplicative_update"]
