"""The bias of attention with the key mask in it, padded, and its transpose, as a Triton kernel.

    out = bias; MASKED where a key is masked; PADDING beyond L    bias (B, H, L, L), out (B, H, LP, LP)

The kernels of biased_attention.py read out and, for the gradients of k and v, its transpose. One launch reads
the bias once, along that of its last two axes which lies closer together in memory, and writes both.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fusion_lab.kernels.triton_parts import operation

MASKED = -1e9  # added to scores of masked keys
PADDING = -1e30  # beyond L: also in a row without any key, what is beyond it counts nothing
LOWEST, BEYOND = tl.constexpr(MASKED), tl.constexpr(PADDING)  # the same for a kernel
TILE = 32  # queries and keys of a program, at most; it divides LP, or is LP


def reference(bias, keys, LP, dtype, turn):
    """The same in plain PyTorch: (out, with turn its transpose, else nothing), in dtype. keys (B, L) or
    (1, L), other than 0 where a key is present, or None."""
    out, pad = bias.to(dtype), LP - bias.shape[-1]
    if keys is not None:
        out = torch.where(keys.bool()[:, None, None, :], out, MASKED)
    out = F.pad(out, (0, pad, 0, pad), value=PADDING)
    return out, out.mT.contiguous() if turn else out.new_empty(0)


@triton.jit
def padded_bias_kernel(bias, keys, out, turned, H, L, LP, sb, sh, si, sj, kb, KEYS: tl.constexpr,
                       TURN: tl.constexpr, ALONG_QUERIES: tl.constexpr, T: tl.constexpr):
    """T queries and keys of one head. s*: strides of the bias, which may be a part of a tensor of any size;
    kb: that of a sample's keys, 0 if shared."""
    head, i0, j0 = tl.program_id(0).to(tl.int64), tl.program_id(1) * T, tl.program_id(2) * T
    i, j = i0.to(tl.int64) + tl.arange(0, T), j0.to(tl.int64) + tl.arange(0, T)
    bias += head // H * sb + head % H * sh
    inside = (i[:, None] < L) & (j[None, :] < L)
    if ALONG_QUERIES:
        found = tl.trans(tl.load(bias + j[:, None] * sj + i[None, :] * si, mask=tl.trans(inside), other=0.0))
    else:
        found = tl.load(bias + i[:, None] * si + j[None, :] * sj, mask=inside, other=0.0)
    found = found.to(out.dtype.element_ty)
    if KEYS:
        present = tl.load(keys + head // H * kb + j, mask=j < L, other=0) != 0
        found = tl.where(present[None, :], found, LOWEST)
    found = tl.where(inside, found, BEYOND)
    tl.store(out + head * LP * LP + (i[:, None] * LP + j[None, :]), found)
    if TURN:
        tl.store(turned + head * LP * LP + (j[:, None] * LP + i[None, :]), tl.trans(found))


def launch(bias, keys, LP, dtype, turn):
    out, turned = sizes(bias, keys, LP, dtype, turn)
    B, H, L, _ = bias.shape
    apart = 0
    if keys is not None:
        keys, apart = keys.contiguous(), L * (len(keys) > 1)
        keys = keys.view(torch.uint8) if keys.dtype == torch.bool else keys
    tile = min(TILE, LP)
    padded_bias_kernel[(B * H, LP // tile, LP // tile)](
        bias, keys, out, turned, H, L, LP, *bias.stride(), apart, KEYS=keys is not None, TURN=turn,
        ALONG_QUERIES=bias.stride(2) < bias.stride(3), T=tile)
    return out, turned


def sizes(bias, keys, LP, dtype, turn):
    size = *bias.shape[:2], LP, LP
    return bias.new_empty(size, dtype=dtype), bias.new_empty(size if turn else 0, dtype=dtype)


OP = operation("padded_bias(Tensor bias, Tensor? keys, int LP, ScalarType dtype, bool turn) -> "
               "(Tensor, Tensor)", launch, sizes)
