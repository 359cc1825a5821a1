"""Messages between nodes of a graph as Triton kernels with derivatives: nothing of an edge's width but the
edges themselves is in memory in forward, and nothing at all is kept.

    out_i = sum over k of mask_ik gelu(w2 gelu(own_i + we edges_ik + table[index_ik]) + b2)

own, out (N, C); edges (N, K, C); table (R, C); index (N, K) int64; mask (N, K); we, w2 (C, C); b2 (C,). The
first layer of a message [own; edge; neighbour] is a sum of three; its parts of nodes come projected, the
edges' part is made here. Forward: one program makes the K messages of a node, then the next node's.

Backward makes them again, and writes gradients of both layers' outputs and the first layer's result, 3 C
numbers an edge that are freed at once: gradients of weights are products over all edges, for the BLAS
library. The gradient of table is a sum over the edges that lead to a row: `incoming` sorts them once for all
layers of one graph, so that the sum has one order and no atomic additions.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fusion_lab.kernels import tuner
from fusion_lab.kernels.limits import MESSAGE_CHANNELS, MOST_NEIGHBOURS
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import candidates, operation, padded_width, precision, store_rows, vector


class Incoming(NamedTuple):
    """The edges of a graph by the row of table to which they lead."""
    order: torch.Tensor   # (N K,) edges
    starts: torch.Tensor  # (R + 1,) where those of a row begin


def incoming(index, rows):
    """Incoming of index (N, K) into a table of so many rows."""
    found, order = index.flatten().sort(stable=True)
    return Incoming(order, torch.searchsorted(found, torch.arange(rows + 1, device=index.device)))


def reference(own, edges, table, index, mask, we, w2, b2):
    """The same in plain PyTorch."""
    x = own[:, None] + F.linear(edges, we) + table[index]
    return (mask[:, :, None] * F.gelu(F.linear(F.gelu(x), w2, b2))).sum(1)


@triton.jit
def distribution(x):
    """Of the normal distribution: the share below x."""
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)


@triton.jit
def slope(x):
    """The derivative of gelu(x) = x distribution(x)."""
    return distribution(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def units(own, e, table, j, there, we, node, f, PRECISION: tl.constexpr, C: tl.constexpr):
    """Units f (BH,) of the first layer's result, (BK, BH) float32, for a node's edges e (BK, C)."""
    c = tl.arange(0, C)
    weight = tl.load(we + f[:, None] * C + c[None, :])
    near = tl.load(table + j[:, None] * C + f[None, :], mask=there, other=0.0).to(tl.float32)
    x = tl.dot(e, tl.trans(weight), input_precision=PRECISION)
    return x + near + tl.load(own + node * C + f).to(tl.float32)[None, :], weight


@triton.jit
def second_layer(own, edges, table, index, mask, we, w2, b2, node, K, PRECISION: tl.constexpr,
                 C: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr):
    """A node's edges e (BK, C), where they lead, which there are, their mask, and the second layer's result
    y (BK, C) in float32, BH hidden units at a time."""
    k, c = tl.arange(0, BK), tl.arange(0, C)
    there = k[:, None] < K
    e = tl.load(edges + (node * K + k)[:, None] * C + c[None, :], mask=there, other=0.0)
    j = tl.load(index + node * K + k, mask=k < K, other=0)
    m = tl.load(mask + node * K + k, mask=k < K, other=0.0).to(tl.float32)
    y = tl.zeros((BK, C), tl.float32) + vector(b2, C)
    for f0 in range(0, C, BH):
        f = f0 + tl.arange(0, BH)
        x, weight = units(own, e, table, j, there, we, node, f, PRECISION, C)
        g = (x * distribution(x)).to(e.dtype)
        y = tl.dot(g, tl.trans(tl.load(w2 + c[:, None] * C + f[None, :])), y, input_precision=PRECISION)
    return e, j, there, m, y


@triton.jit
def message_forward_kernel(own, edges, table, index, mask, we, w2, b2, out, N, K, PRECISION: tl.constexpr,
                           C: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, NODES: tl.constexpr):
    """NODES nodes, one after the other."""
    first = tl.program_id(0).to(tl.int64) * NODES
    for node in range(first, min(first + NODES, N)):
        e, j, there, m, y = second_layer(own, edges, table, index, mask, we, w2, b2, node, K, PRECISION, C,
                                         BK, BH)
        total = tl.sum(m[:, None] * (y * distribution(y)), 0)
        tl.store(out + node * C + tl.arange(0, C), total.to(out.dtype.element_ty))


@triton.jit
def message_backward_kernel(gradient, own, edges, table, index, mask, we, w2, b2, down, dedges, hidden,
                            dx_out, dy_out, sums, N, K, PRECISION: tl.constexpr, C: tl.constexpr,
                            BK: tl.constexpr, BH: tl.constexpr, NODES: tl.constexpr):
    """NODES nodes; down (N, C): gradient of own; hidden, dx_out, dy_out (N K, C): what the first layer gave
    the second, and the gradients before both gelus; sums (programs, C): parts of the gradient of b2."""
    k, c = tl.arange(0, BK), tl.arange(0, C)
    first, db2 = tl.program_id(0).to(tl.int64) * NODES, tl.zeros((C,), tl.float32)
    for node in range(first, min(first + NODES, N)):
        e, j, there, m, y = second_layer(own, edges, table, index, mask, we, w2, b2, node, K, PRECISION, C,
                                         BK, BH)
        dy = m[:, None] * slope(y) * tl.load(gradient + node * C + c).to(tl.float32)[None, :]
        db2 += tl.sum(dy, 0)
        dy = dy.to(e.dtype)
        p, P = node * K + k, node * K + K
        store_rows(dy_out, p, P, dy, C)
        de = tl.zeros((BK, C), tl.float32)
        for f0 in range(0, C, BH):
            f = f0 + tl.arange(0, BH)
            x, weight = units(own, e, table, j, there, we, node, f, PRECISION, C)
            dg = tl.dot(dy, tl.load(w2 + c[:, None] * C + f[None, :]), input_precision=PRECISION)
            dx = dg * slope(x)
            tl.store(down + node * C + f, tl.sum(dx, 0).to(down.dtype.element_ty))
            at = p[:, None] * C + f[None, :]
            tl.store(hidden + at, (x * distribution(x)).to(e.dtype), mask=there)
            dx = dx.to(e.dtype)
            tl.store(dx_out + at, dx, mask=there)
            de = tl.dot(dx, weight, de, input_precision=PRECISION)
        store_rows(dedges, p, P, de, C)
    tl.store(sums + tl.program_id(0).to(tl.int64) * C + c, db2)


@triton.jit
def message_table_kernel(dx, order, starts, out, C: tl.constexpr, BE: tl.constexpr):
    """One row of table: the sum of dx (N K, C) over the edges that lead to it, BE at a time."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    end, acc = tl.load(starts + row + 1), tl.zeros((C,), tl.float32)
    for place in range(tl.load(starts + row), end, BE):
        e = place + tl.arange(0, BE)
        edge = tl.load(order + e, mask=e < end, other=0)
        acc += tl.sum(tl.load(dx + edge[:, None] * C + c[None, :], mask=e[:, None] < end, other=0.0
                              ).to(tl.float32), 0)
    tl.store(out + row * C + c, acc.to(out.dtype.element_ty))


# --------------------------------------------------------------------------------------------------------
# Launchers and their derivative. Tiles by bytes of a number; the first of each fits every GPU.
# --------------------------------------------------------------------------------------------------------

NAMES = ("BH", "NODES", "num_warps", "num_stages")
FORWARD = {2: candidates(NAMES, (16, 1, 8, 2), (32, 1, 4, 2), (32, 4, 4, 2), (32, 4, 8, 2), (64, 4, 8, 1),
                         (64, 4, 4, 2)),
           4: candidates(NAMES, (16, 1, 8, 1), (16, 4, 8, 1))}
BACKWARD = {2: candidates(NAMES, (16, 1, 8, 2), (32, 1, 8, 2), (32, 4, 8, 2), (32, 4, 8, 1), (16, 4, 8, 2),
                          (64, 4, 8, 1)),
            4: candidates(NAMES, (16, 1, 8, 1), (16, 4, 8, 1))}


def run(kernel, candidates, edges, we, launch):
    """launch(grid, options) with the tuner's choice."""
    nodes, neighbours, channels = edges.shape
    if message := unsupported(channels, neighbours):
        raise ValueError(message)
    options = dict(C=channels, BK=padded_width(neighbours), PRECISION=precision(we.dtype))
    shape = f"{str(we.dtype)[6:]} N{triton.next_power_of_2(nodes)} K{options['BK']} C{channels}"
    tuner.launch(kernel.__name__, shape, candidates[we.element_size()], lambda chosen: launch(
        (triton.cdiv(nodes, chosen["NODES"]),), dict(options, **chosen)))


def forward(own, edges, table, index, mask, we, w2, b2):
    out = torch.empty_like(own)
    run(message_forward_kernel, FORWARD, edges, we, lambda grid, options: message_forward_kernel[grid](
        own, edges, table, index, mask, we, w2, b2, out, len(own), edges.shape[1], **options))
    return out


def forward_sizes(own, *_):
    return torch.empty_like(own)


def backward(gradient, own, edges, table, index, mask, we, w2, b2):
    """Gradients of own and edges; hidden, and gradients before both gelus, (N K, C); of b2, float32."""
    found = backward_sizes(gradient, own, edges, table, index, mask, we, w2, b2)

    def launch(grid, options):
        parts = found[-1].new_empty(*grid, own.shape[1])
        message_backward_kernel[grid](gradient, own, edges, table, index, mask, we, w2, b2, *found[:-1],
                                      parts, len(own), edges.shape[1], **options)
        torch.sum(parts, 0, out=found[-1])
    run(message_backward_kernel, BACKWARD, edges, we, launch)
    return found


def backward_sizes(gradient, own, edges, *_):
    return (torch.empty_like(own), torch.empty_like(edges),
            *(edges.new_empty(edges.shape[0] * edges.shape[1], edges.shape[2]) for _ in range(3)),
            own.new_empty(own.shape[1], dtype=torch.float32))


def to_table(dx, order, starts):
    out = to_table_sizes(dx, order, starts)
    message_table_kernel[(len(out),)](dx, order, starts, out, C=dx.shape[1], BE=16, num_warps=1)
    return out


def to_table_sizes(dx, order, starts):
    return dx.new_empty(starts.shape[0] - 1, dx.shape[1])


INPUTS = "Tensor own, Tensor edges, Tensor table, Tensor index, Tensor mask, Tensor we, Tensor w2, Tensor b2"
FORWARD_OP = operation(f"message_forward({INPUTS}) -> Tensor", forward, forward_sizes)
BACKWARD_OP = operation(f"message_backward(Tensor gradient, {INPUTS}) -> "
                        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", backward, backward_sizes)
TABLE_OP = operation("message_table(Tensor dx, Tensor order, Tensor starts) -> Tensor", to_table,
                     to_table_sizes)


class Messages(torch.autograd.Function):
    """messages() with its derivative."""

    @staticmethod
    def forward(ctx, own, edges, table, index, mask, we, w2, b2, order, starts):
        ctx.save_for_backward(own, edges, table, index, mask, we, w2, b2, order, starts)
        return FORWARD_OP(own, edges, table, index, mask, we, w2, b2)

    @staticmethod
    def backward(ctx, gradient):
        *inputs, order, starts = ctx.saved_tensors
        edges = inputs[1]
        down, dedges, hidden, dx, dy, db2 = BACKWARD_OP(gradient.contiguous(), *inputs)
        dtable = TABLE_OP(dx, order, starts)
        return (down, dedges, dtable, None, None, dx.t() @ edges.view(-1, edges.shape[-1]), dy.t() @ hidden,
                db2.to(inputs[-1].dtype), None, None)


def messages(own, edges, table, index, mask, we, w2, b2, leading):
    """The sum over neighbours, shaped as own (N, C); leading: incoming(index, rows of table). In autocast's
    dtype if that is on."""
    dtype = product_dtype(edges)
    own, edges, table, mask, we, w2, b2 = (t.to(dtype).contiguous()
                                           for t in (own, edges, table, mask, we, w2, b2))
    return Messages.apply(own, edges, table, index.contiguous(), mask, we, w2, b2, *leading)


def unsupported(channels, neighbours):
    """Why these kernels cannot take so many channels and neighbours; "" if they can."""
    if channels not in MESSAGE_CHANNELS:
        return f"no Triton messages of {channels} channels (but of {', '.join(map(str, MESSAGE_CHANNELS))})"
    return f"no Triton messages from {neighbours} neighbours" if neighbours > MOST_NEIGHBOURS else ""
