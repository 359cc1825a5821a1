"""The products of triangle multiplication, between its own kernels: of short sides as Triton kernels, one in
forward and one for both of backward; else the BLAS library's.

    outgoing: product = left right^T;  dleft = d right,    dright = d^T left
    incoming: product = left^T right;  dleft = right d^T,  dright = left d

All are (N, SP, SP) for N = c B matrices, contiguous, with zeros beyond S; d is the gradient of product. The
library has a launch for each of backward's products, which both read d, and at B4 S64 on an H200 a memset
before every product. Here a program owns whole matrices: forward reads 2 and writes 1, backward reads 3 and
writes 2, each once. Not timed on a GPU yet.
"""
import torch
import triton
import triton.language as tl

from fusion_lab.kernels import tuner
from fusion_lab.kernels.triton_parts import candidates, precision

LONGEST = 64  # side of a matrix, and that of every tile: of 32 rows, transposed, Triton 3.6 made faulty code
DTYPES = (torch.float16, torch.bfloat16)

# MANY matrices a program, one after the other, so that loads are ahead of products; it divides the number of
# channels, which is a multiple of 16. The first fits every GPU.
CANDIDATES = candidates(("MANY", "num_warps", "num_stages"), (1, 4, 1), (1, 8, 1), (2, 4, 2), (2, 8, 2),
                        (4, 4, 2), (4, 4, 3), (8, 4, 3))


def reference(left, right, outgoing):
    """The product in plain PyTorch."""
    return left @ right.mT if outgoing else left.mT @ right


@triton.jit
def places(number, SP: tl.constexpr, T: tl.constexpr):
    """Offsets of matrix `number` as a tile (T, T), and whether they lie in it, (T, T)."""
    i = tl.arange(0, T)
    at = number.to(tl.int64) * (SP * SP) + i[:, None] * SP + i[None, :]
    inside = tl.full((T, T), True, tl.int1) if SP == T else (i < SP)[:, None] & (i < SP)[None, :]
    return at, inside


@triton.jit
def product_kernel(lefts, rights, products, OUTGOING: tl.constexpr, PRECISION: tl.constexpr,
                   SP: tl.constexpr, T: tl.constexpr, MANY: tl.constexpr):
    """MANY products."""
    for number in range(MANY):
        at, inside = places(tl.program_id(0) * MANY + number, SP, T)
        left, right = tl.load(lefts + at, inside, 0.0), tl.load(rights + at, inside, 0.0)
        if OUTGOING:
            product = tl.dot(left, tl.trans(right), input_precision=PRECISION)
        else:
            product = tl.dot(tl.trans(left), right, input_precision=PRECISION)
        tl.store(products + at, product.to(products.dtype.element_ty), inside)


@triton.jit
def product_backward_kernel(lefts, rights, gradients, dlefts, drights, OUTGOING: tl.constexpr,
                            PRECISION: tl.constexpr, SP: tl.constexpr, T: tl.constexpr, MANY: tl.constexpr):
    """MANY dleft and dright."""
    for number in range(MANY):
        at, inside = places(tl.program_id(0) * MANY + number, SP, T)
        left, right = tl.load(lefts + at, inside, 0.0), tl.load(rights + at, inside, 0.0)
        d = tl.load(gradients + at, inside, 0.0)
        if OUTGOING:
            dleft = tl.dot(d, right, input_precision=PRECISION)
            dright = tl.dot(tl.trans(d), left, input_precision=PRECISION)
        else:
            dleft = tl.dot(right, tl.trans(d), input_precision=PRECISION)
            dright = tl.dot(left, d, input_precision=PRECISION)
        tl.store(dlefts + at, dleft.to(dlefts.dtype.element_ty), inside)
        tl.store(drights + at, dright.to(drights.dtype.element_ty), inside)


def short(matrices):
    """Whether the kernels take them."""
    return matrices.shape[-1] <= LONGEST and matrices.dtype in DTYPES


def launch(kernel, *tensors, outgoing):
    """With the tuner's choice, which goes by dtype, P matrices and their side S."""
    many, side, dtype = *tensors[0].shape[:2], tensors[0].dtype
    shape = f"{str(dtype)[6:]} P{triton.next_power_of_2(many)} S{triton.next_power_of_2(side)}"

    def run(config):
        kernel[(many // config["MANY"],)](*tensors, OUTGOING=outgoing, PRECISION=precision(dtype), SP=side,
                                          T=LONGEST, **config)
    tuner.launch(kernel.__name__, shape, CANDIDATES, run)


def multiply(left, right, outgoing):
    """product"""
    if not short(left):
        return reference(left, right, outgoing)
    product = torch.empty_like(left)
    launch(product_kernel, left, right, product, outgoing=outgoing)
    return product


def multiply_backward(left, right, d, dleft, dright, outgoing):
    """Fill dleft and dright."""
    if short(left):
        launch(product_backward_kernel, left, right, d, dleft, dright, outgoing=outgoing)
    else:
        torch.bmm(*((d, right) if outgoing else (right, d.mT)), out=dleft)
        torch.bmm(*((d.mT, left) if outgoing else (left, d)), out=dright)
