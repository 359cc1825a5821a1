"""Exchanges between the ranks that share one sample, each of which has its own rows of it.

The one place where such ranks meet, on torch.distributed's functional collectives: autograd has their
derivatives from here, torch.compile sees plain operations. A tensor is "split" along a dimension of which
every rank holds an equal part, in the order of ranks, and "whole" along all others. Gradients are those of
one loss: what enters it through several ranks is summed, so a parameter's gradient on one rank is that rank's
share, which sum_gradients() makes whole, or in training the sum over all ranks (training/distributed.py).
"""
import torch
import torch.nn.functional as F

from fusion_lab.kernels.library.custom_gradients import TriangleProduct

ops = torch.ops._c10d_functional


def all_gather(x, name, size):
    """(K, *x.shape): x of every rank."""
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), size, name)).view(size, *x.shape)


def reduce_scatter(x, name, size):
    """x (K, ...) summed over ranks; a rank gets x[rank]."""
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous().flatten(0, 1), "sum", size, name))


def all_to_all(x, name, size):
    """x (K, ...): x[k] goes to rank k; returned as (K, ...) by where it came from."""
    ones = [1] * size
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), ones, ones, name))


def ranks_first(x, dim, size):
    """(..., K * n, ...) -> (K, ..., n, ...), where dim has what each of K ranks gets"""
    return x.unflatten(dim, (size, -1)).movedim(dim, 0)


def joined(by_rank, dim):
    """The reverse."""
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


class Gather(torch.autograd.Function):
    """x (..., n, ...), split along dim, whole on every rank: (..., K * n, ...)."""

    @staticmethod
    def forward(ctx, x, dim, name, size):
        ctx.how = dim, name, size
        return joined(all_gather(x, name, size), dim)

    @staticmethod
    def backward(ctx, gradient):
        dim, name, size = ctx.how
        return reduce_scatter(ranks_first(gradient, dim, size), name, size), None, None, None


class Reshard(torch.autograd.Function):
    """x (..., n, ..., K * m, ...), split along `split`, then whole there and split along `whole`:
    (..., K * n, ..., m, ...)."""

    @staticmethod
    def forward(ctx, x, split, whole, name, size):
        ctx.how = whole, split, name, size
        return joined(all_to_all(ranks_first(x, whole, size), name, size), split)

    @staticmethod
    def backward(ctx, gradient):
        split, whole, name, size = ctx.how
        return joined(all_to_all(ranks_first(gradient, whole, size), name, size), split), *[None] * 4


class Sum(torch.autograd.Function):
    """All ranks go on with the same sum, of the same loss: the gradient of a summand is that of the sum."""

    @staticmethod
    def forward(ctx, x, name):
        return ops.wait_tensor(ops.all_reduce(x, "sum", name))

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def sum_of_products(lefts, rights):
    """Of (c, B, ...) matrices, added up in one tensor."""
    total = None
    for left, right in zip(lefts, rights, strict=True):
        if total is None:
            total = left @ right
        else:
            total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return total


class SplitTriangleProduct(torch.autograd.Function):
    """TriangleProduct of (c, B, S, S), split along the first S as its result is. No operand is whole but
    while it is multiplied, and none of those is kept for backward, which exchanges once more."""

    @staticmethod
    def forward(ctx, left, right, outgoing, name, size):
        ctx.save_for_backward(left, right)
        ctx.how = outgoing, name, size
        if outgoing:  # row i of left meets every row j of right, of which other ranks have most
            return torch.cat([left @ other.mT for other in all_gather(right, name, size)], dim=-1)
        # incoming: a rank has the summands of its own k, for all i and j
        return reduce_scatter(torch.stack([own.mT @ right for own in left.chunk(size, -1)]), name, size)

    @staticmethod
    def backward(ctx, gradient):
        (left, right), (outgoing, name, size) = ctx.saved_tensors, ctx.how
        if outgoing:
            by_rank = gradient.chunk(size, -1)
            dleft = sum_of_products(by_rank, all_gather(right, name, size))
            dright = reduce_scatter(torch.stack([g.mT @ left for g in by_rank]), name, size)
        else:
            by_rank = all_gather(gradient, name, size)
            dleft = torch.cat([right @ g.mT for g in by_rank], dim=-1)
            dright = sum_of_products(left.chunk(size, -1), by_rank)
        return dleft, dright, None, None, None


class Ranks:
    """The ranks of one process group, or one alone, for whom every exchange returns its argument itself."""

    def __init__(self, name="", size=1, rank=0):
        self.name, self.size, self.rank = name, size, rank

    @classmethod
    def of(cls, group):
        return cls(group.group_name, group.size(), group.rank())

    def own(self, x, dim):
        """This rank's part of x, which all ranks have whole; the gradient of the rest is 0 here."""
        return x if self.size == 1 else x.chunk(self.size, dim)[self.rank].clone()

    def gather(self, x, dim):
        """x whole, from x split along dim."""
        return x if self.size == 1 else Gather.apply(x, dim, self.name, self.size)

    def reshard(self, x, split, whole, length=None):
        """x split along the dimension where it was whole, and whole along that where it was split. Where it
        cannot be split evenly, zeros are appended; the way back takes all but `length` away."""
        if self.size == 1:
            return x
        missing = -x.shape[whole] % self.size
        if missing:
            x = F.pad(x, [0, 0] * (x.dim() - whole - 1) + [0, missing])
        x = Reshard.apply(x, split, whole, self.name, self.size)
        return x if length in (None, x.shape[split]) else x.narrow(split, 0, length)

    def triangle_product(self, left, right, outgoing):
        """TriangleProduct of left and right."""
        if self.size == 1:
            return TriangleProduct.apply(left, right, outgoing)
        return SplitTriangleProduct.apply(left, right, outgoing, self.name, self.size)

    def sum(self, x):
        """x summed over ranks."""
        return x if self.size == 1 else Sum.apply(x, self.name)

    def sum_gradients(self, tensors):
        """Sum gradients over ranks, in place."""
        for tensor in tensors if self.size > 1 else ():
            if tensor.grad is not None:
                tensor.grad = self.sum(tensor.grad)


ALONE = Ranks()
