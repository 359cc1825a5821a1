"""Partial sums of other kernels, added up by a Triton kernel.

    out = sum over programs r of partial_sums[r]        partial_sums (programs, ...) float32

Each program of a backward kernel stores its own share of the gradients of biases and LayerNorm weights.
Nothing in a graph waits for those gradients. So operators of backward return partial sums, and OP adds them
up: one launch for each. compile_pass.py makes one launch of GATHERED_OP of them for a whole graph.

The number of programs depends on the tile, which the tuner chooses when a kernel is launched. But the sizes
of a graph are needed when the graph is made. So whoever calls an operator of backward asks tuner.chosen()
then, and gives it the number as a constant of the graph. That costs nothing in a step, and compiled code from
the compiler's cache is never taken for another number. If a launch has another tile after all, because tiles
are measured just then or were since, room() adjusts.
"""
import contextlib
import operator

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoformer_kernels import tuner
from evoformer_kernels.common import add_up, is_fake, operation
from evoformer_kernels.precision import at_least_float32

MOST = 32  # problems of one launch: pointers and sizes of all are its arguments
ROWS, COLUMNS = 64, 32  # of a tile: 128 bytes of every row, a whole line of the cache
SHARE = 128  # rows of each partial sum that a compiler's kernel makes in over_rows()


def constant(count):
    """A decorator: torch.compile takes the result of count for a constant. count is a function of sizes and
    constants; where a size is a symbol, code is compiled for its value."""
    fixed = torch.compiler.assume_constant_result(count)

    def of(*given):
        return fixed(*[operator.index(n) if isinstance(n, int) else n for n in given])
    return of


@contextlib.contextmanager
def room(partial_sums, programs):
    """Yields a tensor (programs, ...) in which so many programs store their sums.

    That is partial_sums itself, if it has as many rows. Else it is new memory, whose sum becomes the first
    row, with zeros behind it: the total is the same. While tiles are measured it is always new memory, so
    that every tile is timed alike, with a sum that takes its time.
    """
    if partial_sums.shape[0] == programs and tuner.found is None:
        yield partial_sums
        return
    aside = partial_sums.new_empty(programs, *partial_sums.shape[1:])
    yield aside
    add_up(aside, partial_sums[0])
    partial_sums[1:].zero_()


def summed(partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of partial_sums (programs, ...) over programs, in this dtype."""
    return launch(partial_sums, dtype)


def launch(partial_sums, dtype, bound=None, name=None):
    """The same; bound, name: as in bind()."""
    out = partial_sums.new_empty(partial_sums.shape[1:], dtype=dtype)
    if bound is not None and name in bound:
        bound[name](partial_sums, out)
    elif not is_fake(out):
        add_up(partial_sums, out, bound, name)
    return out


@triton.jit
def sums_kernel(problems, rows, columns, out, COUNT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """One program: BN columns of the sum over rows of one of COUNT problems, BR rows at a time. Axis 0: tiles
    of columns, those of the first problem, then those of the second, and so on.

        problems, rows, columns: tuples with an entry for each; problems[i] (rows[i], columns[i]) float32
        out (sum of columns,): all results, one after the other
    """
    # Which problem is this program's? begin: its first program; start: its first number in out
    number, begin, start = tl.program_id(0), 0, 0
    problem, R, N, first, offset = problems[0], rows[0], columns[0], begin, start
    for i in tl.static_range(1, COUNT):
        begin += tl.cdiv(columns[i - 1], BN)
        start += columns[i - 1]
        if number >= begin:
            problem, R, N, first, offset = problems[i], rows[i], columns[i], begin, start

    # Its BN columns, added up
    n, r = (number - first) * BN + tl.arange(0, BN), tl.arange(0, BR)
    offsets = r[:, None].to(tl.int64) * N + n[None, :]  # (BR, BN)
    acc = tl.zeros((BR, BN), tl.float32)
    for r0 in tl.range(0, R, BR, num_stages=4):  # loads of the next three iterations are under way
        acc += tl.load(problem + offsets, mask=(r[:, None] < R - r0) & (n[None, :] < N), other=0.0)
        problem += tl.cast(N, tl.int64) * BR
    tl.store(out + offset + n, tl.sum(acc, 0).to(out.dtype.element_ty), mask=n < N)


def gathered(partial_sums: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sums of each of the partial_sums, [(programs, ...)], one after the other, (numbers,)."""
    out = partial_sums[0].new_empty(sum(each.shape[1:].numel() for each in partial_sums), dtype=dtype)
    if is_fake(out):
        return out
    end = 0
    for first in range(0, len(partial_sums), MOST):
        problems = partial_sums[first:first + MOST]
        columns = [problem.shape[1:].numel() for problem in problems]
        begin, end = end, end + sum(columns)
        sums_kernel[(sum(triton.cdiv(n, COLUMNS) for n in columns),)](
            tuple(problems), tuple(map(len, problems)), tuple(columns), out[begin:end], COUNT=len(problems),
            BR=ROWS, BN=COLUMNS, num_warps=2)
    return out


def over_rows(x):
    """The sum of x (P, c) over its rows, in its dtype. A compiler would make it in two kernels. Here it makes
    partial sums in one, and the rest is left to OP, which is gathered."""
    if torch.compiler.is_compiling() and len(x) and len(x) % SHARE == 0:
        return OP(x.unflatten(0, (-1, SHARE)).sum(1, dtype=at_least_float32(x.dtype)), x.dtype)
    return x.sum(0)


OP = operation("summed", summed)
GATHERED_OP = operation("sums", gathered)
