#!/usr/bin/env python3
"""Time rungs from the unfused float32 baseline to the fastest setting, on one GPU.

    python benchmarks/measure_ladder.py --out OUT [--only REGEX] [--steps 30]
    python benchmarks/measure_ladder.py --out OUT --root . ../before     # two checkouts, rung by rung

Every rung is a process of its own: the ladder_rung.py of its checkout. The rungs of one shape compile and
warm up at the same time. Then they are timed one by one, alone on the GPU. Those for which memory was short
begin again when the others have ended.
Writes OUT/ladder.json: times in ms, memory in MB (2**20 bytes), the most expensive kernels, and whether
outputs and all gradients pass the 3x rule (fusion_lab/measuring/accuracy.py). A rung that fails is a row with
its reason; exit code 1 if one fails or is not accurate. With --root the rows' names end in the checkout's,
and the last lines compare each checkout with the last one.
"""
import contextlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from script import ROOT, begin, gpu_or_trial, parser_of, write_result

begin(__name__, "torch")

from fusion_lab.training.errors import OUT_OF_MEMORY, UserError, exit_code
from fusion_lab.training.files import read_json

SHAPES = {
    "B4 S64 N16": "--batch-size 4 --seq-len 64 --num-seqs 16",
    "B1 S256 N64": "--batch-size 1 --seq-len 256 --num-seqs 64",
    "B1 S384 N128 c_m 256": "--batch-size 1 --seq-len 384 --num-seqs 128 --msa-dim 256 --msa-heads 8",
}
TINY = "--num-blocks 1 --batch-size 1 --seq-len 16 --num-seqs 4 --msa-dim 16 --pair-dim 16"
BF16 = "--use-amp --amp-dtype bfloat16"
COMPILED = f"{BF16} --enable-cuda-graphs --enable-torch-compile"
BEST = f"{BF16} --enable-all-fusion"
ULTRA = f"{BF16} --enable-ultra"
RUNGS = {  # flags that e77e90b knows as well, so that it can be measured beside a later checkout
    "baseline fp32": "--disable-all-fusion",
    "fused bf16 autocast": BF16,
    "+ compile": COMPILED,  # the default fusions, compiled, in one CUDA graph
    "+ master weights": f"{COMPILED} --enable-master-weights",
    "best": BEST,
    "ultra": ULTRA,
    "ultra, checkpointing": f"{ULTRA} --enable-activation-checkpointing",
    "ultra, selective checkpointing": f"{ULTRA} --enable-selective-checkpointing",
    "attention math": f"{BEST} --attention-backend math",
    "attention sdpa": f"{BEST} --attention-backend sdpa",
    "attention flex": f"{BEST} --attention-backend flex",
}


def checkout(text):
    """For --root: the directory of a checkout."""
    root = pathlib.Path(text).resolve()
    if not (root / "benchmarks" / "ladder_rung.py").is_file():
        raise UserError(f"{text}: no checkout of this project")
    return root


def rungs_of(shape, only, roots):
    """[(name, root, flags)] of the rungs of a shape that --only leaves; those of one rung for all the roots,
    {label: directory}, are neighbours."""
    sizes = SHAPES.get(shape, TINY)
    found = {f"{shape} | {rung}": f"{sizes} {flags}".split() for rung, flags in RUNGS.items()}
    return [(name + label, root, flags) for name, flags in found.items() for label, root in roots.items()
            if re.search(only, name)]


class Rung:
    """A rung and the process that measures it."""

    def __init__(self, name, root, flags, steps):
        self.row = dict(name=name, flags=flags)
        self.log = tempfile.TemporaryFile("w+")  # a pipe nobody reads would fill and block the child
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ,
                       "FUSION_LAB_TURN": f"1,0,{os.getpid()}"}  # asks e77e90b's rung to wait as ours does
        command = [sys.executable, str(root / "benchmarks" / "ladder_rung.py"), str(root), str(steps), *flags]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log, text=True)

    def wait_until_ready(self):
        """Or until it has ended."""
        while self.process.stdout.readline() not in ("ready\n", ""):
            pass

    def finish(self):
        """Let it measure; its row, which is printed too."""
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:  # it has ended
            pipe.write("\n")
        lines = self.process.stdout.read().splitlines()
        self.process.wait()
        try:
            self.row.update(json.loads(lines[-1]))
        except (IndexError, ValueError):
            self.log.seek(0)
            said = self.log.read()
            self.row.update(failed=" / ".join(said.strip().splitlines()[-3:])[-400:],
                            out_of_memory=bool(OUT_OF_MEMORY.search(said)))
        self.log.close()
        print(line(self.row), flush=True)
        return self.row


def line(row):
    """A row for the terminal."""
    if "failed" in row:
        return f"{row['name']:42s} failed: {row['failed']}"
    gpu = (f"{row['peak_mb']:8.0f} MB  {row['launches']:5d} launches  busy {row['gpu_busy_ms']:7.2f} ms  "
           if "launches" in row else "")
    return (f"{row['name']:42s} {row['median_ms']:8.2f} ms ({row['p20_ms']:.2f}, {row['p80_ms']:.2f})  {gpu}"
            f"first {row['first_step_s']:5.1f} s  "
            f"{'ok' if row['accurate'] else 'INACCURATE ' + row['failures'][0]}")


def measured(rungs, steps):
    """Yields a row for each rung. All get ready at once and measure one by one; those for which memory was
    short do so again, each alone."""
    started, short = [Rung(*rung, steps) for rung in rungs], []
    for rung in started:
        rung.wait_until_ready()
    for given, rung in zip(rungs, started, strict=True):
        row = rung.finish()
        if row.get("out_of_memory") and len(rungs) > 1:
            short.append(given)
        else:
            yield row
    for given in short:
        yield from measured([given], steps)


def summary_of(flags, gpus=1):
    """The summary of a training run with these flags, on several GPUs by torchrun. UserError if it fails."""
    with tempfile.TemporaryDirectory() as at:
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        command = [sys.executable, *(starter if gpus > 1 else []), str(ROOT / "tiny_openfold_v2.py"), *flags,
                   "--profile-dir", f"{at}/run"]
        done = subprocess.run(command, cwd=at, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(" / ".join(done.stderr.strip().splitlines()[-3:])[-400:] or "no result")
        return read_json(f"{at}/run/performance_summary_v2.json")


def compared(rows, labels):
    """Lines: time and peak of each checkout's rungs as shares of the last one's."""
    by_name = {row["name"]: row for row in rows if "failed" not in row}
    for name, row in by_name.items():
        label = next(label for label in labels if name.endswith(label))
        other = by_name.get(name.removesuffix(label) + labels[-1])
        if label != labels[-1] and other:
            peak = f", peak {row['peak_mb'] / other['peak_mb']:.3f}" if "peak_mb" in row else ""
            yield f"{name}: time {row['median_ms'] / other['median_ms']:.3f}{peak} of{labels[-1]}"


def commit(root):
    done = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True,
                          check=False)
    return done.stdout.strip() or None


def main(argv=None):
    parser = parser_of(__file__, __doc__, steps=30, only="'shape | rung'",
                       quick="a tiny shape, to try the script on a CPU")
    parser.add_argument("--root", metavar="DIR", nargs="+", default=[],
                        help="checkouts of this project to measure (default: this one)")
    arguments = parser.parse_args(argv)
    device = gpu_or_trial(arguments.quick)
    roots = {f" ({text})": checkout(text) for text in arguments.root} or {"": ROOT}
    shapes = [rungs_of(shape, arguments.only, roots) for shape in (["tiny"] if arguments.quick else SHAPES)]
    if not any(shapes):
        parser.error(f"no rung is left by --only {arguments.only!r}")
    if arguments.out:
        path = next(path for number in itertools.count()
                    if not (path := arguments.out / f"ladder{number or ''}.json").exists())
    rows, commits = [], {str(root): commit(root) for root in roots.values()}
    for rungs in shapes:
        for row in measured(rungs, arguments.steps):
            rows.append(row)
            if arguments.out:
                write_result(path, device, commits=commits, rows=rows)
    if len(roots) > 1:
        print("\n".join(compared(rows, list(roots))))
    return int(not all(row.get("accurate") for row in rows))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_ladder.py"))
