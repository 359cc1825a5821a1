#!/usr/bin/env python3
"""Triangle attention and multiplication by everyone's kernels, side by side, on one GPU.

    python benchmarks/peers.py --out OUT [--path DIR ...] [--sizes 128 256 384 512 768] [--only REGEX]

Peers: plain PyTorch, compiled, SDPA, FlexAttention, ours, cuEquivariance, trifast and OpenFold3's Triton
kernels; those that are installed or lie in a --path. What is not there, or fails, is a row that says so.
Each gets its own layout and dtypes, with products in bfloat16, a key mask and a trained bias; B 1, H 4, D 32,
c 128.

Columns, in ms: the GPU's time alone for forward, and for forward and backward; the host's time for both; a
call from Python, waited for. Peak memory is beyond the inputs. Errors are the largest ones, relative to the
largest number of a tensor, against float64: of the output, and of the worst gradient. The profiler says which
kernels ran; a peer whose own did not has failed, and so has one whose GPU seems to take longer for a part
than for the whole, because the host stalled while it was timed.

Writes OUT/peers.json after each size. Exit code 1 if ours fails or is beyond three times plain PyTorch's
errors, 4 without a GPU.
"""
import os
import re
import sys
import time
from statistics import median

os.environ.setdefault("CUEQ_TRIATTN_FALLBACK_THRESHOLD", "0")  # or short sequences run plain torch instead,
os.environ.setdefault("CUEQ_TRIMUL_FALLBACK_THRESHOLD", "0")  # and say nothing

from script import begin, gpu_or_trial, parser_of, write_result

begin(__name__, "torch")

import torch

from benchmarks.peers_cases import PEERS, problem
from fusion_lab.measuring.accuracy import ERROR_FACTOR
from fusion_lab.measuring.counters import gpu_times
from fusion_lab.training.errors import UserError, exit_code
from fusion_lab.training.flags import whole_number
from fusion_lab.training.machine import MEGABYTE
from tiny_openfold.layers.attention_choice import prepare_flex_attention

OPERATIONS = ("attention", "multiplication")
JUDGED = "ours"
QUEUES = 5  # of calls, each timed as a whole: the host may stall in one
SLACK = 1.05  # how much longer than the whole a part may seem to take: clocks change
COLUMNS = dict(forward_ms="GPU, forward", both_ms="GPU, both", host_ms="host, both", called_ms="called, both")


class Run:
    """A peer's calls on one problem."""

    def __init__(self, case, gradient, device):
        self.case, self.device = case, device
        self.gradient = case.to_peer(gradient)

    def forward(self):
        return self.case.call(**self.case.inputs)

    def both(self):
        wanted = list(self.case.leaves.values())
        return torch.autograd.grad(self.forward(), wanted, self.gradient)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def host_and_call(self, repeats):
        """Median seconds until both() has returned to the host, and until the GPU has done it."""
        returned, done = [], []
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            self.both()
            returned.append(time.perf_counter() - start)
            self.synchronize()
            done.append(time.perf_counter() - start)
        return median(returned), median(done)

    def gpu_seconds(self, function, repeats, host):
        """Of one call, without waits for the host: all calls are in the queue before the first one starts.
        The median of some queues."""
        found = []
        for _ in range(QUEUES):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.synchronize()
            torch.cuda._sleep(int(2e9 * min(0.3, 2 * host * repeats)))  # cycles of a clock of 2 GHz at most
            first.record()
            for _ in range(repeats):
                function()
            last.record()
            self.synchronize()
            found.append(first.elapsed_time(last) / 1e3 / repeats)
        return median(found)

    def peak(self):
        """Bytes beyond the inputs."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.both()
        return torch.cuda.max_memory_allocated() - before

    def kernels(self):
        """[(name, milliseconds)] of both(), the longest first."""
        return [(name[:120], round(time, 4)) for name, _, time in gpu_times(self.both)]


def relative(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


def errors(run, exact):
    """(of the output, of the worst gradient)"""
    out, case = run.forward(), run.case
    found = {name: case.back[name](g) for name, g in zip(case.leaves, run.both(), strict=True)}
    return (relative(case.back["out"](out.detach()), exact["out"]),
            max(relative(gradient, exact[name]) for name, gradient in found.items()))


def measured(peer, given, repeats, device):
    """A peer's row on one problem."""
    run = Run(peer.case(given), given["weight"], device)
    of_output, of_gradients = errors(run, given["exact"])
    run.both()
    host, called = run.host_and_call(repeats)
    row = dict(host_ms=1e3 * host, called_ms=1e3 * called, error=of_output, gradient_error=of_gradients)
    if device.type == "cuda":
        forward, both = (run.gpu_seconds(function, repeats, host) for function in (run.forward, run.both))
        row |= dict(forward_ms=1e3 * forward, both_ms=1e3 * both, peak_mb=run.peak() / MEGABYTE,
                    kernels=run.kernels()[:12])
        refuse(row, peer)
    return row


def refuse(row, peer):
    """Raise UserError for a row that cannot be true."""
    if not any(re.search(peer.proof, name) for name, _ in row["kernels"]):
        ran = "; ".join(name[:40] for name, _ in row["kernels"][:3])
        raise UserError(f"its kernel did not run, but {ran}")
    for part, whole in (("forward_ms", "both_ms"), ("both_ms", "called_ms")):
        if row[part] > SLACK * row[whole]:
            raise UserError(f"{COLUMNS[part]} seems to take {row[part]:.3f} ms of the {row[whole]:.3f} of "
                            f"{COLUMNS[whole]}: the host stalled")


def judge(rows, dtype):
    """Say of each row whether it is at most three times as wrong as plain PyTorch in this dtype."""
    plain = next((row for row in rows if row["peer"] == "plain" and "error" in row), None)
    for row in rows:
        if "error" in row and plain:
            row["accurate"] = all(row[key] <= ERROR_FACTOR * plain[key] + 2 * torch.finfo(dtype).eps
                                  for key in ("error", "gradient_error"))


def compare(operation, size, arguments, device):
    """Rows of all peers on one problem."""
    dtype = torch.float32 if arguments.quick else torch.bfloat16
    given, rows = problem(operation, size, device, dtype), []
    for peer in PEERS[operation]:
        if not re.search(arguments.only, f"{operation} {peer.name}"):
            continue
        row = dict(operation=operation, S=size, peer=peer.name)
        try:
            row |= measured(peer, given, arguments.repeats, device)
        except Exception as error:  # what is not installed, does not compile or fit is a row with its reason
            reason = " ".join(str(error).split()) or "no message"
            absent = isinstance(error, ModuleNotFoundError)
            row["failed"] = f"not installed ({error.name})" if absent else f"{reason[:150]}"
        rows.append(row)
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    judge(rows, dtype)
    for row in rows:
        print(line(row), flush=True)
    return rows


def line(row):
    """A row on the screen."""
    label = f"{row['operation']:14s} S{row['S']:4d} {row['peer']:26s}"
    if "failed" in row:
        return f"{label} {row['failed']}"
    times = "  ".join(f"{COLUMNS[key]} {row[key]:8.3f}" for key in COLUMNS if key in row)
    peak = f"  {row['peak_mb']:7.0f} MB" if "peak_mb" in row else ""
    return (f"{label} {times}{peak}  errors {row['error']:.1e} {row['gradient_error']:.1e}"
            f"{'' if row.get('accurate', True) else ' INACCURATE'}")


def parsed(argv):
    parser = parser_of(
        __file__, __doc__, sizes=[128, 256, 384, 512, 768], only='"attention ours" and the like',
        quick="float32 on a CPU, to try the script; ours with TRITON_INTERPRET=1, set before")
    parser.add_argument("--path", nargs="+", default=[], help="directories in which peers lie")
    parser.add_argument("--repeats", type=whole_number(), default=10, help="(default: %(default)s)")
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parsed(argv)
    device = gpu_or_trial(arguments.quick)
    sys.path += arguments.path
    prepare_flex_attention(device)
    rows = []
    for size in arguments.sizes:
        for operation in OPERATIONS:
            rows += compare(operation, size, arguments, device)
        if arguments.out:
            write_result(arguments.out / "peers.json", device, rows=rows)
    if not rows:
        raise UserError(f"nothing is left by --only {arguments.only!r}")
    return int(any("failed" in row or not row.get("accurate", True) for row in rows if row["peer"] == JUDGED))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "peers.py"))
