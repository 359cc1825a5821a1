"""The bias of attention with the key mask in it, padded, and its transpose, as a Triton kernel.

    out = bias; MASKED where a key is masked; PADDING beyond L    bias (B, H, L, L), out (B, H, LP, LP)

Another kernel makes key_bias, what is added to scores of keys in rows with masks of their own: of key_mask
(B, R, L), 1 = present, it is (key_mask - 1) * -MASKED, and PADDING beyond L, (B, R, LP).

The kernels of attention read out and, for the gradients of k and v, its transpose. One launch reads the bias
once, along that of its last two axes which lies closer together in memory, and writes both.
"""
import torch
import triton
import triton.language as tl

from evoformer_kernels.attention.kernels import head_offset, store_tile
from evoformer_kernels.common import bind, is_fake

MASKED = -1e9  # added to scores of masked keys
PADDING = -1e30  # beyond L: so far below MASKED that it gets no weight even in a row without any key
HOLD_PADDING = (torch.bfloat16, torch.float32, torch.float64)  # dtypes; float16 ends at 65504
KERNEL_MASKED, KERNEL_PADDING = tl.constexpr(MASKED), tl.constexpr(PADDING)  # the same, as kernels read them
TILE = 32  # queries and keys of a program, at most: 4 KB in float32, transposed in shared memory


def lowest(dtype):
    """MASKED or, in float16, its lowest number."""
    return max(MASKED, torch.finfo(dtype).min)


def lifted(bias):
    """The bias, nowhere below what masks."""
    return bias.clamp(min=lowest(bias.dtype))


@triton.jit
def attention_padded_bias_kernel(bias, key_mask, out, transposed, H, L, LP, bias_stride_sample,
                                 bias_stride_head, bias_stride_query, bias_stride_key, key_mask_stride_sample,
                                 KEY_MASK: tl.constexpr, TRANSPOSE: tl.constexpr, ALONG_QUERIES: tl.constexpr,
                                 LIFT: tl.constexpr, T: tl.constexpr):
    """One program: T queries and T keys of one head, of out and of its transpose.

    Grid: axis 0: bh = b H + h; axis 1: tiles of T queries; axis 2: tiles of T keys.
    Reads bias (B, H, L, L) with any strides, since it may be a part of another tensor; key_mask (B or 1,
    L), whose key_mask_stride_sample is 0 if all samples share them.
    Writes out (B, H, LP, LP: queries, keys) and, with TRANSPOSE, transposed (B, H, LP, LP: keys, queries).
    ALONG_QUERIES: queries lie closer together in the bias than keys do, so that it is read along them.
    LIFT: what is below MASKED becomes that.
    """
    bh, i0, j0 = tl.program_id(0).to(tl.int64), tl.program_id(1) * T, tl.program_id(2) * T
    i, j = i0.to(tl.int64) + tl.arange(0, T), j0.to(tl.int64) + tl.arange(0, T)  # (T,), (T,)
    bias += bh // H * bias_stride_sample + bh % H * bias_stride_head
    inside = (i[:, None] < L) & (j[None, :] < L)  # (T, T): queries, keys
    if ALONG_QUERIES:
        pointers = bias + j[:, None] * bias_stride_key + i[None, :] * bias_stride_query
        values = tl.trans(tl.load(pointers, mask=tl.trans(inside), other=0.0))
    else:
        pointers = bias + i[:, None] * bias_stride_query + j[None, :] * bias_stride_key
        values = tl.load(pointers, mask=inside, other=0.0)
    if LIFT:  # not NaN, which stays
        values = tl.maximum(values.to(tl.float32), KERNEL_MASKED, propagate_nan=tl.PropagateNan.ALL)
    values = values.to(out.dtype.element_ty)  # (T, T): queries, keys
    if KEY_MASK:
        present = tl.load(key_mask + bh // H * key_mask_stride_sample + j, mask=j < L, other=0) != 0  # (T,)
        values = tl.where(present[None, :], values, KERNEL_MASKED)
    values = tl.where(inside, values, KERNEL_PADDING)
    tl.store(out + bh * LP * LP + (i[:, None] * LP + j[None, :]), values)
    if TRANSPOSE:
        tl.store(transposed + bh * LP * LP + (j[:, None] * LP + i[None, :]), tl.trans(values))


@triton.jit
def attention_key_bias_kernel(key_mask, out, R, L, LP, key_mask_stride_sample, key_mask_stride_row,
                              key_mask_stride_key, T: tl.constexpr):
    """One program: T keys of one row of the key bias. Grid: axis 0: b R + r; axis 1: tiles of T keys.

    Reads key_mask (B, R, L) with any strides; writes out (B, R, LP).
    """
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * T + tl.arange(0, T)  # (), (T,)
    key_mask += row // R * key_mask_stride_sample + row % R * key_mask_stride_row
    present = tl.load(key_mask + j.to(tl.int64) * key_mask_stride_key, mask=j < L, other=0) != 0  # (T,)
    tl.store(out + row * LP + j, tl.where(j < L, tl.where(present, 0.0, KERNEL_MASKED), KERNEL_PADDING))


@triton.jit
def attention_one_key_kernel(key_bias, dq, dk, R, H, L, D: tl.constexpr, key_bias_strides,
                             dq_strides, BD: tl.constexpr, T: tl.constexpr):
    """One program: zeros in dq and dk of a row that has one key, whose softmax is 1 whatever q and k are. The
    difference that backward's kernels make there is that of two orders of a sum. Grid: axis 0: b R + r.

    Reads key_bias (B, R, LP) by key_bias_strides (sample, row), T keys at a time; writes dq, dk (B, R, H, L,
    D) by dq_strides (sample, row, head, position).
    """
    b, r = (tl.program_id(0) // R).to(tl.int64), (tl.program_id(0) % R).to(tl.int64)
    key_bias += b * key_bias_strides[0] + r * key_bias_strides[1]
    i, present = tl.arange(0, T), tl.zeros((T,), tl.int32)
    for j0 in range(0, L, T):
        present += (tl.load(key_bias + j0 + i) == 0).to(tl.int32)
    if tl.sum(present) == 1:
        for h in range(H):
            offset = head_offset(b, r, h, dq_strides)
            for i0 in range(0, L, T):
                zeros = tl.zeros((T, BD), tl.float32)
                store_tile(dq + offset, zeros, i0, L, D, dq_strides[3], False)
                store_tile(dk + offset, zeros, i0, L, D, dq_strides[3], False)


def launch_key_bias(key_mask, LP, bound=None):
    """key_bias (B, R, LP) in float32 of key_mask (B, R, L) or (B, R, 1, 1, L). bound: as in common.bind()."""
    (B, R), L, name = key_mask.shape[:2], key_mask.shape[-1], "key_bias"
    out = key_mask.new_empty((B, R, LP), dtype=torch.float32)
    if is_fake(out):
        return out
    if bound is not None and name in bound:
        bound[name](key_mask, out)
    else:
        T, key_mask = min(LP, 128), in_bytes(key_mask)  # T divides LP
        strides = *key_mask.stride()[:2], key_mask.stride(-1)
        bind(bound, name, attention_key_bias_kernel, (B * R, LP // T), (R, L, LP, *strides), T=T,
             num_warps=1)(key_mask, out)
    return out


def in_bytes(mask):
    """A mask as Triton compiles for it. What is compiled then takes an address, and the mask as it is."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def launch(bias, key_mask, LP, dtype, transpose, lift=False, bound=None):
    """(out, its transpose or, without transpose, None), in dtype. bias (B, H, L, L) or (B, 1, H, L, L), as
    out then is, too; key_mask (B, L) or (1, L), other than 0 where a key is present, or None. lift: what is
    below MASKED, -inf as well, becomes that. bound: as in common.bind()."""
    size, name = (*bias.shape[:-2], LP, LP), "padded_bias"
    key_mask = None if key_mask is None else in_bytes(key_mask.contiguous())
    out, transposed = bias.new_empty(size, dtype=dtype), None
    if transpose:
        transposed = bias.new_empty(size, dtype=dtype)
    if bound is not None and name in bound:
        bound[name](bias, key_mask, out, transposed)
        return out, transposed
    if is_fake(bias):
        return out, transposed
    B, H, L = bias.shape[0], *bias.shape[-3:-1]
    key_mask_stride_sample = 0
    if key_mask is not None:
        key_mask_stride_sample = L * (len(key_mask) > 1)
    T = min(TILE, LP)  # which divides LP
    bind(bound, name, attention_padded_bias_kernel, (B * H, LP // T, LP // T),
         (H, L, LP, bias.stride(0), *bias.stride()[-3:], key_mask_stride_sample),
         KEY_MASK=key_mask is not None, TRANSPOSE=transpose,
         ALONG_QUERIES=bias.stride(-2) < bias.stride(-1), LIFT=lift, T=T)(bias, key_mask, out, transposed)
    return out, transposed


