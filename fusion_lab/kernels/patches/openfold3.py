"""OpenFold3's triangle layers: OpenFold's with another name for the projection to heads. Read at
github.com/aqlaboratory/openfold-3, commit b7940cb."""
from fusion_lab.kernels.patches.openfold import LAYERS as OPENFOLD
from fusion_lab.kernels.patches.openfold import adds as adds_in_openfold
from fusion_lab.kernels.patches.triangle import Attention


def attention(layer):
    own = layer.mha
    return Attention(layer.layer_norm, layer.linear_z, own.linear_q, own.linear_k, own.linear_v, own.linear_g,
                     own.linear_o, layer.no_heads, layer.starting)


LAYERS = OPENFOLD | dict(TriangleAttention=attention)


def adds(given):
    """As of OpenFold; a call that asks for cuEquivariance's kernels gets the update alone."""
    return adds_in_openfold(given) and not given.get("use_cueq_triangle_kernels")
