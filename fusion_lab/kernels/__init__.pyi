from fusion_lab.kernels.attention.drop_in import triangle_attention as triangle_attention
from fusion_lab.kernels.triangle_multiplication.drop_in import (
    triangle_multiplicative_update as triangle_multiplicative_update,
)
