"""Sums of the parts that programs of other kernels store, as Triton kernels.

    out = sum over r of parts[r]    parts (programs, ...) float32

They are gradients of biases and of weights of LayerNorms, and nothing in a graph waits for them. So ops of
backward return their parts, and OP adds them up: one launch for each, which gathered_gradients.py makes one
of GATHERED_OP for a graph. There a program owns COLUMNS columns of one problem, 128 bytes of every row.

How many programs there will be is the tuner's choice of tile, when a kernel is launched; the sizes of a graph
are needed when it is made. Who calls an op of backward asks tuner.chosen() then and gives the number to the
op, as a constant of the graph. That costs nothing while a step runs, reads only what was written, and no
compiled code from the compiler's cache is taken for another number. Where a launch has another tile after
all, because tiles are measured just then or have been since, room() mends it.
"""
import contextlib
import operator

import torch
import triton
import triton.language as tl

from fusion_lab.kernels import tuner
from fusion_lab.kernels.precision import at_least_float32
from fusion_lab.kernels.triton_parts import add_up, operation

MOST = 32  # problems of one launch: pointers and sizes of all are its arguments
ROWS, COLUMNS = 64, 32  # of a tile
SHARE = 128  # rows that a compiler's kernel adds up, of what no kernel of ours leaves in parts


def constant(count):
    """count, a function of sizes and constants, so that torch.compile takes its result for one: where a size
    is a symbol, code is compiled for its value."""
    fixed = torch.compiler.assume_constant_result(count)

    def of(*given):
        return fixed(*[operator.index(n) if isinstance(n, int) else n for n in given])
    return of


@contextlib.contextmanager
def room(parts, programs):
    """Yields where so many programs store their parts, so that `parts` then has the same sum: it itself, if
    it has a row for each, else memory of its own, whose sum becomes its first row. While tiles are measured
    always the latter, so that all take the same way, with a sum that takes its time."""
    if len(parts) == programs and tuner.found is None:
        yield parts
        return
    aside = parts.new_empty(programs, *parts.shape[1:])
    yield aside
    add_up(aside, parts[0])
    parts[1:].zero_()


def launch(parts, dtype):
    out = sizes(parts, dtype)
    add_up(parts, out)
    return out


def sizes(parts, dtype):
    return parts.new_empty(parts.shape[1:], dtype=dtype)


@triton.jit
def sums_kernel(parts, rows, columns, out, COUNT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """BN columns of one of COUNT problems. Tuples have an entry for each; out: all results, behind each
    other."""
    number, begin, place = tl.program_id(0), 0, 0
    part, R, N, first, at = parts[0], rows[0], columns[0], begin, place
    for i in tl.static_range(1, COUNT):
        begin += tl.cdiv(columns[i - 1], BN)
        place += columns[i - 1]
        if number >= begin:
            part, R, N, first, at = parts[i], rows[i], columns[i], begin, place
    n, r = (number - first) * BN + tl.arange(0, BN), tl.arange(0, BR)
    here = r[:, None].to(tl.int64) * N + n[None, :]
    acc = tl.zeros((BR, BN), tl.float32)
    for r0 in tl.range(0, R, BR, num_stages=4):  # loads of later turns are under way
        acc += tl.load(part + here, mask=(r[:, None] < R - r0) & (n[None, :] < N), other=0.0)
        part += tl.cast(N, tl.int64) * BR
    tl.store(out + at + n, tl.sum(acc, 0).to(out.dtype.element_ty), mask=n < N)


def gathered(parts, dtype):
    """The sums of all of parts behind each other, (numbers,)."""
    out, end = gathered_sizes(parts, dtype), 0
    for first in range(0, len(parts), MOST):
        some = parts[first:first + MOST]
        columns = [part.shape[1:].numel() for part in some]
        begin, end = end, end + sum(columns)
        sums_kernel[(sum(triton.cdiv(n, COLUMNS) for n in columns),)](
            tuple(some), tuple(map(len, some)), tuple(columns), out[begin:end], COUNT=len(some), BR=ROWS,
            BN=COLUMNS, num_warps=2)
    return out


def gathered_sizes(parts, dtype):
    return parts[0].new_empty(sum(part.shape[1:].numel() for part in parts), dtype=dtype)


def over_rows(x):
    """The sum of x (P, c) over its rows, in its dtype. A compiler would make it in two kernels; here it makes
    parts in one, and OP, which is gathered, the rest."""
    if torch.compiler.is_compiling() and len(x) and len(x) % SHARE == 0:
        return OP(x.unflatten(0, (-1, SHARE)).sum(1, dtype=at_least_float32(x.dtype)), x.dtype)
    return x.sum(0)


OP = operation("summed(Tensor parts, ScalarType dtype) -> Tensor", launch, sizes)
GATHERED_OP = operation("sums(Tensor[] parts, ScalarType dtype) -> Tensor", gathered, gathered_sizes)
