"""OpenFold's triangle layers (Evoformer, extra MSA stack, templates). Read at
github.com/aqlaboratory/openfold, commit ce0029e."""
from fusion_lab.kernels.patches.triangle import Attention, Multiplication


def attention(layer):
    own = layer.mha
    return Attention(layer.layer_norm, layer.linear, own.linear_q, own.linear_k, own.linear_v, own.linear_g,
                     own.linear_o, layer.no_heads, layer.starting)


def multiplication(layer):
    return Multiplication(layer.layer_norm_in, [layer.linear_a_p, layer.linear_b_p],
                          [layer.linear_a_g, layer.linear_b_g], layer.layer_norm_out, layer.linear_z,
                          layer.linear_g, layer._outgoing)


def packed_multiplication(layer):
    return Multiplication(layer.layer_norm_in, [layer.linear_ab_p], [layer.linear_ab_g], layer.layer_norm_out,
                          layer.linear_z, layer.linear_g, layer._outgoing)


LAYERS = dict(TriangleAttention=attention, TriangleMultiplicativeUpdate=multiplication,
              FusedTriangleMultiplicativeUpdate=packed_multiplication)


def adds(given):
    """Whether a call with these arguments wants its input back with the update added, in place."""
    return bool(given.get("inplace_safe") and given.get("_add_with_inplace"))
