"""Alg. 13 with the parameter names of OpenFold."""
from types import SimpleNamespace

import torch
from torch import nn


class TriangleAttention(nn.Module):
    def __init__(self, channels, width, heads):
        super().__init__()
        self.starting, self.no_heads, self.layer_norm = True, heads, nn.LayerNorm(channels)
        self.linear, self.mha = nn.Linear(channels, heads, bias=False), nn.Module()
        for name, biased in dict(q=False, k=False, v=False, g=True).items():
            setattr(self.mha, f"linear_{name}", nn.Linear(channels, heads * width, bias=biased))
        self.mha.linear_o = nn.Linear(heads * width, channels)

    def forward(self, x, mask, chunk_size=None):
        x = self.layer_norm(x)
        layers = {name: getattr(self.mha, f"linear_{name}") for name in "qkvg"}
        made = SimpleNamespace(**{name: layer(x).unflatten(-1, (self.no_heads, -1))
                                  for name, layer in layers.items()})
        scores = torch.einsum("bijhd,bikhd->bhijk", made.q, made.k) * made.q.shape[-1] ** -0.5
        scores = scores + self.linear(x).permute(0, 3, 1, 2)[:, :, None] + 1e9 * (mask - 1)[:, None, :, None]
        out = torch.einsum("bhijk,bikhd->bijhd", scores.softmax(-1), made.v) * made.g.sigmoid()
        return self.mha.linear_o(out.flatten(-2))
