"""Protenix's triangle layers, which are OpenFold's without biases. Read at github.com/bytedance/Protenix,
commit 3248f8e."""
from fusion_lab.kernels.patches.openfold import adds as adds
from fusion_lab.kernels.patches.openfold import attention, multiplication

LAYERS = dict(TriangleAttention=attention, TriangleMultiplicativeUpdate=multiplication)
