"""Layers with the interfaces of OpenFold's, OpenFold3's, Protenix's and Boltz's, by the definitions.

Each class names the module that the project has it in, by which patch() knows it. Triangle attention and
multiplication are AlphaFold 2's Alg. 11 to 14.
"""
import torch
from torch import nn


def linears(module, prefix, bias, **sizes):
    for name, (ins, outs) in sizes.items():
        setattr(module, f"{prefix}{name}", nn.Linear(ins, outs, bias=bias))


class OpenFoldAttention(nn.Module):
    __module__, __qualname__ = "openfold.model.triangular_attention", "TriangleAttention"
    head, bias = "linear", True

    def __init__(self, c, width, heads, starting=True):
        super().__init__()
        self.no_heads, self.starting, self.layer_norm = heads, starting, nn.LayerNorm(c)
        setattr(self, self.head, nn.Linear(c, heads, bias=False))
        self.mha, inner = nn.Module(), heads * width
        linears(self.mha, "linear_", False, q=(c, inner), k=(c, inner), v=(c, inner))
        linears(self.mha, "linear_", self.bias, g=(c, inner), o=(inner, c))

    def forward(self, x, mask=None, chunk_size=None, inplace_safe=False):
        mask = x.new_ones(x.shape[:-1]) if mask is None else mask
        if not self.starting:
            x, mask = x.transpose(-2, -3), mask.transpose(-1, -2)
        x = self.layer_norm(x)
        q, k, v, g = (getattr(self.mha, f"linear_{name}")(x).unflatten(-1, (self.no_heads, -1))
                      for name in "qkvg")
        scores = torch.einsum("...ijhd,...ikhd->...hijk", q, k) * q.shape[-1] ** -0.5
        scores = scores + getattr(self, self.head)(x).movedim(-1, -3)[..., None, :, :]
        scores = scores + 1e9 * (mask - 1)[..., None, :, None, :]
        out = torch.einsum("...hijk,...ikhd->...ijhd", scores.softmax(-1), v) * g.sigmoid()
        out = self.mha.linear_o(out.flatten(-2))
        return out if self.starting else out.transpose(-2, -3)


class OpenFold3Attention(OpenFoldAttention):
    __module__, __qualname__ = "openfold3.core.model.layers.triangular_attention", "TriangleAttention"
    head, bias = "linear_z", False
    forward = OpenFoldAttention.forward


class ProtenixAttention(OpenFoldAttention):
    __module__, __qualname__ = "protenix.model.triangular.triangular", "TriangleAttention"
    bias = False
    forward = OpenFoldAttention.forward


class BoltzAttention(OpenFoldAttention):
    __module__, __qualname__ = "boltz.model.layers.triangular_attention.attention", "TriangleAttention"
    bias = False

    def forward(self, x, mask=None, chunk_size=None, use_kernels=False):
        return OpenFoldAttention.forward(self, x, mask)


def combined(left, right, outgoing):
    return torch.einsum("...ikc,...jkc->...ijc" if outgoing else "...kic,...kjc->...ijc", left, right)


class OpenFoldMultiplication(nn.Module):
    __module__ = "openfold.model.triangular_multiplicative_update"
    __qualname__, bias = "TriangleMultiplicativeUpdate", True

    def __init__(self, c, inner, _outgoing=True):
        super().__init__()
        self._outgoing = _outgoing
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(c), nn.LayerNorm(inner)
        linears(self, "linear_", self.bias, g=(c, c), z=(inner, c), **self.inner(c, inner))

    def inner(self, c, inner):
        return dict.fromkeys(("a_p", "a_g", "b_p", "b_g"), (c, inner))

    def sides(self, z):
        return (self.linear_a_p(z) * self.linear_a_g(z).sigmoid(),
                self.linear_b_p(z) * self.linear_b_g(z).sigmoid())

    def forward(self, z, mask=None, inplace_safe=False, _add_with_inplace=False):
        mask = z.new_ones(z.shape[:-1]) if mask is None else mask
        x = self.layer_norm_in(z)
        left, right = (side * mask[..., None] for side in self.sides(x))
        update = self.linear_z(self.layer_norm_out(combined(left, right, self._outgoing)))
        update = update * self.linear_g(x).sigmoid()
        return z.add_(update) if inplace_safe and _add_with_inplace else update


class PackedMultiplication(OpenFoldMultiplication):
    __module__, __qualname__ = OpenFoldMultiplication.__module__, "FusedTriangleMultiplicativeUpdate"
    forward = OpenFoldMultiplication.forward

    def inner(self, c, inner):
        return dict(ab_p=(c, 2 * inner), ab_g=(c, 2 * inner))

    def sides(self, z):
        return (self.linear_ab_p(z) * self.linear_ab_g(z).sigmoid()).chunk(2, dim=-1)


class OpenFold3Multiplication(OpenFoldMultiplication):
    __module__, bias = "openfold3.core.model.layers.triangular_multiplicative_update", False
    __qualname__ = OpenFoldMultiplication.__qualname__

    def forward(self, z, mask=None, inplace_safe=False, use_cueq_triangle_kernels=False,
                _add_with_inplace=False):
        return OpenFoldMultiplication.forward(self, z, mask, inplace_safe and not use_cueq_triangle_kernels,
                                              _add_with_inplace)


class ProtenixMultiplication(OpenFoldMultiplication):
    __module__, __qualname__ = "protenix.model.triangular.triangular", OpenFoldMultiplication.__qualname__
    bias, forward = False, OpenFoldMultiplication.forward


class BoltzOutgoing(nn.Module):
    __module__, __qualname__ = "boltz.model.layers.triangular_mult", "TriangleMultiplicationOutgoing"
    outgoing = True

    def __init__(self, c):
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(c), nn.LayerNorm(c)
        linears(self, "", False, p_in=(c, 2 * c), g_in=(c, 2 * c), p_out=(c, c), g_out=(c, c))

    def forward(self, x, mask, use_kernels=False):
        x = self.norm_in(x)
        left, right = (self.p_in(x) * self.g_in(x).sigmoid() * mask[..., None]).chunk(2, dim=-1)
        return self.p_out(self.norm_out(combined(left, right, self.outgoing))) * self.g_out(x).sigmoid()


class BoltzIncoming(BoltzOutgoing):
    __module__, __qualname__ = BoltzOutgoing.__module__, "TriangleMultiplicationIncoming"
    outgoing, forward = False, BoltzOutgoing.forward


for kind in [each for each in vars().copy().values() if isinstance(each, type)]:
    kind.__name__ = kind.__qualname__  # which patch() reads
