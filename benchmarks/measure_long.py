#!/usr/bin/env python3
"""Samples split over GPUs (--sequence-parallel): memory, time, and how long a protein may be.

    python benchmarks/measure_long.py --out OUT [--ranks 1 2] [--lengths 64 256 512 768] [--only REGEX]

Parts, each in processes of its own: "accuracy" (loss and all gradients of a small model against float64, by
the 3x rule); "steps" (step time, peak memory and time in collectives by kind, each step one CUDA graph);
"compiled" (the same at the two longest lengths, everything fused and compiled) and "ultra" (with our kernels,
too, as far as split samples have them), which all compile at the same time and are timed in turn, and alone
where memory was short; "longest" (trials: the memory of two lengths says where to begin, every trial is one
step of eager code that fits or does not). B1, N 128, c_m 256, 8 heads, 4 blocks, checkpointing, bf16. Writes
OUT/long.json and OUT/long.md as soon as workers end. Exit code 1 if a part fails or accuracy does. --quick:
tiny, on a CPU with Gloo; --limit says what fits there.
"""
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import torch

from fusion_lab.measuring import turns
from fusion_lab.measuring.accuracy import compare_numerics
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.probe import Findings, peak_megabytes, probe
from fusion_lab.measuring.tables import cell, markdown
from fusion_lab.measuring.trace.collectives import OF_GPUS, kind_of
from fusion_lab.training import distributed
from fusion_lab.training.feeding import batch_of, to_device
from fusion_lab.training.files import OUT_OF_MEMORY, UserError, require_directory, write_json
from fusion_lab.training.flags import Parser, make_parser, parse, regular_expression, whole_number
from fusion_lab.training.machine import MEGABYTE, choose_device, process_settings, system_info
from proteins.splitting import split_over
from tiny_openfold_v2 import PROGRAM, Trainer

BF16 = "--use-amp --amp-dtype bfloat16 --enable-activation-checkpointing"
SIZES = "--batch-size 1 --num-seqs 128 --msa-dim 256 --msa-heads 8 --num-blocks 4"
QUICK = "--batch-size 1 --num-seqs 6 --msa-dim 16 --pair-dim 16 --msa-heads 2 --pair-heads 2 --num-blocks 1"
EAGER = f"{BF16} --enable-master-weights --enable-triton-attention"
FLAGS = {"accuracy": f"{BF16} --enable-triton-attention --enable-triton-relu",
         "steps": f"{EAGER} --enable-cuda-graphs", "compiled": f"{BF16} --enable-all-fusion",
         "ultra": f"{BF16} --enable-ultra",
         "longest": EAGER}
COMPILED = ("compiled", "ultra")
GOAL = 0.6       # of one GPU's peak, on two
MARGIN = 0.97    # of the length that the memory of shorter ones promises
UNTIMED = 2
REASON = r"measure_long\.py: |^(\[rank\d+\]: )?[\w.]+(Error|Exception): "  # of a worker's end, in its output


# A worker: one process, or one of those that torchrun started


def collectives(trainer, batch):
    """ms of one step in which collectives run, by kind; what ranks wait for each other is in it."""
    on_gpu = trainer.device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        trainer.step(batch).item()
    found = {}
    for event in profiler.key_averages():
        name = event.key.partition("(")[0]
        if OF_GPUS.search(name) if on_gpu else name.startswith("gloo:"):
            took = event.self_device_time_total if on_gpu else event.cpu_time_total
            found[kind_of(name)] = found.get(kind_of(name), 0.0) + took / 1e3
    return found


def measured(settings, world, device, steps, turn):
    """One row: the time of the first step; with steps, those of others, and their collectives, in turn."""
    trainer, source = PROGRAM.trainer(PROGRAM, settings, device), PROGRAM.open_source(settings)
    batch = to_device(batch_of(source, 0, world), device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    loss = trainer.step(batch).item()
    row = dict(length=settings.model.seq_len, ranks=world.size, loss=loss,
               first_step_s=time.perf_counter() - began)
    wait_for(turn, world.rank)
    if steps:
        timer = PhaseTimer(device)
        for _ in range(steps + UNTIMED):
            timer.start()
            trainer.step(batch)
            timer.mark()
        p20, median, p80 = quantiles(1e3 * timer.seconds()[UNTIMED:, 0])
        row.update(median_ms=median, p20_ms=p20, p80_ms=p80, collectives_ms=collectives(trainer, batch))
    on_gpu = device.type == "cuda"
    found = Findings({}, 0, peak=trainer.graph.peak if trainer.graph else None) if on_gpu else probe(
        trainer, batch, count_launches=False)
    row["peak_mb"] = max(world.gather(peak_megabytes(device, found)))
    return row


def wait_for(turn, rank):
    """Say that this rank has compiled, by a file, and wait for another that says "go"; turn is the beginning
    of their names, empty where there is nobody to wait for."""
    if turn:
        pathlib.Path(f"{turn}.{rank}").touch()
        while not os.path.exists(f"{turn}.go"):
            time.sleep(0.01)


def judged(settings, device, ranks):
    """A row: whether a small model, split over ranks, is as near to float64 as it is in one process."""
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    baseline = PROGRAM.fusion_config.preset(False)

    def trainer(program, asked, device):
        made = Trainer(program, asked, device)
        if asked.fusion != baseline:
            split = split_over(made.model, torch.distributed.group.WORLD)
            for weight in made.model.parameters():
                weight.register_post_accumulate_grad_hook(lambda own: split.sum_gradients([own]))
        return made

    program = replace(PROGRAM, trainer=trainer, defined=lambda output, batch: dict(loss=output["loss"]))
    verdict, failures = compare_numerics(program, settings, device)
    torch.distributed.destroy_process_group()
    alone = compare_numerics(PROGRAM, settings, device)[0]
    return dict(ranks=ranks, length=settings.model.seq_len, accurate=not failures, failures=failures[:3],
                error_ratio=verdict["worst_error_ratio"], alone_error_ratio=alone["worst_error_ratio"])


def work(argv):
    part, ranks, steps, limit, lengths, turn, *flags = argv
    turns.die_with_parent()
    _, settings, _ = parse(make_parser(PROGRAM), PROGRAM, [*flags, "--sequence-parallel", ranks])
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    if part == "accuracy":
        row = judged(settings.having(seq_len=61, sequence_parallel=1), device, int(ranks))
        print(json.dumps(row), flush=True)
        return 0
    world = distributed.begin(settings, device)
    if float(limit) and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(float(limit) * 2 ** 30 / whole, 1.0), device)
    for length in lengths.split(","):
        row = measured(settings.having(seq_len=int(length)), world, device, int(steps), turn)
        if float(limit) and device.type == "cpu" and row["peak_mb"] * MEGABYTE > float(limit) * 2 ** 30:
            raise MemoryError
        print(json.dumps(row), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


# The parent, which starts workers


def has_compiled(started):
    """Whether all ranks wait for their turn, or have failed."""
    return started.process.poll() is not None or all(
        os.path.exists(f"{started.turn}.{rank}") for rank in range(started.ranks))


def text_of(file):
    with file:
        file.seek(0)
        return file.read()


@dataclass
class Measurement:
    """The parts that were asked for, and what they found: rows and whole seconds by part and ranks."""
    arguments: object
    result: dict

    def start(self, part, ranks, lengths, steps, turn=""):
        """Workers that were started."""
        asked = self.arguments
        flags = f"{QUICK if asked.quick else SIZES} {'' if asked.quick else FLAGS[part]}".split()
        flags += ["--device", "cpu"] * asked.quick + ["--enable-activation-checkpointing"] * asked.quick
        torchrun = "-m torch.distributed.run --standalone --nproc-per-node".split()
        command = [sys.executable, *([*torchrun, str(ranks)] if ranks > 1 or part == "accuracy" else []),
                   __file__, "--worker", part, str(ranks), str(steps), str(asked.limit),
                   ",".join(map(str, lengths)), turn, *flags]
        tight = dict(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") if part == "longest" else {}
        out, errors = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        process = subprocess.Popen(command, stdout=out, stderr=errors, env={**os.environ, **tight})
        return SimpleNamespace(part=part, ranks=ranks, lengths=lengths, turn=turn, out=out, errors=errors,
                               process=process, began=time.perf_counter())

    def rows(self, started):
        """Rows of workers, at their end; the last one is the reason if they failed."""
        patience, process, late = self.arguments.patience, started.process, ""
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            late = f"not done after {patience} s"
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its own
                process.wait()
        rows = [json.loads(line) for line in text_of(started.out).splitlines() if line.startswith("{")]
        why = late or text_of(started.errors)
        if process.returncode:
            full = bool(OUT_OF_MEMORY.search(why))
            lines = [line for line in why.splitlines() if line.strip()]
            named = [line for line in lines if re.search(REASON, line)][:1] or lines[-1:]
            length = started.lengths[min(len(rows), len(started.lengths) - 1)]  # or it failed as it ended
            rows.append(dict(ranks=started.ranks, length=length, out_of_memory=full,
                             reason="out of memory" if full else " ".join(named)[:300]))
        seconds = time.perf_counter() - started.began
        print(f"{started.part}, {started.ranks} {'GPUs' if started.ranks > 1 else 'GPU'}: {len(rows)} rows, "
              f"{seconds:.0f} s", flush=True)
        self.result["seconds"].append([started.part, started.ranks, round(seconds, 1)])
        return rows

    def launch(self, part, ranks, lengths, steps):
        """Rows of one start of workers."""
        return self.rows(self.start(part, ranks, lengths, steps))

    def in_turn(self, parts):
        """Add the rows of parts that compile, for which the two longest lengths do."""
        asked = self.arguments
        with tempfile.TemporaryDirectory() as at:
            started = [self.start(part, ranks, [length], asked.steps, f"{at}/{part}-{ranks}-{length}")
                       for part in parts for ranks in asked.ranks for length in asked.lengths[-2:]]
            end = time.monotonic() + asked.patience
            try:
                while time.monotonic() < end and not all(map(has_compiled, started)):
                    time.sleep(0.05)
                again = []
                for one in started:
                    pathlib.Path(f"{one.turn}.go").touch()
                    found = self.rows(one)
                    if found[-1].get("out_of_memory"):
                        again.append(one)
                    else:
                        self.add(one.part, found)
            finally:
                for one in started:
                    one.process.terminate()
            for one in again:
                self.add(one.part, self.launch(one.part, one.ranks, one.lengths, asked.steps))

    def run(self):
        asked = self.arguments
        self.write()  # over what an earlier call found
        wanted = [part for part in FLAGS if re.search(asked.only, part)]
        compiled = [part for part in wanted if part in COMPILED]
        for part in wanted:
            if part in compiled[:1]:
                self.in_turn(compiled)
            for ranks in [] if part in compiled else asked.ranks:
                if part == "accuracy" and ranks == 1:
                    continue
                if part == "longest":
                    self.longest(ranks)
                else:
                    self.add(part, self.launch(part, ranks, asked.lengths, asked.steps))

    def add(self, part, rows):
        """Rows that are known; they are written at once."""
        rows = [dict(row, part=part) for row in rows]
        self.result["rows"] += rows
        self.write()
        return rows

    def longest(self, ranks):
        """Add rows of trials: up from a first guess while they fit, down while they do not, then between."""
        asked, fails = self.arguments, math.inf
        rows = self.add("longest", self.launch("longest", ranks, asked.lengths[-2:], 0))
        peaks = [(row["length"] ** 2, row["peak_mb"]) for row in rows if "peak_mb" in row]
        if len(peaks) < 2:
            return
        (x0, y0), (x1, y1) = peaks
        fits = max(row["length"] for row in rows)
        room = asked.limit * 1024 if asked.limit else self.result["memory_mb"]
        guess = MARGIN * math.sqrt(max((room - y0) * (x1 - x0) / (y1 - y0) + x0, x0))
        for _ in range(asked.trials):
            length = max(int(guess) // asked.stride * asked.stride, asked.stride)
            if not fits < length < fails:
                break
            (row,) = self.launch("longest", ranks, [length], 0)
            self.add("longest", [dict(row, trial=True)])
            if "peak_mb" in row:
                fits = length
                guess = length * 1.05 if fails is math.inf else (fits + fails) / 2
            elif row["out_of_memory"]:
                fails = length
                guess = (fits + fails) / 2
            else:
                break

    def write(self):
        out = self.arguments.out
        write_json(os.path.join(out, "long.json"), self.result)
        text = "\n".join([*markdown(table(self.result["rows"])), "", *findings(self.result["rows"])])
        pathlib.Path(out, "long.md").write_text(text + "\n", encoding="utf-8")


def table(rows):
    """Cells of all rows, the header first."""
    cells = [["part", "S", "GPUs", "step ms (p20, p80)", "against one", "peak MB per GPU", "of one",
              "in collectives ms (share)", "by kind, ms", "remark"]]
    alone = {(row["part"], row["length"]): row for row in rows if row["ranks"] == 1}
    for row in rows:
        one = alone.get((row["part"], row["length"]), {}) if row["ranks"] > 1 else {}
        ms, spent = row.get("median_ms"), row.get("collectives_ms", {})
        remark = row.get("reason") or ("" if "accurate" not in row else "accurate" if row["accurate"]
                                       else "; ".join(row["failures"]))
        if "error_ratio" in row:
            remark += f", error {row['error_ratio']:.2f}x (one GPU {row['alone_error_ratio']:.2f}x)"
        elif ms is None and "first_step_s" in row:
            remark = f"first step {row['first_step_s']:.1f} s"
        cells.append([
            row["part"] + " (trial)" * row.get("trial", False), str(row["length"]), str(row["ranks"]),
            f"{ms:.2f} ({row['p20_ms']:.2f}, {row['p80_ms']:.2f})" if ms else "",
            cell(ms and one.get("median_ms") and one["median_ms"] / ms, ".2f", unit="x"),
            cell(row.get("peak_mb"), ".0f"),
            cell(one.get("peak_mb") and row.get("peak_mb") and row["peak_mb"] / one["peak_mb"]),
            f"{sum(spent.values()):.2f} ({sum(spent.values()) / ms:.0%})" if spent else "",
            ", ".join(f"{kind} {took:.2f}" for kind, took in sorted(spent.items())), remark])
    return cells


def findings(rows):
    """What the rows say, in lines."""
    lines, peaks = [], {}
    for row in rows:
        if "peak_mb" in row and row["part"] != "longest":
            peaks.setdefault((row["part"], row["length"]), {})[row["ranks"]] = row["peak_mb"]
    for (part, length), by_ranks in peaks.items():
        if {1, 2} <= set(by_ranks):
            share = by_ranks[2] / by_ranks[1]
            lines.append(f"Peak at S {length} on two GPUs ({part}): {share:.2f} of one's; "
                         f"goal at 768: {GOAL}.")
    for ranks in sorted({row["ranks"] for row in rows if row["part"] == "longest"}):
        tried = [row for row in rows if row["part"] == "longest" and row["ranks"] == ranks]
        fit = max((row["length"] for row in tried if "peak_mb" in row), default=None)
        full = min((row["length"] for row in tried if row.get("out_of_memory")), default=None)
        lines.append(f"Longest S that trains on {ranks}: {fit or 'none of those tried'}"
                     + (f"; {full} does not fit." if full else "; nothing longer was tried."))
    return lines


def main(argv):
    if argv[:1] == ["--worker"]:
        return work(argv[1:])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends workers, too
    parser = Parser(prog="measure_long.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, help="directory for long.json and long.md")
    parser.add_argument("--ranks", type=whole_number(), nargs="+", default=[1, 2], help="GPUs (default: 1 2)")
    parser.add_argument("--lengths", type=whole_number(), nargs="+", default=[64, 256, 512, 768])
    parser.add_argument("--steps", type=whole_number(), default=10, help="measured steps (default: 10)")
    parser.add_argument("--trials", type=whole_number(), default=3, help="on so many GPUs (default: 3)")
    parser.add_argument("--stride", type=whole_number(), default=64, help="of lengths tried (default: 64)")
    parser.add_argument("--limit", type=float, default=0.0, help="GiB that trials and steps may take")
    parser.add_argument("--patience", type=whole_number(), default=240, help="s for a start of workers")
    parser.add_argument("--only", type=regular_expression, default="", help="parts (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny, on a CPU")
    asked = parser.parse_args(argv)
    require_directory(asked.out)
    device = choose_device("cpu" if asked.quick else "auto")
    if device.type == "cpu" and not asked.quick:
        raise UserError("no GPU here: --quick tries it on a CPU")
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    measurement = Measurement(asked, dict(system_info=system_info(device), flags=FLAGS, sizes=SIZES,
                                          memory_mb=whole / MEGABYTE, seconds=[], rows=[]))
    measurement.run()
    print(pathlib.Path(asked.out, "long.md").read_text(encoding="utf-8"))
    rows = measurement.result["rows"]
    bad = [row for row in rows if row.get("accurate") is False or row.get("out_of_memory") is False]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(distributed.exit_code(main, sys.argv[1:], "measure_long.py"))
