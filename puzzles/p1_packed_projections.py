"""Puzzle 1: pack three projections. No Triton yet.

Attention needs q, k and v of the same x. Three matrix products read x three times and start three
kernels. Write it as ONE matrix product with a wider weight, then split the result.

    x (B, S, C); w_q, w_k, w_v (C, C), each used as x @ w.T
    result: q, k, v, each (B, S, C)

The weights stay three tensors, because old checkpoints know them by their three names. So your function joins
them, and check.py counts its matrix products.
"""
import torch

MOST_PRODUCTS = 1


def inputs(size):
    weights = {name: torch.randn(32, 32) for name in ("w_q", "w_k", "w_v")}
    return dict(x=torch.randn(2, 8 * size, 32), **weights)


def plain(x, w_q, w_k, w_v):
    return x @ w_q.T, x @ w_k.T, x @ w_v.T


def project(x, w_q, w_k, w_v):
    # HOLE: one product instead of three. torch.cat and the method chunk(3, dim=-1) help.
    return x @ w_q.T, x @ w_k.T, x @ w_v.T


def answer(**tensors):
    return project(**tensors)


# Our own: PackedProjections in tiny_openfold/layers/packing.py
