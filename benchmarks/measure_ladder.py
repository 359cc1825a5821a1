#!/usr/bin/env python3
"""Time every rung from the unfused float32 baseline to the fastest setting, on one GPU or on the CPU.

    python benchmarks/measure_ladder.py --out OUT [--only REGEX] [--steps 30] [--quick]

Every rung is a process of its own. On a GPU all of them compile and warm up at the same time and are then
timed one by one, alone on the GPU; where there is no GPU, one follows the other on the CPU. Writes
OUT/ladder.json: times in ms, memory in MB (2**20 bytes), the most expensive kernels, and whether outputs and
all gradients pass the 3x rule (see fusion_checks.py). A rung that fails is a row with its reason; exit code
1 if one fails or is not accurate.

    python benchmarks/measure_ladder.py --plot memory.png OUT/ladder.json ...

draws time against peak memory, a panel for each shape of these results, which must be a GPU's.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPES = {
    "B4 S64 N16": "--batch-size 4 --seq-len 64 --num-seqs 16",
    "B1 S256 N64": "--batch-size 1 --seq-len 256 --num-seqs 64",
    "B1 S384 N128 c_m 256": "--batch-size 1 --seq-len 384 --num-seqs 128 --msa-dim 256 --msa-heads 8",
}
BF16 = "--use-amp --amp-dtype bfloat16"
MASTERS = f"{BF16} --enable-master-weights --enable-torch-compile --enable-cuda-graphs"
BEST = f"{BF16} --enable-all-fusion"
RUNGS = {
    "baseline fp32": "--disable-all-fusion",
    "fused fp32": "",
    "fused TF32": "--use-tf32",
    "fused bf16 autocast": BF16,
    "+ graph": f"{BF16} --enable-cuda-graphs",
    "+ compile": f"{BF16} --enable-cuda-graphs --enable-torch-compile",
    "+ master weights": MASTERS,
    "+ projection fusion": f"{MASTERS} --enable-projection-fusion",
    "+ transition fusion": f"{MASTERS} --enable-projection-fusion --enable-transition-fusion",
    "best": BEST,  # + combo kernels
    "best, no projection fusion": f"{BEST} --disable-projection-fusion",
    "best, no transition fusion": f"{BEST} --disable-transition-fusion",
    "best, max-autotune": f"{BEST} --torch-compile-mode max-autotune-no-cudagraphs",  # compiles for minutes
    "best, no combo kernels": f"{BEST} --disable-combo-kernels",
    "attention math": f"{BEST} --attention-backend math",
    "attention sdpa": f"{BEST} --attention-backend sdpa",
    "attention flex": f"{BEST} --attention-backend flex",
    "no OPM fusion": f"{BEST} --disable-opm-fusion",
    "checkpointing": f"{BEST} --enable-activation-checkpointing",
    "budget 0.5": f"{BEST} --activation-memory-budget 0.5",
    "budget 0.2": f"{BEST} --activation-memory-budget 0.2",
}


CPU_SHAPES = {"CPU B4 S64 N16": SHAPES["B4 S64 N16"]}
CPU_RUNGS = {
    "baseline fp32": "--disable-all-fusion",
    "fused fp32": "",
    "fused fp32, sdpa": "--attention-backend sdpa",
    "+ compile": "--enable-torch-compile",
    "best fp32": "--enable-all-fusion",
    "baseline bf16 autocast": "--disable-all-fusion --use-amp",
    "fused bf16 autocast": "--use-amp",
    "+ master weights": "--use-amp --enable-master-weights",
    "+ projection fusion": "--use-amp --enable-master-weights --enable-projection-fusion",
    "+ transition fusion": "--use-amp --enable-master-weights --enable-transition-fusion",
    "bf16 + compile": "--use-amp --enable-master-weights --enable-torch-compile",
    "best": "--use-amp --enable-all-fusion",
}


def child(flags, steps):
    """One rung: warm up, say "ready", wait for a line on stdin, time, print the result as JSON."""
    import numpy as np
    import torch

    import tiny_openfold_v2 as tof
    from fusion_lab.measuring.accuracy import compare_numerics
    from fusion_lab.measuring.clocks import PhaseTimer
    from fusion_lab.training.feeding import to_device
    from fusion_lab.training.flags import make_parser, read_configs
    from fusion_lab.training.machine import MEGABYTE, choose_device
    from proteins.batches import SyntheticProteins

    config, training, fusion, _ = read_configs(make_parser().parse_args(flags))
    device = choose_device(training.device)
    on_gpu = device.type == "cuda"
    small = tof.TinyOpenFoldConfig(num_blocks=1, seq_len=64, num_seqs=16)
    _, failures = compare_numerics(small, fusion, training, device)
    trainer = tof.Trainer(config, fusion, training, device)
    batches = [to_device(SyntheticProteins(config, training).batch(i), device) for i in range(4)]
    started = time.perf_counter()
    trainer.step(batches[0]).item()
    first = time.perf_counter() - started
    for batch in batches:
        trainer.step(batch).item()
    print("ready", flush=True)
    sys.stdin.readline()
    timer = PhaseTimer(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for i in range(steps + 5):
        timer.start()
        loss = trainer.step(batches[i % 4])
        timer.mark()
    ms = timer.seconds()[5:, 0] * 1e3
    result = dict(median_ms=float(np.median(ms)), p20_ms=float(np.quantile(ms, 0.2)),
                  p80_ms=float(np.quantile(ms, 0.8)), first_step_s=first, loss=loss.item(),
                  kernel=trainer.model.attention_kernel(trainer.amp_dtype))
    if on_gpu:
        peak = max(torch.cuda.max_memory_allocated(device), trainer.graph.peak if trainer.graph else 0)
        result["peak_mb"] = peak / MEGABYTE
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            trainer.step(batches[0])
            torch.cuda.synchronize()
        events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
        kernels = [e for e in events if not e.key.startswith(("Memcpy", "Memset"))]
        result["launches"] = sum(e.count for e in kernels)
        result["gpu_busy_ms"] = sum(e.self_device_time_total for e in events) / 1e3
        result["top"] = [(e.key[:90], e.count, round(e.self_device_time_total / 1e3, 3)) for e in
                         sorted(events, key=lambda e: -e.self_device_time_total)[:14]]
    result.update(accurate=not failures, failures=failures[:3])
    print(json.dumps(result), flush=True)


def rungs_of(shapes, rungs, arguments):
    """{name: flags} of every rung that --only and --skip leave."""
    tiny = "--num-blocks 1 --batch-size 1 --seq-len 16 --num-seqs 4 --msa-dim 16 --pair-dim 16"
    if arguments.quick:
        shapes = {f"quick, not {shape}": tiny for shape in shapes}
    found = {f"{shape} | {rung}": f"{shape_flags} {rung_flags}".split()
             for shape, shape_flags in shapes.items() for rung, rung_flags in rungs.items()}
    return {name: flags for name, flags in found.items()
            if re.search(arguments.only, name) and not re.search(arguments.skip, name)}


def start_children(rungs, steps):
    """Start every rung; yields (name, flags, log of its stderr, process)."""
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
    for name, flags in rungs.items():
        command = [sys.executable, __file__, "--child", json.dumps(flags), "--steps", str(steps)]
        log = tempfile.TemporaryFile("w+")  # a pipe nobody reads would fill and block the child
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        yield name, flags, log, subprocess.Popen(command, env=environment, **pipes)


def wait_until_ready(name, flags, log, process):
    while (line := process.stdout.readline()) and line.strip() != "ready":
        pass
    return name, flags, log, process


def finish(name, flags, log, process):
    """Let one waiting rung run; its result as a row, which is printed too."""
    out, _ = process.communicate("go\n")
    row = dict(name=name, flags=flags)
    try:
        row.update(json.loads(out.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        log.seek(0)
        row["failed"] = " / ".join(log.read().strip().splitlines()[-3:])[-400:]
        print(f"{name:42s} failed: {row['failed']}", flush=True)
        return row
    gpu = (f"{row['peak_mb']:8.0f} MB  {row['launches']:5d} launches  busy {row['gpu_busy_ms']:7.2f} ms  "
           if "launches" in row else "")
    print(f"{name:42s} {row['median_ms']:8.2f} ms ({row['p20_ms']:.2f}, {row['p80_ms']:.2f})  {gpu}"
          f"first {row['first_step_s']:5.1f} s  "
          f"{'ok' if row['accurate'] else 'INACCURATE ' + row['failures'][0]}", flush=True)
    return row


def plot(paths, picture):
    """Time against peak memory of every rung but the baseline, and the curve of those that no other beats in
    both. Of rungs that lie on each other, one has its name written beside it."""
    from fusion_lab.measuring.plotting import require_matplotlib
    from fusion_lab.training.files import UserError, require_writable
    pyplot, rows, panels = require_matplotlib(), [], {}
    require_writable(picture)
    for path in paths:
        try:
            rows += json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["rows"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: no result of this program") from None
    for row in rows:
        shape, rung = row["name"].split(" | ")
        if row.get("peak_mb") and not rung.startswith("baseline"):
            panels.setdefault(shape, []).append((row["median_ms"], row["peak_mb"], rung))
    if not panels:
        raise UserError(f"--plot {picture}: no result with a memory figure was named")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.6), layout="constrained",
                                   squeeze=False)
    for axis, (shape, points) in zip(axes[0], panels.items(), strict=True):
        best = [p for p in sorted(points) if not any(q[0] < p[0] and q[1] <= p[1] for q in points)]
        times, memory, _ = zip(*points, strict=True)
        axis.plot(times, memory, "o", color="0.6", ms=4)
        axis.plot(*list(zip(*best, strict=True))[:2], "o-", color="C0", ms=5)
        width, height, named = max(times) - min(times), max(memory), []
        for ms, mb, rung in [*best, *points]:
            if all(abs(ms - x) > 0.3 * width or abs(mb - y) > 0.09 * height for x, y in named):
                named.append((ms, mb))
                axis.annotate(rung, (ms, mb), xytext=(4, 5), textcoords="offset points", fontsize=7)
        axis.set(title=shape, xlabel="ms per step", ylabel="peak memory, MB", ylim=(0, 1.1 * height))
        axis.margins(x=0.3)
    try:
        figure.savefig(picture, dpi=110)
    except ValueError as error:  # no picture format that matplotlib knows
        raise UserError(f"--plot {picture}: {str(error).splitlines()[0]}") from None


def save(rows, path):
    """Write what is known so far."""
    from fusion_lab.training.files import write_json
    from fusion_lab.training.machine import choose_device, system_info
    write_json(path, dict(command=sys.argv, rows=rows, system_info=system_info(choose_device("auto")),
                          date=time.strftime("%F")))


def main(argv=None):
    from fusion_lab.training.flags import Parser, regular_expression, whole_number
    parser = Parser(prog="measure_ladder.py", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", help="ladder.json files for --plot")
    parser.add_argument("--plot", metavar="PNG", help="draw results instead of measuring")
    parser.add_argument("--out", type=pathlib.Path, help="directory for the results (default: none)")
    parser.add_argument("--only", default="", type=regular_expression,
                        help="regular expression over 'shape | rung' (default: all)")
    parser.add_argument("--skip", default="^$", type=regular_expression,
                        help="the same, for rungs left out (default: none)")
    parser.add_argument("--steps", type=whole_number, default=30, help="timed (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the script on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.results and not arguments.plot:
        parser.error("results are for --plot")
    if arguments.child is not None:
        return child(json.loads(arguments.child), arguments.steps)
    if arguments.plot:
        return plot(arguments.results, arguments.plot)
    import torch
    on_gpu, rows, path = torch.cuda.is_available(), [], None
    rungs = rungs_of(*((SHAPES, RUNGS) if on_gpu else (CPU_SHAPES, CPU_RUNGS)), arguments)
    if not rungs:
        parser.error(f"no rung is left by --only {arguments.only!r} and --skip {arguments.skip!r}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        number = len(list(arguments.out.glob("ladder*.json")))
        path = arguments.out / f"ladder{number or ''}.json"
    children = start_children(rungs, arguments.steps)
    if on_gpu:
        children = [wait_until_ready(*child) for child in list(children)]
    for started in children:
        rows.append(finish(*(started if on_gpu else wait_until_ready(*started))))
        if path:
            save(rows, path)
    return int(not all(row.get("accurate") for row in rows))


if __name__ == "__main__":
    from fusion_lab.training.files import exit_code
    sys.exit(exit_code(main, None, "measure_ladder.py"))
