"""Protenix's triangle layers, which are OpenFold's without biases. Read at github.com/bytedance/Protenix,
commit 3248f8e."""
from fusion_lab.kernels.patches import openfold

LAYERS = {name: openfold.LAYERS[name] for name in ("TriangleAttention", "TriangleMultiplicativeUpdate")}
adds = openfold.adds
