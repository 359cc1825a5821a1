"""The matrix products of triangle multiplication, between its other kernels.

Matrices of short sides have Triton kernels: one in forward, one for both products of backward. Others are the
BLAS library's.

    outgoing: product = left right^T;  dleft = d right,    dright = d^T left
    incoming: product = left^T right;  dleft = right d^T,  dright = left d

All are N = c B matrices (SP, SP), contiguous, with zeros beyond S; d is the gradient of product. `sides`
holds all lefts and behind them all rights, (2 c, B, SP, SP). The
library has a launch for each of backward's products, which both read d. At B4 S64 on an H200 it has a memset
before every product. Here a program owns whole matrices, each of which is read or written once.
"""
import torch
import triton
import triton.language as tl

from evoformer_kernels import tuner
from evoformer_kernels.common import bind, candidates, is_fake
from evoformer_kernels.precision import HALF

# The longest side of a matrix that the kernels take, and the side of every tile, even of shorter matrices:
# for transposed tiles of 32 rows Triton 3.6 made faulty code.
LONGEST = 64

# MANY: matrices a program, one after the other, so that the next one's loads run during products. It divides
# the number of channels, which is a multiple of 16. The first fits every GPU.
CANDIDATES = candidates(("MANY", "num_warps", "num_stages"), (1, 4, 1), (1, 8, 1), (2, 4, 2), (2, 8, 2),
                        (4, 4, 2), (4, 4, 3), (8, 4, 3))


def reference(left, right, outgoing):
    """The product in plain PyTorch."""
    return left @ right.mT if outgoing else left.mT @ right


@triton.jit
def matrix_offsets(number, SP: tl.constexpr, T: tl.constexpr):
    """Offsets (T, T) of matrix `number` (SP, SP), and which of them lie in it, (T, T)."""
    i = tl.arange(0, T)
    at = number.to(tl.int64) * (SP * SP) + i[:, None] * SP + i[None, :]  # (T, T)
    inside = tl.full((T, T), True, tl.int1) if SP == T else (i < SP)[:, None] & (i < SP)[None, :]
    return at, inside


@triton.jit
def triangle_multiplication_product_kernel(
        lefts, rights,  # (N, SP, SP) each
        products,  # (N, SP, SP) out
        OUTGOING: tl.constexpr, SP: tl.constexpr, T: tl.constexpr,
        MANY: tl.constexpr):
    """product = left right^T, or left^T right for incoming edges: MANY whole matrices a program.

    Grid: axis 0: N / MANY programs. T: side of a tile, which holds one matrix."""
    for number in range(MANY):
        at, inside = matrix_offsets(tl.program_id(0) * MANY + number, SP, T)
        left, right = tl.load(lefts + at, inside, 0.0), tl.load(rights + at, inside, 0.0)  # (T, T)
        if OUTGOING:
            product = tl.dot(left, tl.trans(right))  # (T, T)
        else:
            product = tl.dot(tl.trans(left), right)
        tl.store(products + at, product.to(products.dtype.element_ty), inside)


@triton.jit
def triangle_multiplication_product_backward_kernel(
        lefts, rights, gradients,  # (N, SP, SP) each; gradients: of the products
        dlefts, drights,  # (N, SP, SP) each, out
        OUTGOING: tl.constexpr, SP: tl.constexpr, T: tl.constexpr,
        MANY: tl.constexpr):
    """dleft and dright of MANY whole matrices a program, d being the product's gradient.

        outgoing: dleft = d right,    dright = d^T left
        incoming: dleft = right d^T,  dright = left d

    Grid: axis 0: N / MANY programs. T: side of a tile, which holds one matrix."""
    for number in range(MANY):
        at, inside = matrix_offsets(tl.program_id(0) * MANY + number, SP, T)
        left, right = tl.load(lefts + at, inside, 0.0), tl.load(rights + at, inside, 0.0)  # (T, T)
        d = tl.load(gradients + at, inside, 0.0)  # (T, T)
        if OUTGOING:
            dleft = tl.dot(d, right)  # (T, T)
            dright = tl.dot(tl.trans(d), left)
        else:
            dleft = tl.dot(right, tl.trans(d))
            dright = tl.dot(left, d)
        tl.store(dlefts + at, dleft.to(dlefts.dtype.element_ty), inside)
        tl.store(drights + at, dright.to(drights.dtype.element_ty), inside)


def halves(sides):
    """(N, SP, SP) lefts and rights of sides (2 c, B, SP, SP)."""
    return sides.view(2, -1, *sides.shape[2:]).unbind()


def short(sides):
    """Whether the kernels take them."""
    return sides.shape[-1] <= LONGEST and sides.dtype in HALF


def launch(kernel, sides, *others, outgoing, bound=None):
    """Launch with the tuner's choice, which goes by dtype, P matrices and their side S. Nothing for fake
    tensors. bound: as in common.bind()."""
    tensors, name = (sides, sides[len(sides) // 2:], *others), kernel.__name__  # lefts come first in sides
    if bound is not None and name in bound:
        return bound[name](*tensors)
    if is_fake(sides):
        return None
    matrices, side = len(sides) // 2 * sides.shape[1], sides.shape[-1]
    shape = tuner.class_of(sides.dtype, P=matrices, S=side)

    def run(config):
        bind(bound, name, kernel, (matrices // config["MANY"],), OUTGOING=outgoing, SP=side, T=LONGEST,
             **config)(*tensors)
    return tuner.launch(name, shape, CANDIDATES, run)


def multiply(sides, outgoing, bound=None):
    """The product of each pair of matrices, (c, B, SP, SP)."""
    size = (len(sides) // 2, *sides.shape[1:])
    if not short(sides):
        return reference(*halves(sides), outgoing).view(size)
    product = sides.new_empty(size)
    launch(triangle_multiplication_product_kernel, sides, product, outgoing=outgoing, bound=bound)
    return product


def multiply_backward(sides, dproduct, outgoing, bound=None):
    """The gradient (2 c, B, SP, SP) of sides, from dproduct (c, B, SP, SP)."""
    dsides = torch.empty_like(sides)
    if short(sides):
        launch(triangle_multiplication_product_backward_kernel, sides, dproduct, dsides,
               dsides[len(dproduct):], outgoing=outgoing, bound=bound)
        return dsides
    (left, right), (dleft, dright), d = halves(sides), halves(dsides), dproduct.flatten(0, 1)
    torch.bmm(*((d, right) if outgoing else (right, d.mT)), out=dleft)
    torch.bmm(*((d.mT, left) if outgoing else (left, d)), out=dright)
    return dsides
