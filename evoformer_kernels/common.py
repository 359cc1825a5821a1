"""What the Triton kernels of this directory share: device helpers, and how a launcher becomes an operator.

Imports triton; whoever imports this has asked `limits.HAS_TRITON` first. Rules that all kernels keep:
    - sums, softmax and statistics in float32; operands of products in the tensors' own dtype
    - one rounding at each store
    - sums over positions as one partial sum a program, so that every run gives the same bits
    - program numbers are int64 before they are multiplied: offsets go beyond 2**31
    - operands of products in 16 bits; in Triton's interpreter also float32, where rounding hides no mistake

Shapes in helpers: x (BM, C) is a tile of BM positions with all their C channels.
"""
import contextlib
import functools
import inspect

import torch
import triton
import triton.language as tl
from torch import library
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime import driver

from evoformer_kernels.limits import CHANNELS_OF, takes
from evoformer_kernels.precision import HALF

NAMESPACE = "evoformer_kernels"
PLAIN = {torch.Tensor, torch.nn.Parameter}
HERE = contextlib.nullcontext()
LOG2E = tl.constexpr(1.4426950408889634)


def operation(name, launcher):
    """Make a launcher one operator, which torch.compile, fake tensors and counters look at, and return the
    function that calls it. Where nothing watches, that function calls the launcher itself: a dispatcher's
    way costs the host some 20 us.

    The launcher's annotations are the operator's schema. For fake tensors it runs, too: it makes its results,
    asks is_fake(), and launches nothing. The operator is the function's attribute `op`.
    """
    name = f"{NAMESPACE}::{name}"

    def launch_there(*arguments, **named):
        listed = (x for given in (*arguments, *named.values())
                  for x in (given if isinstance(given, (list, tuple)) else [given]))
        first = next(x for x in listed if isinstance(x, torch.Tensor))
        check_device(name, first)
        with where(first):
            return launcher(*arguments, **named)
    library.define(name, library.infer_schema(launcher, mutates_args=()))
    library.impl(name, ("cpu", "cuda"), launch_there)  # "cuda" is AMD's too; "cpu": Triton's interpreter
    library.register_fake(name, launcher)
    op = getattr(getattr(torch.ops, NAMESPACE), name.partition("::")[2]).default

    @functools.wraps(launcher)
    def call(*arguments, **named):
        direct = not watched(*arguments, *named.values())
        return launch_there(*arguments, **named) if direct else op(*arguments, **named)
    call.op = op
    return call


def watched(*given):
    """Whether something looks at each operation on what is given: torch.compile, fake tensors, a counter."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return any(isinstance(x, torch.Tensor) and (type(x) not in PLAIN or x.is_meta) for x in given)


def where(x):
    """A context in which launches go to x's device."""
    if not x.is_cuda or x.device.index == torch._C._cuda_getDevice():
        return HERE
    return torch.cuda.device_of(x)


def is_fake(x):
    """Whether x has no memory, so that a launcher shall make its results and launch nothing."""
    return x.is_meta or isinstance(x, FakeTensor)


def start(kernel, grid, *arguments, **options):
    """kernel[grid](*arguments, **options); nothing for fake tensors."""
    if not is_fake(next(x for x in arguments if isinstance(x, torch.Tensor))):
        kernel[grid](*arguments, **options)


def check_device(name, x):
    """RuntimeError where x lies on the CPU and kernels do not run there."""
    if not (x.is_cuda or on_cpu()):
        raise RuntimeError(f"{name} is a Triton kernel, which needs a GPU, or TRITON_INTERPRET=1 in the "
                           "environment before it is imported; its tensors lie on the CPU")


def on_cpu():
    """Whether launches on CPU tensors mean anything: in the interpreter, or where a CPU driver is active
    (the tests that compile for GPUs which are not there)."""
    if not isinstance(sum_kernel, triton.JITFunction):
        return True
    try:
        return driver.active.get_active_torch_device().type == "cpu"
    except RuntimeError:  # no driver at all
        return False


def cdiv(number, size):
    """number / size, rounded up. On the host triton.cdiv takes 3 us, a hundred times as long."""
    return -(-number // size)


class Bound:
    """A launch of which all but the tensors is fixed: grid; numbers, the kernel's parameters behind its
    tensors, in its order; options, all others by name.

    Triton looks at every argument of every launch. A Bound lets it look once, and then starts the compiled
    kernel, as Triton has it (`compiled[grid](...)`). So whoever keeps one gives it tensors that are alike:
    None or not, of the same dtypes and device, and at addresses that 16 divides or not (family.looks).
    """

    def __init__(self, kernel, grid, numbers=(), **options):
        self.kernel, self.grid, self.numbers, self.options = kernel, grid, numbers, options
        self.compiled = None

    def __call__(self, *tensors):
        """Launch, on the current stream of the tensors' GPU, which is the current one."""
        if self.compiled is not None:
            self.compiled(*tensors, *self.behind, stream=self.stream())
            return
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.options)
        if compiled is not None:  # there is none in the interpreter, and where nothing is run
            others = list(inspect.signature(self.kernel.fn).parameters.values())
            self.behind = (*self.numbers, *(self.options.get(each.name, each.default)
                                            for each in others[len(tensors) + len(self.numbers):]))
            # By itself Triton asks for the GPU's number as well, each time; without a GPU it finds its own.
            gpu = tensors[0].device.index
            stream = driver.active.get_current_stream
            self.stream = type(None) if gpu is None else functools.partial(stream, gpu)
            self.compiled = compiled[(*self.grid, 1, 1)[:3]]


def bind(bound, name, kernel, grid, numbers=(), **options):
    """The Bound that the dict `bound` has by this name, or a new one; None keeps nothing."""
    made = Bound(kernel, grid, numbers, **options)
    if bound is not None:
        bound[name] = made
    return made


def multiplies(x, dtype):
    """Whether our kernels multiply in this dtype where x lies: on a GPU in 16 bits, in the interpreter also
    in float32, on a CPU without it not at all."""
    if x.is_cuda:
        return dtype in HALF
    return dtype in (*HALF, torch.float32) and (is_fake(x) or on_cpu())


def check_dtype(x, what):
    """ValueError for a tensor in whose dtype our kernels do not multiply."""
    if not multiplies(x, x.dtype):
        raise ValueError(f"no Triton {what} in {str(x.dtype)[6:]}, but in float16 and bfloat16")


def check_shapes(*given):
    """ValueError for what kernels would misread; given: (name, tensor or None, shapes that it may have)."""
    for name, tensor, *shapes in given:
        if tensor is not None and not any(tensor.shape == shape for shape in shapes):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, but must be {' or '.join(map(str, shapes))}")


def check_part(part, weight, channels, heads=1, side=None):
    """ValueError for what the kernels of a part (limits.CHANNELS_OF) cannot take: the dtype of its weight, so
    many channels or heads, or a side of so many channels."""
    check_dtype(weight, part)
    if not takes(part, channels, heads, *[side] * (side is not None)):
        more = f" for {heads} heads" * (heads > 1) + (f" to sides of {side}" if side is not None else "")
        raise ValueError(f"no Triton {part} of {channels} channels{more}, but of "
                         f"{', '.join(map(str, CHANNELS_OF[part]))}")


def check_onto(onto, x):
    """ValueError for a sub-layer whose update shall be added to another tensor than its input."""
    if onto is not None and onto is not x:
        raise ValueError("onto must be the input itself, or None")


def check_devices(**given):
    """ValueError where a tensor (None: not there) lies on another device than the first."""
    first, *others = [(name, x.device) for name, x in given.items() if x is not None]
    for name, device in others:
        if device != first[1]:
            raise ValueError(f"{name} is on {device}, but {first[0]} on {first[1]}")


def candidates(names, *values):
    """[{name: value}] of configurations for the tuner."""
    return [dict(zip(names, each, strict=True)) for each in values]


def current_target():
    """What kernels compile for; None without a GPU, in the interpreter."""
    try:
        return driver.active.get_current_target()
    except RuntimeError:
        return None


def processors(x, otherwise=2):
    """Multiprocessors of x's GPU: as many programs surely run at once. On the CPU `otherwise`."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else otherwise


def products_in_registers():
    """Whether kernels compile for a GPU of NVIDIA's whose matrix instructions take both operands from
    registers: sm_80 to sm_89, and sm_120."""
    target = current_target()
    return target is not None and target.backend == "cuda" and not 90 <= target.arch < 120


def shared_dtype(tensors):
    """The dtype of these tensors (None: not there), float32 if they differ: that of sums which become their
    gradients, so that nobody has to cast a slice of these."""
    dtypes = {t.dtype for t in tensors if t is not None}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def add_up(partial_sums, sums, bound=None, name=None):
    """sums (...) = the sum of partial_sums (programs, ...), float32, over programs: in one launch, with the
    same bits in every run. Where sums have few numbers, a tile is high, so that there are loads enough.
    bound, name: as in bind()."""
    columns = sums.numel()
    if columns < 1 << 13:  # fewer than 8192: 8 columns, 32 bytes of a row, and up to 1024 rows at once
        height, width, warps = min(1024, triton.next_power_of_2(max(1, len(partial_sums)))), 8, 8
    elif len(partial_sums) <= 8:
        height, width, warps = 2, 512, 4
    else:
        height, width, warps = 4, 128, 1
    grid, numbers = (cdiv(columns, width),), (len(partial_sums), columns)
    options = dict(BR=height, BN=width, num_warps=warps)
    if bound is None:
        start(sum_kernel, grid, partial_sums, sums, *numbers, **options)
    else:
        bind(bound, name, sum_kernel, grid, numbers, **options)(partial_sums, sums)


def padded_width(width):
    """Width of a tile for so many channels or heads: a power of two, at least 16, the least of tl.dot."""
    return max(16, triton.next_power_of_2(width))


def lines(number, width, tile):
    """How many whole lines a tile of `tile` positions holds, of `number` lines with `width` positions each.
    1, too, if a tile is a part of one line. 0 if it is neither, or if the last tile is not full: then a
    kernel must divide every position by `width` to find its line."""
    if number * width % tile:
        return 0
    return 1 if width % tile == 0 else tile // width if tile % width == 0 else 0


@triton.jit
def sum_kernel(partial_sums, sums, R, N, BR: tl.constexpr, BN: tl.constexpr):
    """One program: BN columns of the sum over rows, BR rows at a time. Axis 0: tiles of columns.

        partial_sums (R, N) float32; sums (N,)
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BR, BN), tl.float32)
    for r0 in range(0, R, BR):
        r = r0 + tl.arange(0, BR)
        acc += tl.load(partial_sums + r[:, None].to(tl.int64) * N + n[None, :],
                       mask=(r[:, None] < R) & (n[None, :] < N), other=0.0)  # (BR, BN)
    tl.store(sums + n, tl.sum(acc, 0).to(sums.dtype.element_ty), mask=n < N)



@triton.jit
def reciprocal(x):
    """1 / x for x >= 1, of any shape, to some five roundings: GPUs know the root to 2^-22.9. A division takes
    five instructions on sm_90 and more on AMD, since it must be right for the smallest and largest x, too."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def relu(x):
    """max(x, 0), of any shape. NaN stays NaN, as in PyTorch."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), of any shape; half of the instructions of tl.sigmoid, by reciprocal()."""
    return reciprocal(1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def moments(x, eps, C: tl.constexpr):
    """Mean and 1 / standard deviation of the channels of x (BM, C), (BM,) each. Mean first, then centred
    squares: exact where a sum of squares would cancel."""
    x = x.to(tl.float32)
    mean = tl.sum(x, 1) / C  # (BM,)
    x -= mean[:, None]
    return mean, tl.rsqrt(tl.sum(x * x, 1) / C + eps)


@triton.jit
def normalised(x, mean, rstd):
    """(x - mean) rstd, (BM, C) float32, from what moments() returned, (BM,) each."""
    return (x.to(tl.float32) - mean[:, None]) * rstd[:, None]


@triton.jit
def layer_norm_backward(dy, x_hat, rstd, weight, C: tl.constexpr):
    """Gradient (BM, C) of LayerNorm's input, from dy (BM, C), normalised x (BM, C), 1 / std (BM,) and
    LayerNorm's weight (C,):  rstd (g - mean(g) - x_hat mean(g x_hat)),  g = dy weight."""
    dx = dy * weight[None, :]
    mean, projection = tl.sum(dx, 1) / C, tl.sum(dx * x_hat, 1) / C  # (BM,) each
    return rstd[:, None] * (dx - mean[:, None] - x_hat * projection[:, None])


@triton.jit
def from_the_end(axis: tl.constexpr):
    """The number of this program along an axis, counted from the last one. A kernel that writes more than the
    cache holds counts so: its first tiles, which the next kernel reads first, are then still in the cache."""
    return tl.num_programs(axis) - 1 - tl.program_id(axis)


@triton.jit
def below(p, P):
    """Which of p (BM,) are below P, (BM,); all of them, without an instruction, if P is None."""
    if P is None:
        found = tl.full(p.shape, True, tl.int1)
    else:
        found = p < P
    return found


@triton.jit
def load_rows(matrix, p, P, C: tl.constexpr):
    """Rows p (BM,) of a contiguous (P, C) matrix, (BM, C); zeros beyond P, unless that is None. Addresses
    take fewest instructions where `matrix` points at the tile's first row and p, 32 bits, counts from it."""
    return tl.load(matrix + p[:, None] * C + tl.arange(0, C)[None, :], mask=below(p, P)[:, None], other=0.0)


@triton.jit
def store_rows(matrix, p, P, tile, C: tl.constexpr):
    """Store tile (BM, C) in rows p (BM,) of a contiguous (P, C) matrix, of load_rows(), in its dtype."""
    to = matrix + p[:, None] * C + tl.arange(0, C)[None, :]  # (BM, C)
    tl.store(to, tile.to(matrix.dtype.element_ty), mask=below(p, P)[:, None])


@triton.jit
def load_columns(matrix, p, inside, columns, stride):
    """(BM, columns) of rows p (BM,), `stride` numbers apart, of a matrix; zeros where a row is not inside."""
    return tl.load(matrix + p[:, None] * stride + columns[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def store_columns(matrix, p, inside, columns, stride, values):
    """Store values (BM, columns) where load_columns() reads them, in the matrix's dtype."""
    at = matrix + p[:, None] * stride + columns[None, :]  # (BM, columns)
    tl.store(at, values.to(matrix.dtype.element_ty), mask=inside[:, None])


@triton.jit
def vector(pointer, C: tl.constexpr):
    """The C numbers at pointer, an affine weight or a bias, as (1, C) float32."""
    return tl.load(pointer + tl.arange(0, C)).to(tl.float32)[None, :]


@triton.jit
def layer_norm(x, weight, bias, eps, C: tl.constexpr):
    """LayerNorm(x) (BM, C) float32, and what its derivative wants: normalised x (BM, C), 1 / std (BM,).
    weight and bias point to (C,)."""
    mean, rstd = moments(x, eps, C)
    x_hat = normalised(x, mean, rstd)
    return affine(x_hat, weight, bias, C), x_hat, rstd


@triton.jit
def affine(x_hat, weight, bias, C: tl.constexpr):
    """x_hat weight + bias, (BM, C), of normalised x (BM, C) and pointers to (C,): LayerNorm's last step."""
    return x_hat * vector(weight, C) + vector(bias, C)


@triton.jit
def store_sums(to, columns, x, dtype: tl.constexpr, BM: tl.constexpr, scale=None, width=None):
    """Store at `to` [scale times] the sums of x (BM, BN) over its rows, of these columns (BN,) [below width].
    They are a product of ones and x, rounded to dtype: a fifth of the instructions of sums across threads.
    The ones have 16 rows, the least that tl.dot takes; the first row of the product is stored."""
    there, r = below(columns, width), tl.arange(0, 16)  # (BN,), (16,)
    found = tl.dot(tl.full((16, BM), 1, dtype), x.to(dtype))  # (16, BN)
    found = found if scale is None else found * scale
    tl.store(to + columns[None, :] + 0 * r[:, None], found, mask=(r == 0)[:, None] & there[None, :])
