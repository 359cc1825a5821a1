#!/usr/bin/env python3
"""Triangle attention and multiplication by everyone's kernels, side by side, on one GPU.

    python benchmarks/peers.py --out OUT [--path DIR ...] [--sizes 128 256 384 512 768] [--only REGEX]

Peers: plain PyTorch, compiled, SDPA, FlexAttention, ours, cuEquivariance, trifast, OpenFold3's Triton
kernels, DeepSpeed's evoformer attention, miniworld-engine; those that are installed or lie in a --path. What
is not there, or fails, is a row that says so. Each gets its own layout and dtypes, with products in bfloat16,
a key mask and a trained bias; B 1, H 4, D 32, c 128.

Columns, in ms: the GPU's time alone for forward, and for forward and backward; the host's time for both; a
call from Python, waited for. Peak memory is beyond the inputs. Errors are the largest ones, relative to the
largest number of a tensor, against float64: of the output, and of the worst gradient. The profiler says which
kernels ran; a peer whose own did not has failed.

Writes OUT/peers.json after each size, peers.md and, with matplotlib, peers.png. Exit code 1 if ours fails or
is beyond three times plain PyTorch's errors, 3 without a GPU.
"""
import os
import pathlib
import re
import subprocess
import sys
import time
from statistics import median

os.environ.setdefault("CUEQ_TRIATTN_FALLBACK_THRESHOLD", "0")  # or short sequences run plain torch instead,
os.environ.setdefault("CUEQ_TRIMUL_FALLBACK_THRESHOLD", "0")  # and say nothing

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import torch

from benchmarks.peers_cases import PEERS, problem
from fusion_lab.kernels.library.attention_choice import prepare_flex_attention
from fusion_lab.measuring import plotting
from fusion_lab.measuring.accuracy import ERROR_FACTOR
from fusion_lab.training.files import MISSING, UserError, exit_code, write_atomically, write_json
from fusion_lab.training.flags import Parser, regular_expression, whole_number
from fusion_lab.training.machine import MEGABYTE, choose_device, system_info

OPERATIONS = ("attention", "multiplication")
JUDGED = "ours"
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
        """Of one call, without waits for the host: all calls are in the queue before the first one starts."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        torch.cuda._sleep(int(2e9 * min(0.3, 2 * host * repeats)))  # cycles of a clock of 2 GHz at most
        first.record()
        for _ in range(repeats):
            function()
        last.record()
        self.synchronize()
        return first.elapsed_time(last) / 1e3 / repeats

    def peak(self):
        """Bytes beyond the inputs."""
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.both()
        return torch.cuda.max_memory_allocated() - before

    def kernels(self):
        """[(name, milliseconds)] of both(), the longest first."""
        if self.device.type != "cuda":
            return []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA],
                                    acc_events=True) as profiler:
            self.both()
            self.synchronize()
        events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
        return [(event.key[:120], round(event.self_device_time_total / 1e3, 4)) for event in events]


def relative(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


def errors(run, exact):
    """(of the output, of the worst gradient)"""
    out, case = run.forward(), run.case
    found = {name: case.back[name](g) for name, g in zip(case.leaves, run.both(), strict=True)}
    if case.residual is not None:  # the peer's result has its input added, and so has that input's gradient
        exact = exact | {"out": exact["out"] + exact["residual"],
                         case.residual: exact[case.residual] + exact["weight"]}
    return (relative(case.back["out"](out.detach()), exact["out"]),
            max(relative(gradient, exact[name]) for name, gradient in found.items()))


def measured(peer, given, repeats, device):
    """A peer's row on one problem."""
    run = Run(peer.case(given), given["weight"], device)
    of_output, of_gradients = errors(run, given["exact"])
    run.both()
    host, called = run.host_and_call(repeats)
    row = dict(forward_ms=1e3 * run.gpu_seconds(run.forward, repeats, host),
               both_ms=1e3 * run.gpu_seconds(run.both, repeats, host), host_ms=1e3 * host,
               called_ms=1e3 * called, error=of_output, gradient_error=of_gradients)
    if device.type == "cuda":
        row |= dict(peak_mb=run.peak() / MEGABYTE, kernels=run.kernels()[:12])
        if not any(re.search(peer.proof, name) for name, _ in row["kernels"]):
            ran = "; ".join(name[:40] for name, _ in row["kernels"][:3])
            raise UserError(f"its kernel did not run, but {ran}")
    return row


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
    times = "  ".join(f"{COLUMNS[key]} {row[key]:8.3f}" for key in COLUMNS)
    return (f"{label} {times}  {row.get('peak_mb', 0):7.0f} MB  errors {row['error']:.1e} "
            f"{row['gradient_error']:.1e}{'' if row.get('accurate', True) else ' INACCURATE'}")


def tables(rows):
    """The same in Markdown, a table for each operation and size."""
    lines = []
    for operation, size in dict.fromkeys((row["operation"], row["S"]) for row in rows):
        heads = [*(f"{text}, ms" for text in COLUMNS.values()), "peak, MB", "error", "gradients' error"]
        lines += [f"\n### Triangle {operation}, S {size}\n", f"| peer | {' | '.join(heads)} |",
                  "|---" * (len(heads) + 1) + "|"]
        for row in rows:
            if (row["operation"], row["S"]) != (operation, size):
                continue
            cells = [row["failed"].replace("|", "/")] + [""] * (len(heads) - 1) if "failed" in row else [
                *(f"{row[key]:.3f}" for key in COLUMNS), f"{row.get('peak_mb', 0):.0f}",
                f"{row['error']:.1e}", f"{row['gradient_error']:.1e}"]
            lines.append(f"| {row['peer']} | {' | '.join(cells)} |")
    return "\n".join(lines).strip() + "\n"


def picture(rows, path):
    """The GPU's time of forward and backward over S, and that of a call from Python, dotted."""
    pyplot = plotting.require_matplotlib()
    figure, axes = pyplot.subplots(1, len(OPERATIONS), figsize=(12, 5), constrained_layout=True)
    for axis, operation in zip(axes, OPERATIONS, strict=True):
        for number, peer in enumerate(PEERS[operation]):
            points = [row for row in rows if row["operation"] == operation and row["peer"] == peer.name
                      and "failed" not in row]
            for key, style in (("both_ms", "-o"), ("called_ms", ":")):
                axis.plot([row["S"] for row in points], [row[key] for row in points], style,
                          color=f"C{number}", label=peer.name if points and key == "both_ms" else None)
        axis.set(title=f"triangle {operation}", xlabel="S, residues", xscale="log", yscale="log",
                 ylabel="ms, forward and backward (dotted: called)")
        axis.legend()
    plotting.save(figure, path)


def warm_up(arguments, flags):
    """Compile for all sizes at once, each in a process of its own; what they compile stays on disk."""
    jobs = [subprocess.Popen([sys.executable, __file__, *flags, "--sizes", str(size), "--warm"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for size in arguments.sizes]
    for job in jobs:
        job.wait()


def parsed(argv):
    parser = Parser(prog="peers.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="directory for results (default: none)")
    parser.add_argument("--path", nargs="+", default=[], help="directories in which peers lie")
    parser.add_argument("--sizes", nargs="+", type=whole_number(), default=[128, 256, 384, 512, 768],
                        help="residues (default: %(default)s)")
    parser.add_argument("--only", default="", type=regular_expression,
                        help='regular expression over "attention ours" and the like (default: all)')
    parser.add_argument("--repeats", type=whole_number(), default=10, help="(default: %(default)s)")
    parser.add_argument("--warm", action="store_true", help="run each peer once, to compile it")
    parser.add_argument("--quick", action="store_true",
                        help="float32 on a CPU, to try the script; ours with TRITON_INTERPRET=1, set before")
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parsed(argv)
    if not (arguments.quick or torch.cuda.is_available()):
        raise UserError("needs a GPU; --quick tries the script on a CPU", code=MISSING)
    sys.path += arguments.path
    device = choose_device("cpu" if arguments.quick else "cuda")
    prepare_flex_attention(device)
    if device.type == "cuda" and not arguments.warm:
        warm_up(arguments, ["--only", arguments.only, "--repeats", "1",
                            *(["--path", *arguments.path] if arguments.path else [])])
    rows = []
    for size in arguments.sizes:
        for operation in OPERATIONS:
            rows += compare(operation, size, arguments, device)
        if arguments.out:
            write_json(arguments.out / "peers.json", dict(
                command=" ".join(["python benchmarks/peers.py", *sys.argv[1:]]), rows=rows,
                date=time.strftime("%F"), system_info=system_info(device)))
    if arguments.out:
        write_atomically(arguments.out / "peers.md", lambda file: file.write(tables(rows).encode()))
        with plotting.spared("picture"):
            picture(rows, arguments.out / "peers.png")
    return int(any(not row.get("accurate") for row in rows if row["peer"] == JUDGED))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "peers.py"))
