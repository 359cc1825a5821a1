"""The triangle layers of Boltz-1 and Boltz-2 (pairformer, MSA module, templates, confidence). Read at
github.com/jwohlwend/boltz, commit 832486d."""
from functools import partial

from fusion_lab.kernels.patches.openfold import attention
from fusion_lab.kernels.patches.triangle import Multiplication


def multiplication(layer, outgoing):
    return Multiplication(layer.norm_in, [layer.p_in], [layer.g_in], layer.norm_out, layer.p_out, layer.g_out,
                          outgoing)


LAYERS = dict(TriangleAttention=attention,
              TriangleMultiplicationOutgoing=partial(multiplication, outgoing=True),
              TriangleMultiplicationIncoming=partial(multiplication, outgoing=False))


def adds(given):
    """No call of theirs works in place."""
    return False
