"""Layers of other projects' pair blocks: on their parameters, in our kernels.

projects.py reads each project's layers as one of the records here. `update` returns what the layer would
return, or raises Unfit before it has computed anything. Shapes: x (*, I, I, c), mask (*, I, I), 1 = present.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from evoformer_kernels import limits
from evoformer_kernels.precision import product_dtype

WHOLE_FROM = 640  # residues from which the GPU's time counts and not the host's, so that all of an attention
# layer runs in kernels: fewer passes over memory, but more to do for the host

# whose Linear and LayerNorm are torch's in effect:
PROJECTS = ("openfold", "openfold3", "boltz", "boltzgen", "protenix")
in_graph = False  # while graphs.py captures a block, and runs it once before
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Unfit(Exception):
    """Why a layer's own forward has to run."""


def require(holds, reason):
    if not holds:
        raise Unfit(reason)


def require_plain(modules):
    """Kernels read parameters and call no module: what a module does besides must not be lost."""
    for module in modules:
        own = next(base for base in type(module).__mro__ if "forward" in vars(base))
        require(own in (nn.Linear, nn.LayerNorm) or own.__module__.partition(".")[0] in PROJECTS,
                f"a part of it is a {type(module).__name__} with a forward of its own")
        require(not any(getattr(module, name) for name in HOOKS), "a hook on a part of it")
        require("forward" not in vars(module), f"the forward of its {type(module).__name__} was replaced")
        require(getattr(module, "precision", None) is None, "a projection with a precision of its own")


def require_linear(modules):
    for module in modules:
        require(isinstance(module, nn.Linear), f"a projection is a {type(module).__name__}")
    require_plain(modules)


def as_pairs(x, mask):
    """x (B, I, I, c) and mask (B, I, I) or None, whatever dimensions x has in front."""
    require(x.dim() > 2 and x.shape[-2] == x.shape[-3], f"a pair tensor of shape {tuple(x.shape)}")
    if mask is not None:
        mask = mask.expand(x.shape[:-1]).reshape(-1, *x.shape[-3:-1])
    return x.reshape(-1, *x.shape[-3:]), mask


def host_time_is_free(x):
    """Whether the host's time counts for nothing: many residues, a CUDA graph, or torch.compile."""
    return (in_graph or x.shape[-2] >= WHOLE_FROM or torch.compiler.is_compiling()
            or x.is_cuda and torch.cuda.is_current_stream_capturing())


def one_weight(linears):
    """Weights of projections of one input below each other, and their biases or, if none has one, None."""
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        joined = None
    elif all(bias is None for bias in biases[:-1]):  # as of q, k, v and gate
        joined = F.pad(biases[-1], (sum(map(len, weights[:-1])), 0))
    else:
        require(not any(bias is None for bias in biases), "biases on some projections alone")
        joined = torch.cat(biases)
    return torch.cat(weights), joined


def affine(norm):
    """Weight and bias (c,) of a LayerNorm, which may lack them; its eps."""
    require_plain([norm])
    weight, bias = norm.weight, norm.bias
    require(weight is not None and bias is not None, "a LayerNorm without weight or bias")
    return weight, bias, norm.eps


class Attention(NamedTuple):
    """AlphaFold 2's Alg. 13 or, not starting, 14; of AlphaFold 3 Alg. 14 or 15. head makes the bias."""
    norm: nn.Module
    head: nn.Module  # c -> heads
    q: nn.Module  # c -> heads * width, as k, v and gate
    k: nn.Module
    v: nn.Module
    gate: nn.Module | None
    output: nn.Module  # heads * width -> c
    heads: int
    starting: bool

    def update(self, x, mask, transpose_bias=False):
        """transpose_bias: OpenFold3's argument, for an x that was transposed before its bias is made."""
        require(limits.runs(x), "no GPU, no Triton or no 16-bit products")
        require(self.gate is not None, "attention without a gate")
        projections = self.q, self.k, self.v, self.gate
        require_linear([self.head, *projections, self.output])
        require(self.head.bias is None, "a bias on the projection to heads")
        width = len(self.q.weight) // self.heads
        require(width <= limits.WIDEST_HEAD, f"heads of {width} channels")
        pair, key_mask = as_pairs(x, mask)
        axis = 2 if self.starting else 1
        turned = x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
        if turned:  # a view of the pair tensor, as OpenFold's block hands it on: no copy
            pair, axis = x.transpose(1, 2), 3 - axis
            key_mask = None if key_mask is None else key_mask.mT
        if axis == 1 and key_mask is not None:
            key_mask = key_mask.mT  # (B, rows, keys)
        whole = (host_time_is_free(x) and limits.takes("attention sub-layer", x.shape[-1], self.heads)
                 and len(self.q.weight) == x.shape[-1]
                 and all(linear.bias is None for linear in projections[:3]))
        function = self.whole_layer if whole else self.core
        out = function(pair, key_mask, axis, turn_bias=(axis == 1) != transpose_bias)
        return (out.transpose(1, 2) if turned else out).view(x.shape)

    def whole_layer(self, pair, key_mask, axis, turn_bias):
        """All of it in kernels."""
        from evoformer_kernels.attention.function import Weights, attention_layer
        norm_weight, norm_bias, eps = affine(self.norm)
        nothing = norm_weight.new_zeros(pair.shape[-1])
        weights = Weights(
            norm_weight, norm_bias,
            torch.cat([linear.weight for linear in (self.q, self.k, self.v, self.gate)]),
            nothing if self.gate.bias is None else self.gate.bias, self.output.weight,
            nothing if self.output.bias is None else self.output.bias, self.head.weight)
        return attention_layer(pair, weights, self.heads, axis, key_mask=key_mask, eps=eps,
                               turned=turn_bias)

    def core(self, pair, key_mask, axis, turn_bias):
        """LayerNorm and projections in PyTorch, between them attention with its gate in kernels."""
        from evoformer_kernels.attention.function import gated_attention
        dtype = product_dtype(pair)
        x = self.norm(pair).to(dtype)
        bias = F.linear(x, self.head.weight.to(dtype)).permute(0, 3, 1, 2)  # (B, H, X, Y)
        weight, biases = one_weight((self.q, self.k, self.v, self.gate))
        qkvg = F.linear(x, weight.to(dtype), None if biases is None else biases.to(dtype))  # (B, X, Y, 4 H D)
        bias = bias.mT if turn_bias else bias
        return self.output(gated_attention([qkvg], self.heads, axis, bias, key_mask, lift=True))


class Multiplication(NamedTuple):
    """AlphaFold 2's Alg. 11 or, not outgoing, 12; of AlphaFold 3 Alg. 12 or 13."""
    norm: nn.Module
    values: list  # of projections: left, right; or one of both, left first
    gates: list  # alike
    center: nn.Module  # the second LayerNorm
    output: nn.Module
    output_gate: nn.Module
    outgoing: bool

    def update(self, x, mask):
        c, inner = x.shape[-1], [*self.values, *self.gates]
        require(limits.runs(x), "no GPU, no Triton or no 16-bit products")
        require(product_dtype(x) != torch.float16, "float16, in which sums over residues may overflow")
        require(c in limits.CHANNELS, f"{c} channels")
        require_linear([*inner, self.output, self.output_gate])
        require(sum(len(linear.weight) for linear in inner) == 4 * c, f"another inner width than {c}")
        pair, mask = as_pairs(x, mask)
        from evoformer_kernels.triangle_multiplication.drop_in import triangle_multiplicative_update
        weight, bias, eps = affine(self.norm)
        center_weight, center_bias, center_eps = affine(self.center)
        require(eps == center_eps, "LayerNorms with different eps")
        (p_in, p_in_bias), (g_in, g_in_bias) = (one_weight(each) for each in (self.values, self.gates))
        return triangle_multiplicative_update(
            pair, "outgoing" if self.outgoing else "incoming", mask, weight, bias, p_in, p_in_bias, g_in,
            g_in_bias, center_weight, center_bias, self.output.weight, self.output.bias,
            self.output_gate.weight, self.output_gate.bias, eps).view(x.shape)


class Transition(NamedTuple):
    """AlphaFold 3's Alg. 11. gate, value: c -> hidden, of silu and beside it."""
    norm: nn.Module
    gate: nn.Module
    value: nn.Module
    output: nn.Module

    def update(self, x, mask):
        require(limits.fits("projection", x), f"{x.shape[-1]} channels, no GPU, or products not in 16 bits")
        linears = self.gate, self.value, self.output
        require_linear(linears)
        require(all(linear.bias is None for linear in linears), "biases in a transition")
        from evoformer_kernels.swiglu import transition
        norm_weight, norm_bias, eps = affine(self.norm)
        pair = x.reshape(-1, *x.shape[-3:]) if x.dim() > 3 else x[None]
        weight = torch.cat([self.gate.weight, self.value.weight])
        out = transition(pair, norm_weight, norm_bias, weight, self.output.weight, eps)
        out = out.view(*x.shape[:-1], -1)
        return out if mask is None else out * mask[..., None]


class PairBias(NamedTuple):
    """LayerNorm and projection of a pair tensor to the heads of attention over the single representation."""
    norm: nn.Module
    head: nn.Module

    def update(self, x, mask):
        require(limits.fits("head bias", x, len(self.head.weight)), "its widths, or no GPU")
        require_linear([self.head])
        require(self.head.bias is None, "a bias on the projection to heads")
        require(x.dim() == 4, f"a pair tensor of shape {tuple(x.shape)}")
        from evoformer_kernels.projections import head_bias
        norm_weight, norm_bias, eps = affine(self.norm)
        return head_bias(x, norm_weight, norm_bias, self.head.weight, eps)[0]
