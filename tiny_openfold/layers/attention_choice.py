"""Which implementation of attention runs, and FlexAttention called so that it pays."""
from functools import cache

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from evoformer_kernels.limits import HAS_TRITON, WIDEST_HEAD
from evoformer_kernels.precision import HALF, architecture, strict_float32

FLEX_WIDTHS = (16, 32, 64, 128)  # head widths that FlexAttention's kernels take
CDNA = ("gfx908", "gfx90a", "gfx94", "gfx95")  # AMD's architectures with matrix cores, MI100 to MI350
SHORT = 64  # keys up to which FlexAttention beats SDPA where there is no bias


def has_matrix_cores(arch):
    """CDNA has matrix instructions for float32 too, which FlexAttention's kernels want; RDNA (gfx10 to gfx12)
    has none for it, and Vega (gfx900 to gfx906, gfx90c) none at all."""
    return arch.startswith(CDNA)


def causal_kernel(heads, length, width, device, dtype):
    """Which of PyTorch's kernels causal attention runs in training; heads: of q, k and v."""
    q, k, v = (torch.empty(1, count, length, width, device=device, dtype=dtype, requires_grad=True)
               for count in heads)
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    return SDPBackend(choice).name.lower().replace("_", " ")


def remark(arch):
    """What the start-up line says of the choice on AMD; "" elsewhere."""
    if not arch:
        return ""
    return f"{arch}: {'CDNA' if has_matrix_cores(arch) else 'not CDNA, so no FlexAttention'}, not measured"


def in_words(requested, triton, on_gpu, dtype, **layers):
    """Which implementations run in training, for the start-up line: "flex_attention; columns: sdpa". layers:
    {name: (length of a row, width of a head, whether there is a trained bias)}, the first of which leads."""
    arch = architecture(on_gpu)

    def name(length, width, biased):
        if triton and triton_attends(on_gpu, dtype, width):
            return "triton_attention"
        backend = attention_backend(requested, on_gpu=on_gpu, dtype=dtype, width=width, length=length,
                                    strict=strict_float32(dtype), biased=biased, training=True, arch=arch)
        if on_gpu:
            return {"flex": "flex_attention"}.get(backend, backend)
        return {("sdpa", True): "sdpa: math on CPU", ("sdpa", False): "sdpa: flash on CPU"}.get(
            (backend, biased), f"{backend} on CPU")
    names = {layer: name(*sizes) for layer, sizes in layers.items()}
    first = next(iter(names.values()))
    others = [f"{layer}: {kernel}" for layer, kernel in names.items() if kernel != first]
    return "; ".join([first, *others, *filter(None, [remark(arch)])])


def triton_attends(on_gpu, dtype, width):
    """Whether this project's Triton kernels can run attention with heads of this width."""
    return on_gpu and HAS_TRITON and dtype in HALF and width <= WIDEST_HEAD


def attention_backend(requested, *, on_gpu, dtype, strict, width, length, biased, training, arch=""):
    """Which implementation runs: "math" (not fused), "sdpa" or "flex".

    requested is what --attention-backend says; strict: products are float32 throughout; width of a head,
    length of a row; biased: with a bias that is trained; arch: an AMD GPU's, else "". FlexAttention is the
    one PyTorch kernel that neither copies a bias shared by many rows nor writes the bias gradient once per
    row. "auto" goes by measurements on NVIDIA and on CPU; on AMD nothing was measured.
    """
    flex_fits = on_gpu and HAS_TRITON and dtype != torch.float64 and width in FLEX_WIDTHS
    if requested == "flex" and not flex_fits:
        return "sdpa"
    if requested in ("auto", "flex") and not training:
        return "sdpa"  # whole proteins differ in length, and FlexAttention compiles for each
    if requested != "auto":
        return requested
    if biased and not on_gpu:
        return "math"  # SDPA has no fused kernel for a bias on CPU, and its own plain one is slower
    if arch:
        return "flex" if biased and flex_fits and has_matrix_cores(arch) else "sdpa"
    if on_gpu and strict:
        # FlexAttention is up to 4.5 times slower in float32 without TF32. SDPA's kernel makes each of
        # three truncated TF32 products, which all err to the same side: single results are 2 to 5 times, sums
        # of many (gradients of weights) 100 times as wrong as float32 is.
        return "math"
    if biased:
        return "flex" if flex_fits else "sdpa"
    return "flex" if flex_fits and length <= SHORT else "sdpa"


def chosen(requested, q, biased):
    """attention_backend() for q (..., L, D) as it lies here."""
    return attention_backend(
        requested, on_gpu=q.is_cuda, dtype=q.dtype, strict=strict_float32(q.dtype), width=q.shape[-1],
        length=q.shape[-2], biased=biased, training=torch.is_grad_enabled(), arch=architecture(q.is_cuda))


NO_BLOCK_MASK = {}  # device -> a BlockMask that masks nothing
BACKWARD_TILES = dict(bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64, bwd_num_warps=4,
                      bwd_num_stages=2)  # within 4% of the fastest of six on an H200


def prepare_flex_attention(device):
    """FlexAttention makes a new default block mask in every call, with a sort and some twenty launches;
    compiled code finds it here instead. Must run outside of torch.compile."""
    if device.type == "cuda" and HAS_TRITON and device not in NO_BLOCK_MASK:
        one, zero = (fill((1, 1, 1), dtype=torch.int32, device=device) for fill in (torch.ones, torch.zeros))
        if not isinstance(one, FakeTensor):
            NO_BLOCK_MASK[device] = BlockMask.from_kv_blocks(one, zero[..., None], BLOCK_SIZE=1 << 30)


@cache
def compiled_flex_attention():
    """flex_attention for eager code, where it has to be compiled alone."""
    # One variant per shape, layout and mask; past the default limit of 8, Dynamo would run the unfused eager
    # code instead, which is slower than what it replaces.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


class FlexAttentionSizes(torch.autograd.Function):
    """FlexAttention on tensors without values, fake or meta: it cannot be compiled for them. The kernel
    keeps q, k, v, a float32 bias, its output and one float32 per row of scores."""

    @staticmethod
    def forward(ctx, q, k, v, bias):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, bias, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, gradient):
        return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors[:4])


def flex_attend(q, k, v, bias):
    """softmax(q k^T / sqrt(D) + bias) v by FlexAttention; q, k, v (B, R, H, L, D), bias (B, H, L, L), sizes
    of 1 where it is shared, or None. The kernel reads the bias: in float32, because the gradient is summed
    over all rows in the dtype of the bias; contiguous, because neighbouring threads read neighbours along j,
    which a transposed bias would keep far apart."""
    rows = q.shape[1]
    bias = None if bias is None else bias.expand(-1, q.shape[2], q.shape[3], -1).float().contiguous()
    if q.is_meta or isinstance(q, FakeTensor):
        return FlexAttentionSizes.apply(q, k, v, bias)

    def add_bias(score, b, h, i, j):
        return score + bias[b // rows, h, i, j]

    options = dict(FORCE_USE_FLEX_ATTENTION=True)
    measured = q.element_size() == 2 or bias is not None
    if q.shape[-1] <= 32 and measured and not torch.version.hip:
        options |= BACKWARD_TILES
    kernel = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    score_mod = None if bias is None else add_bias
    return kernel(*(x.flatten(0, 1) for x in (q, k, v)), score_mod=score_mod,
                  block_mask=NO_BLOCK_MASK.get(q.device), kernel_options=options).unflatten(0, (-1, rows))


def sdpa_attend(q, k, v, bias):
    """The same by PyTorch's scaled_dot_product_attention, whose fused kernels take 4-D input only."""
    bias = None if bias is None else bias[:, None].to(q.dtype).contiguous()  # (B, 1, H, L, L)
    if bias is None or bias.shape[2:4] == (1, 1):  # a mask of keys is small enough to be copied to every row
        mask = None if bias is None else bias.expand(-1, q.shape[1], -1, -1, -1).flatten(0, 1)
        out = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), mask)  # (B*R, H, L, D)
        return out.unflatten(0, q.shape[:2])
    # Sample by sample, because over (B*R, ...) the expanded bias would have to be copied.
    bias = bias.expand(len(q), *q.shape[1:4], -1)  # (B, R, H, L, L), a view
    return torch.stack([F.scaled_dot_product_attention(*x) for x in zip(q, k, v, bias, strict=True)])
