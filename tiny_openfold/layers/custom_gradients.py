"""Operations of models whose gradients are written by hand, each for a layout or an epilogue, or to keep a
tensor."""
import functools

import torch
import torch.nn.functional as F
from torch import library
from torch.utils.checkpoint import checkpoint

from evoformer_kernels.precision import at_least_float32, product_dtype


@library.custom_op("tiny_openfold::stored", mutates_args=())
def stored_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy that torch.compile cannot see into."""
    return x.clone()


stored_copy.register_fake(torch.empty_like)
stored_copy.register_autograd(lambda ctx, gradient: gradient)


def stored(x):
    """x; under torch.compile a copy in memory, which the compiler does not compute again for each reader."""
    return stored_copy(x) if torch.compiler.is_compiling() else x


def recomputed(on, call, *inputs, random=False):
    """call(*inputs); if on, backward recomputes what the call would keep. random: it draws random numbers."""
    if on and torch.is_grad_enabled():
        return checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=random)
    return call(*inputs)


class ChannelBias(torch.autograd.Function):
    """y + bias for y (c, B, S, S). The bias gradient is summed over rows first: enough sums at a time for a
    compiler to make them, in parallel, in the kernel that makes the gradient of y."""

    @staticmethod
    def forward(ctx, y, bias):
        return y + bias[:, None, None, None]

    @staticmethod
    def backward(ctx, gradient):
        rows = gradient.sum(-1, dtype=at_least_float32(gradient.dtype))
        return gradient, rows.sum((1, 2)).to(gradient.dtype)


@library.custom_op("tiny_openfold::table_gradient", mutates_args=())
def table_gradient(gradient: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    """(..., c) and int64 (...) -> (rows, c): the sum of the gradient's rows at each index.

    torch.compile cannot see into it. Its own code adds the 25,000 rows of a far offset at S 256 to each other
    by atomic additions: six times as wrong in float32 as PyTorch's kernel (H200), and never the same bits.
    """
    return torch.ops.aten.embedding_dense_backward(gradient, index, rows, -1, False)


table_gradient.register_fake(lambda gradient, index, rows: gradient.new_empty(rows, gradient.shape[-1]))


def summed_rows(*chosen, fused):
    """The sum of layer(index) over pairs of an nn.Embedding and indices, int64, which broadcast."""
    if fused:
        layers, indices = zip(*chosen, strict=True)
        return SummedRows.apply(*(layer.weight for layer in layers), *indices)
    return functools.reduce(torch.add, (layer(index) for layer, index in chosen))


class SummedRows(torch.autograd.Function):
    """The sum of rows of tables (n, c), one of each, from the tables and, after them, as many indices.

    In 16 bits the gradient of all tables is one product, of rows with a 1 at each index, as AlphaFold 2's
    relpos (Algorithm 4) has it. Else it would be a pass over the gradient for each table, with atomic
    additions of many rows to few. Wider gradients are added up as ever: TF32 would round them first.
    """

    @staticmethod
    def forward(ctx, *given):
        tables, indices = given[:len(given) // 2], given[len(given) // 2:]
        ctx.save_for_backward(*indices)
        ctx.rows = [len(table) for table in tables]
        return functools.reduce(torch.add, map(F.embedding, indices, tables))

    @staticmethod
    def backward(ctx, gradient):
        indices, none = ctx.saved_tensors, [None] * len(ctx.rows)
        if gradient.dtype not in (torch.bfloat16, torch.float16):
            return *(table_gradient(gradient.sum_to_size(*index.shape, gradient.shape[-1]), index, rows)
                     for index, rows in zip(indices, ctx.rows, strict=True)), *none
        first, total = [sum(ctx.rows[:n]) for n in range(len(ctx.rows))], sum(ctx.rows)
        columns = torch.arange(total + -total % 8, device=gradient.device)  # by 8, as GEMMs like it
        ones = functools.reduce(torch.logical_or, [
            index[..., None] + begin == columns for index, begin in zip(indices, first, strict=True)])
        ones = ones.to(gradient.dtype).expand(*gradient.shape[:-1], -1).flatten(0, -2)
        return *(ones.t() @ gradient.flatten(0, -2))[:total].split(ctx.rows), *none


class LinearReLU(torch.autograd.Function):
    """relu(x W^T + b) with bias and ReLU in the GEMM's epilogue, where the BLAS library has one. PyTorch has
    the kernel without its derivative; the result serves as the mask of backward, too."""

    @staticmethod
    def of(x, layer):
        """layer(x).relu() for x (..., c_in), in autocast's dtype if that is on."""
        return LinearReLU.apply(*(t.to(product_dtype(x)) for t in (x, layer.weight, layer.bias)))

    @staticmethod
    def forward(ctx, x, weight, bias):
        y = torch._addmm_activation(bias, x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight, y = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0).flatten(0, -2)
        return (gradient @ weight).view(x.shape), gradient.t() @ x.flatten(0, -2), gradient.sum(0)


class TriangleProduct(torch.autograd.Function):
    """left right^T (outgoing) or left^T right (incoming) of (c, B, S, S), matrix by matrix. Its own gradient
    is made contiguous, by the kernel that writes it, so that no GEMM has to copy it; those of left and right
    are made in the layout of left and right, where autograd would hand on one of them transposed."""

    @staticmethod
    def forward(ctx, left, right, outgoing):
        ctx.save_for_backward(left, right)
        ctx.outgoing = outgoing
        return left @ right.mT if outgoing else left.mT @ right

    @staticmethod
    def backward(ctx, gradient):
        (left, right), gradient = ctx.saved_tensors, gradient.contiguous()
        if ctx.outgoing:
            return gradient @ right, gradient.mT @ left, None
        return right @ gradient.mT, left @ gradient, None
