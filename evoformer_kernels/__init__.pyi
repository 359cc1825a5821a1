from evoformer_kernels.attention.drop_in import triangle_attention as triangle_attention
from evoformer_kernels.patches import patch as patch
from evoformer_kernels.triangle_multiplication.drop_in import (
    triangle_multiplicative_update as triangle_multiplicative_update,
)

__version__: str
