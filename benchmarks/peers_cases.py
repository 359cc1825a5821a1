"""What benchmarks/peers.py compares: the two problems, exact results, and how each peer is called.

A problem has tensors in float32, rounded to its "dtype", in one layout. Attention: q, k, v (1, S, H, S, D),
rows of a pair tensor, bias (1, H, S, S), present (1, S), for which keys count. Multiplication, outgoing: x
(1, S, S, c), weights by cuEquivariance's names, mask (1, S, S). A Case is a problem in a peer's own layout
and dtypes.
"""
import importlib
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tiny_openfold_v2 import attend

HEADS, WIDTH, CHANNELS = 4, 32, 128
EXACT_SCORES = 1 << 27  # of a chunk of rows in float64: 1 GB for each tensor of their size


class Case(NamedTuple):
    """A problem as a peer wants it."""
    leaves: dict  # tensors whose gradients are taken
    others: dict  # masks and the like
    call: object  # function of both, by name
    to_peer: object  # lays a gradient of the output out as the peer does
    back: dict  # {"out" or a leaf's name: function that lays it, or its gradient, out as the problem does}

    @property
    def inputs(self):
        return self.leaves | self.others


class Peer(NamedTuple):
    name: str
    proof: str  # regular expression over names of kernels, one of which must have run
    case: object  # function of a problem


def leaf(tensor, dtype):
    return tensor.to(dtype).contiguous().requires_grad_()


def normal(generator, *size, mean=0.0, spread=1.0):
    return mean + spread * torch.randn(*size, device=generator.device, generator=generator)


def problem(operation, S, device, dtype):
    """{name: tensor} with "dtype", "weight", which is the output's gradient, and "exact", a dictionary of the
    output "out" and the gradients in float64."""
    tensors, exact = dict(attention=(attention_tensors, exact_attention),
                          multiplication=(multiplication_tensors, exact_multiplication))[operation]
    given = {name: tensor.to(dtype).float() if tensor.is_floating_point() else tensor
             for name, tensor in tensors(S, device).items()}
    return given | dict(exact=exact(given), dtype=dtype)


# --------------------------------------------------------------------------------------------------------
# Triangle attention
# --------------------------------------------------------------------------------------------------------


def attention_tensors(S, device):
    generator = torch.Generator(device).manual_seed(S)
    given = {name: normal(generator, 1, S, HEADS, S, WIDTH) for name in ("q", "k", "v", "weight")}
    given["bias"] = normal(generator, 1, HEADS, S, S)
    given["present"] = (torch.arange(S, device=device) < S - max(1, S // 9))[None]
    return given


def exact_attention(given):
    """In float64, a chunk of rows at a time."""
    names, (_, S, H, _, _) = ("q", "k", "v"), given["q"].shape
    bias = leaf(given["bias"], torch.float64)
    outs, gradients = [], {name: [] for name in names}
    step = max(1, EXACT_SCORES // (H * S * S))  # rows
    for first in range(0, S, step):
        rows = slice(first, first + step)
        parts = [leaf(given[name][:, rows], torch.float64) for name in names]
        out = attend(*parts, bias, given["present"], "math")
        out.backward(given["weight"][:, rows].double())
        outs.append(out.detach())
        for name, part in zip(names, parts, strict=True):
            gradients[name].append(part.grad)
    return dict(out=torch.cat(outs, 1), bias=bias.grad,
                **{name: torch.cat(found, 1) for name, found in gradients.items()})


def same(tensor):
    return tensor


def attention_case(given, call, turn=same, bias_turn=same, bias_dtype=None, **others):
    """turn: from the problem's layout of q, k, v and the output to the peer's, and back."""
    dtype = given["dtype"]
    leaves = {name: leaf(turn(given[name]), dtype) for name in ("q", "k", "v")}
    leaves["bias"] = leaf(bias_turn(given["bias"]), bias_dtype or dtype)
    back = dict.fromkeys(("q", "k", "v", "out"), turn)
    back["bias"] = lambda gradient: gradient.reshape(given["bias"].shape)
    return Case(leaves, others, call, lambda gradient: turn(gradient).to(dtype).contiguous(), back)


def by_pytorch(given, backend, compiled=False):
    call = partial(attend, backend=backend)
    call = torch.compile(call, dynamic=False) if compiled else call
    return attention_case(given, call, key_mask=given["present"])


def key_mask(given, *shape):
    """True = present, the same keys for every row."""
    S = given["present"].shape[1]
    return given["present"].view(1, 1, S).expand(1, S, S).reshape(shape).contiguous()


def with_one(bias):
    return bias[:, None]


def attention_of(package, given, bias_dtype=None):
    """cuEquivariance's interface, which is ours, too."""
    function, S = importlib.import_module(package).triangle_attention, given["q"].shape[1]
    return attention_case(given, function, bias_turn=with_one, bias_dtype=bias_dtype,
                          mask=key_mask(given, 1, S, 1, 1, S))


def by_trifast(given):
    function, S = importlib.import_module("trifast").triangle_attention, given["q"].shape[1]

    def call(q, k, v, bias, masked):
        return function(q, k, v, bias, masked)
    return attention_case(given, call, turn=lambda x: x.transpose(1, 2), masked=~key_mask(given, 1, S, S))


def by_openfold3(given):
    function = importlib.import_module("openfold3.core.kernels.triton.evoformer").TritonEvoformer
    S = given["q"].shape[1]
    added = torch.zeros(1, S, 1, 1, S, device=given["q"].device, dtype=given["dtype"]).masked_fill(
        ~key_mask(given, 1, S, 1, 1, S), -1e9)
    return attention_case(given, lambda q, k, v, bias, mask: function(q, k, v, mask, bias),
                          turn=lambda x: x.transpose(2, 3), bias_turn=with_one, mask=added)


# --------------------------------------------------------------------------------------------------------
# Triangle multiplication, from the first LayerNorm to the output gate
# --------------------------------------------------------------------------------------------------------


def multiplication_tensors(S, device):
    generator, c = torch.Generator(device).manual_seed(S), CHANNELS
    given = {name: normal(generator, 1, S, S, c) for name in ("x", "weight")}
    for name in ("norm_in", "norm_out"):
        given[f"{name}_weight"] = normal(generator, c, mean=1.0, spread=0.1)
        given[f"{name}_bias"] = normal(generator, c, spread=0.1)
    for name, rows in dict(p_in=2 * c, g_in=2 * c, p_out=c, g_out=c).items():
        given[f"{name}_weight"] = normal(generator, rows, c, spread=c ** -0.5)
    present = (torch.arange(S, device=device) < S - max(1, S // 9)).float()
    given["mask"] = (present[:, None] * present)[None]
    given["weight"] = given["weight"] * given["mask"][..., None]  # what is masked is not defined
    return given


def names_of(given):
    return [name for name in given if name not in ("weight", "mask", "exact", "dtype")]


def exact_multiplication(given):
    leaves = {name: leaf(given[name], torch.float64) for name in names_of(given)}
    out = multiplied(**leaves, mask=given["mask"].double()) * given["mask"].double()[..., None]
    out.backward(given["weight"].double())
    return dict(out=out.detach(), **{name: tensor.grad for name, tensor in leaves.items()})


def multiplied(x, mask, norm_in_weight, norm_in_bias, p_in_weight, g_in_weight, norm_out_weight,
               norm_out_bias, p_out_weight, g_out_weight):
    """In plain PyTorch, as these models write it."""
    x = F.layer_norm(x, x.shape[-1:], norm_in_weight, norm_in_bias)
    sides = F.linear(x, p_in_weight) * F.linear(x, g_in_weight).sigmoid() * mask[..., None]
    left, right = (side.movedim(-1, 1) for side in sides.chunk(2, dim=-1))  # (1, c, S, S)
    product = (left @ right.mT).movedim(1, -1)
    product = F.layer_norm(product, product.shape[-1:], norm_out_weight, norm_out_bias)
    return F.linear(product, p_out_weight) * F.linear(x, g_out_weight).sigmoid()


def multiplication_case(given, call):
    dtype = given["dtype"]
    leaves = {name: leaf(given[name], dtype) for name in names_of(given)}
    back = dict.fromkeys(leaves, same) | dict(out=lambda out: out * given["mask"][..., None])
    return Case(leaves, dict(mask=given["mask"].to(dtype)), call, lambda gradient: gradient.to(dtype), back)


def multiplied_by_pytorch(given, compiled=False):
    return multiplication_case(given, torch.compile(multiplied, dynamic=False) if compiled else multiplied)


def multiplied_by(package, given):
    """cuEquivariance's interface, which is ours, too."""
    function = importlib.import_module(package).triangle_multiplicative_update
    return multiplication_case(given, partial(function, direction="outgoing"))


PEERS = dict(
    attention=[
        Peer("plain", "", partial(by_pytorch, backend="math")),
        Peer("compiled", "triton_", partial(by_pytorch, backend="math", compiled=True)),
        Peer("SDPA", "(?i)fmha|flash|efficient|sdpa|cudnn", partial(by_pytorch, backend="sdpa")),
        Peer("FlexAttention", "flex_attention", partial(by_pytorch, backend="flex")),
        Peer("ours", "attention_forward_kernel", partial(attention_of, "evoformer_kernels")),
        Peer("cuEquivariance", "(?i)cudnn|fmha|triangle_attention",
             partial(attention_of, "cuequivariance_torch", bias_dtype=torch.float32)),
        Peer("trifast", "^_fwd", by_trifast),
        Peer("OpenFold3's Triton", "^_attn_fwd", by_openfold3)],
    multiplication=[
        Peer("plain", "", multiplied_by_pytorch),
        Peer("compiled", "triton_", partial(multiplied_by_pytorch, compiled=True)),
        Peer("ours", "triangle_multiplication_front_kernel", partial(multiplied_by, "evoformer_kernels")),
        Peer("cuEquivariance", "(?i)trimul|gated_dual_gemm|sigmoid_gated",
             partial(multiplied_by, "cuequivariance_torch"))])
