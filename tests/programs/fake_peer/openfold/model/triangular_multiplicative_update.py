"""Alg. 11 and 12 with the parameter names of OpenFold."""
import torch
from torch import nn


class TriangleMultiplicativeUpdate(nn.Module):
    def __init__(self, channels, outgoing):
        super().__init__()
        self._outgoing = outgoing
        for name in ("a_p", "a_g", "b_p", "b_g", "g", "z"):
            setattr(self, f"linear_{name}", nn.Linear(channels, channels))
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(channels), nn.LayerNorm(channels)

    def forward(self, z, mask, inplace_safe=False, _add_with_inplace=False):
        z, mask = self.layer_norm_in(z), mask[..., None]
        a = self.linear_a_p(z) * self.linear_a_g(z).sigmoid() * mask
        b = self.linear_b_p(z) * self.linear_b_g(z).sigmoid() * mask
        product = torch.einsum("bikc,bjkc->bijc" if self._outgoing else "bkic,bkjc->bijc", a, b)
        return self.linear_z(self.layer_norm_out(product)) * self.linear_g(z).sigmoid()
