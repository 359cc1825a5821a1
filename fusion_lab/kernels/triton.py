"""Which sub-layers this project's Triton kernels can run, and their calls; imported without Triton.

Kernels are imported where they are called: whoever calls one has asked the function beside it first.
"""
import importlib

from fusion_lab.kernels.attention import TRITON_DTYPES, triton_attends
from fusion_lab.kernels.limits import CHANNELS, HAS_TRITON
from fusion_lab.kernels.precision import product_dtype


def kernel(file, name):
    return getattr(importlib.import_module(f"fusion_lab.kernels.{file}"), name)


def fits(x):
    """Whether x (..., c) lies on a GPU, in a dtype and a width that the kernels over positions take."""
    return x.is_cuda and HAS_TRITON and product_dtype(x) in TRITON_DTYPES and x.shape[-1] in CHANNELS


def attends(x, heads):
    """Whether attention over x (..., c) has a kernel."""
    return triton_attends(x.is_cuda, product_dtype(x), x.shape[-1] // heads)


def gated_attention(parts, heads, axis, bias, keys, gate_bias):
    return kernel("biased_attention", "gated_attention")(parts, heads, axis, bias, keys, gate_bias)


def transition(x, norm, first, second, residual):
    """residual + second(relu(first(norm(x)))), from the modules; residual may be None."""
    return kernel("transition", "transition")(
        x, norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias, norm.eps, residual)


def triangle_multiplication(pair, norm, weight, bias, center, output, gate, mask, outgoing, residual, drop):
    """Triangle multiplication from modules and the packed weight and bias of left, right and their gates."""
    return kernel("triangle_multiplication", "triangle_multiplication")(
        pair, norm.weight, norm.bias, weight, bias, center.weight, center.bias, output.weight, output.bias,
        gate.weight, gate.bias, mask, outgoing, norm.eps, residual, drop)
