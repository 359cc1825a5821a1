"""The triangle layers of five projects: which attribute of each is which parameter. Read, and tried with
their own code in tests, in these releases and commits:

    OpenFold   github.com/aqlaboratory/openfold, ce0029e (Evoformer, extra MSA stack, templates)
    OpenFold3  0.4.1 and 0.5.0, b7940cb: another name for the projection to heads
    Boltz      2.2.1, 832486d: 1 and 2 (pairformer, MSA module, templates, confidence)
    BoltzGen   0.3.2: as Boltz
    Protenix   2.0.0, 3248f8e: OpenFold's without biases
"""
from functools import partial

from torch import nn

from evoformer_kernels.patches.triangle import Attention, Multiplication, PairBias, Transition


def attention(layer, head="linear"):
    own = layer.mha
    return Attention(layer.layer_norm, getattr(layer, head), own.linear_q, own.linear_k, own.linear_v,
                     own.linear_g, own.linear_o, layer.no_heads, layer.starting)


def multiplication(layer):
    return Multiplication(layer.layer_norm_in, [layer.linear_a_p, layer.linear_b_p],
                          [layer.linear_a_g, layer.linear_b_g], layer.layer_norm_out, layer.linear_z,
                          layer.linear_g, layer._outgoing)


def packed_multiplication(layer):
    return Multiplication(layer.layer_norm_in, [layer.linear_ab_p], [layer.linear_ab_g], layer.layer_norm_out,
                          layer.linear_z, layer.linear_g, layer._outgoing)


def boltz_multiplication(layer, outgoing):
    return Multiplication(layer.norm_in, [layer.p_in], [layer.g_in], layer.norm_out, layer.p_out, layer.g_out,
                          outgoing)


OPENFOLD = dict(TriangleAttention=attention, TriangleMultiplicativeUpdate=multiplication,
                FusedTriangleMultiplicativeUpdate=packed_multiplication)
BOLTZ = dict(TriangleAttention=attention,
             TriangleMultiplicationOutgoing=partial(boltz_multiplication, outgoing=True),
             TriangleMultiplicationIncoming=partial(boltz_multiplication, outgoing=False))
LAYERS = {  # {package: {class: its reader}}
    "openfold": OPENFOLD,
    "openfold3": OPENFOLD | dict(TriangleAttention=partial(attention, head="linear_z")),
    "boltz": BOLTZ, "boltzgen": BOLTZ,
    "protenix": dict(TriangleAttention=attention, TriangleMultiplicativeUpdate=multiplication)}



def openfold3_transition(layer):
    return Transition(layer.layer_norm, layer.swiglu.linear_a, layer.swiglu.linear_b, layer.linear_out)


def boltz_transition(layer):
    return Transition(layer.norm, layer.fc1, layer.fc2, layer.fc3)


def protenix_transition(layer):
    return Transition(layer.layernorm1, layer.linear_no_bias_a, layer.linear_no_bias_b, layer.linear_no_bias)


def itself(layer):
    return layer


def projection_of_pairs(layer):
    """The part of Boltz' attention over the single representation that makes its bias, if it has one."""
    return layer.proj_z if isinstance(layer.proj_z, nn.Sequential) else None


# {package: {class: (which part of it runs in kernels, that part's reader)}}, without a word where it cannot
OPTIONAL_BOLTZ = dict(Transition=(itself, boltz_transition),
                      AttentionPairBias=(projection_of_pairs, lambda part: PairBias(part[0], part[1])))
OPTIONAL = {"openfold3": dict(SwiGLUTransition=(itself, openfold3_transition)), "boltz": OPTIONAL_BOLTZ,
            "boltzgen": OPTIONAL_BOLTZ, "protenix": dict(Transition=(itself, protenix_transition))}
OF_BOLTZ = {"PairformerLayer", "PairformerNoSeqLayer", "MSALayer"}
BLOCKS = {  # {package: classes of blocks that repeat, which graphs.py captures}
    "openfold": {"EvoformerBlock", "ExtraMSABlock", "TemplatePairStackBlock"},
    "openfold3": {"PairBlock", "PairFormerBlock", "MSAModuleBlock", "TemplatePairBlock"},
    "boltz": OF_BOLTZ, "boltzgen": OF_BOLTZ, "protenix": {"PairformerBlock", "MSABlock"}}


def adds(given):
    """Whether a call with these arguments wants its input back with the update added, in place. One that asks
    OpenFold3 for cuEquivariance's kernels gets the update alone; Boltz has no such arguments."""
    return bool(given.get("inplace_safe") and given.get("_add_with_inplace")
                and not given.get("use_cueq_triangle_kernels"))
