"""Messages between nodes of a graph: what stands between their matrix products, as Triton kernels with
derivatives. Each reads every tensor as wide as the edges once, and writes at most one such tensor.

    first_layer: g_ik = gelu(own_i + edges_ik + table[index_ik])
    biased_gelu: g_ik = gelu(y_ik + bias)
    sum_over_neighbours: out_i = sum over k of mask_ik gelu(y_ik + bias)

own, out (N, C); edges, g, y (N, K, C); bias (C,); table (R, C); index (N, K) int64; mask (N, K). N nodes, in
one dimension or several, have K edges each; R rows of the table are what edges lead to.

The first layer of a message [own; edge; neighbour] is a sum of three, which come projected by the BLAS
library. Later layers' biases are added here: in the product they cost half of its time (measured),
and their gradients another reading of all edges.

The gradient of table is a sum over the edges that lead to a row. `incoming` sorts them once for all layers of
a graph, so that the sum has one order and no atomic additions. Float32 within. Kept for backward are the
inputs; what stands before and behind a gelu is recomputed.

In kernels one program has one node and takes BE of its edges k at a time, as a tile (BE, C); axis 0: nodes.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evoformer_kernels.common import LOG2E, load_rows, operation, reciprocal, start, store_rows, vector

TILE = 1024  # numbers of edges that a program of two warps holds at a time
STAGES = tl.constexpr(3)  # of its loads: while it computes one tile, the next two are on their way


class Incoming(NamedTuple):
    """The edges of a graph by the row of table to which they lead."""
    order: torch.Tensor   # (N K,) edges
    starts: torch.Tensor  # (R + 1,) where those of a row begin


def incoming(index, rows):
    """Incoming of index into a table of so many rows, fewer than 2**31."""
    found, order = index.flatten().int().sort(stable=True)
    return Incoming(order, torch.searchsorted(found, torch.arange(rows + 1, device=index.device).int()))


@triton.jit
def normal(x):
    """Of the normal distribution: the share below x and the density at x, both shaped as x. Abramowitz and
    Stegun, Handbook of Mathematical Functions, 7.1.26, whose numbers these are: off by at most 1e-7."""
    bell = tl.exp2(x * x * (-0.5 * LOG2E))
    t = reciprocal(1.0 + 0.23164189 * tl.abs(x))
    beyond = bell * t * (0.127414796 + t * (-0.142248368 + t * (
        0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return tl.where(x < 0, beyond, 1.0 - beyond), 0.3989422804014327 * bell


@triton.jit
def gelu(x):
    """x times the share of the normal distribution below x, shaped as x."""
    share, _ = normal(x)
    return x * share


@triton.jit
def slope(x):
    """The derivative of gelu, shaped as x."""
    share, density = normal(x)
    return share + x * density


@triton.jit
def before_gelu(own, edges, table, index, node, k, K, STRIDE, C: tl.constexpr):
    """own + edges + table[index] of edges k (BE,) of a node, (BE, C) float32."""
    c, there = tl.arange(0, C)[None, :], k < K
    j = tl.load(index + node * K + k, mask=there, other=0)  # (BE,)
    edge = tl.load(edges + (node * K + k)[:, None] * STRIDE + c, mask=there[:, None], other=0.0)  # (BE, C)
    near = tl.load(table + j[:, None] * C + c, mask=there[:, None], other=0.0)  # (BE, C)
    return vector(own + node * C, C) + edge.to(tl.float32) + near.to(tl.float32)


@triton.jit
def message_first_kernel(own, edges, table, index, out, K, STRIDE, C: tl.constexpr, BE: tl.constexpr):
    """One program: a node's K messages, out = gelu(own + edges + table[index]). Axis 0: nodes.

        own (N, C); edges (N, K, C), whose rows lie STRIDE apart; table (R, C); index (N, K); out (N, K, C)
    """
    node = tl.program_id(0).to(tl.int64)
    for k0 in tl.range(0, K, BE, num_stages=STAGES):
        k = k0 + tl.arange(0, BE)
        x = before_gelu(own, edges, table, index, node, k, K, STRIDE, C)  # (BE, C)
        store_rows(out, node * K + k, node * K + K, gelu(x), C)


@triton.jit
def message_first_backward_kernel(gradient, own, edges, table, index, dx_out, down, K, STRIDE,
                                  C: tl.constexpr, BE: tl.constexpr):
    """One program: the gradients of a node's K messages before gelu, x = own + edges + table[index], and
    their sum, that of own. Axis 0: nodes.

        dx = gradient gelu'(x);  down = sum over k of dx

        gradient, dx_out (N, K, C); own, down (N, C); edges, table, index as in message_first_kernel
    """
    node, acc = tl.program_id(0).to(tl.int64), tl.zeros((BE, C), tl.float32)
    for k0 in tl.range(0, K, BE, num_stages=STAGES):
        k = k0 + tl.arange(0, BE)
        x = before_gelu(own, edges, table, index, node, k, K, STRIDE, C)  # (BE, C)
        dx = load_rows(gradient, node * K + k, node * K + K, C).to(tl.float32) * slope(x)
        store_rows(dx_out, node * K + k, node * K + K, dx, C)
        acc += dx
    tl.store(down + node * C + tl.arange(0, C), tl.sum(acc, 0).to(down.dtype.element_ty))


@triton.jit
def biased(y, bias, node, k, K, C: tl.constexpr):
    """y + bias of edges k (BE,) of a node, (BE, C) float32."""
    return load_rows(y, node * K + k, node * K + K, C).to(tl.float32) + vector(bias, C)


@triton.jit
def present(mask, node, k, K):
    """The mask of edges k of a node, (BE, 1) float32."""
    return tl.load(mask + node * K + k, mask=k < K, other=0.0).to(tl.float32)[:, None]


@triton.jit
def message_gelu_kernel(y, bias, mask, out, K, SUM: tl.constexpr, C: tl.constexpr, BE: tl.constexpr):
    """One program: gelu(y + bias) of a node's K edges, or with SUM their masked sum. Axis 0: nodes.

        y (N, K, C); bias (C,); with SUM mask (N, K) and out (N, C), else mask None and out (N, K, C)
    """
    node, acc = tl.program_id(0).to(tl.int64), tl.zeros((BE, C), tl.float32)
    for k0 in tl.range(0, K, BE, num_stages=STAGES):
        k = k0 + tl.arange(0, BE)
        g = gelu(biased(y, bias, node, k, K, C))  # (BE, C)
        if SUM:
            acc += present(mask, node, k, K) * g
        else:
            store_rows(out, node * K + k, node * K + K, g, C)
    if SUM:
        tl.store(out + node * C + tl.arange(0, C), tl.sum(acc, 0).to(out.dtype.element_ty))


@triton.jit
def message_gelu_backward_kernel(gradient, y, bias, mask, dy, partial_sums, K, SUM: tl.constexpr,
                                 C: tl.constexpr, BE: tl.constexpr):
    """One program: gradients of a node's K edges, and their sum, its share of bias's. Axis 0: nodes.

        dy = [mask] gradient gelu'(y + bias);  partial_sums = sum over k of dy

        y, dy (N, K, C); bias (C,); partial_sums (N, C) float32; gradient, mask as out, mask of
        message_gelu_kernel
    """
    node, acc = tl.program_id(0).to(tl.int64), tl.zeros((BE, C), tl.float32)
    for k0 in tl.range(0, K, BE, num_stages=STAGES):
        k = k0 + tl.arange(0, BE)
        d = slope(biased(y, bias, node, k, K, C))  # (BE, C)
        if SUM:
            d *= present(mask, node, k, K) * vector(gradient + node * C, C)
        else:
            d *= load_rows(gradient, node * K + k, node * K + K, C).to(tl.float32)
        store_rows(dy, node * K + k, node * K + K, d, C)
        acc += d
    tl.store(partial_sums + node * C + tl.arange(0, C), tl.sum(acc, 0))


@triton.jit
def message_table_kernel(dx, order, starts, out, C: tl.constexpr, BE: tl.constexpr):
    """One program: the gradient of one row of table, the sum of dx over the edges that lead to it, BE at a
    time. Axis 0: rows of table.

        dx (N K, C); order (N K,) edges by the row that they lead to; starts (R + 1,) where a row's begin;
        out (R, C)
    """
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    end, acc = tl.load(starts + row + 1), tl.zeros((BE, C), tl.float32)
    for e0 in range(tl.load(starts + row), end, BE):
        e = e0 + tl.arange(0, BE)
        edge = tl.load(order + e, mask=e < end, other=0)  # (BE,)
        acc += tl.load(dx + edge[:, None] * C + c[None, :], mask=e[:, None] < end, other=0.0).to(tl.float32)
    tl.store(out + row * C + c, tl.sum(acc, 0).to(out.dtype.element_ty))


# --- Launchers and their derivatives --------------------------------------------------------------------


def tile(channels):
    """Options of the kernels of nodes: TILE numbers of edges at a time, but at least 8 edges."""
    return dict(C=channels, BE=max(TILE // channels, 8), num_warps=2)


def one_stride(edges):
    """edges (N, K, C), copied unless their N K rows lie equally far apart, and how far that is."""
    if edges.stride(2) == 1 and edges.stride(0) == edges.shape[1] * edges.stride(1):
        return edges, edges.stride(1)
    return edges.contiguous(), edges.shape[2]


def forward(own: Tensor, edges: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """gelu(own + edges + table[index]), (N, K, C)."""
    (edges, stride), out = one_stride(edges), edges.new_empty(edges.shape)
    start(message_first_kernel, (own.shape[0],), own, edges, table, index, out, edges.shape[1], stride,
          **tile(own.shape[1]))
    return out


def backward(gradient: Tensor, own: Tensor, edges: Tensor, table: Tensor,
             index: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients before gelu, (N, K, C), and of own (N, C)."""
    (edges, stride), found = one_stride(edges), (gradient.new_empty(gradient.shape), own.new_empty(own.shape))
    start(message_first_backward_kernel, (own.shape[0],), gradient, own, edges, table, index, *found,
          edges.shape[1], stride, **tile(own.shape[1]))
    return found


def to_table(dx: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """The gradient of table (R, C), from dx (N, K, C) and Incoming."""
    out = dx.new_empty(starts.shape[0] - 1, dx.shape[-1])
    start(message_table_kernel, (out.shape[0],), dx, order, starts, out, C=dx.shape[-1], BE=8, num_warps=1)
    return out


def activate(y: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """gelu(y + bias) (N, K, C); with a mask its masked sum (N, C)."""
    out = y.new_empty(y.shape if mask is None else (y.shape[0], y.shape[2]))
    start(message_gelu_kernel, (y.shape[0],), y, bias, mask, out, y.shape[1], SUM=mask is not None,
          **tile(y.shape[2]))
    return out


def activate_backward(gradient: Tensor, y: Tensor, bias: Tensor,
                      mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradient of y (N, K, C), and partial sums (N, C) of that of bias."""
    found = y.new_empty(y.shape), y.new_empty(y.shape[0], y.shape[2], dtype=torch.float32)
    start(message_gelu_backward_kernel, (y.shape[0],), gradient, y, bias, mask, *found, y.shape[1],
          SUM=mask is not None, **tile(y.shape[2]))
    return found


FIRST_OP = operation("message_first", forward)
FIRST_BACKWARD_OP = operation("message_first_backward", backward)
TABLE_OP = operation("message_table", to_table)
GELU_OP = operation("message_gelu", activate)
GELU_BACKWARD_OP = operation("message_gelu_backward", activate_backward)


class FirstLayer(torch.autograd.Function):
    """first_layer() with its derivative."""

    @staticmethod
    def forward(ctx, own, edges, table, index, order, starts):
        ctx.save_for_backward(own, edges, table, index, order, starts)
        return FIRST_OP(own, edges, table, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        *inputs, order, starts = ctx.saved_tensors
        dx, down = FIRST_BACKWARD_OP(gradient.contiguous(), *inputs)
        return down, dx, TABLE_OP(dx, order, starts), None, None, None


class Gelu(torch.autograd.Function):
    """biased_gelu() and sum_over_neighbours() with their derivative."""

    @staticmethod
    def forward(ctx, y, bias, mask):
        ctx.save_for_backward(y, bias, mask)
        return GELU_OP(y, bias, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        y, bias, mask = ctx.saved_tensors
        dy, partial_sums = GELU_BACKWARD_OP(gradient.contiguous(), y, bias, mask)
        return dy, partial_sums.sum(0).to(bias.dtype), None


def first_layer(own, edges, table, index, leading):
    """gelu(own + edges + table[index]), shaped as edges; leading: incoming(index, rows of table)."""
    return FirstLayer.apply(own.flatten(0, -2).contiguous(), edges.flatten(0, -3), table.contiguous(),
                            index.flatten(0, -2).contiguous(), *leading).view(edges.shape)


def biased_gelu(y, bias):
    """gelu(y + bias), shaped as y."""
    return Gelu.apply(y.contiguous().flatten(0, -3), bias, None).view(y.shape)


def sum_over_neighbours(y, bias, mask):
    """The sum over K of mask gelu(y + bias); mask has no gradient."""
    summed = Gelu.apply(y.contiguous().flatten(0, -3), bias, mask.flatten(0, -2).contiguous())
    return summed.view(*mask.shape[:-1], -1)
