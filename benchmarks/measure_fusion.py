#!/usr/bin/env python3
"""What every fusion buys on one GPU, over shapes and precisions; and do the figures agree with other counts.

    python benchmarks/measure_fusion.py --out OUT              # everything, some minutes
    python benchmarks/measure_fusion.py --out OUT --part compare --shapes "4,64,16" --precisions fp32
    python benchmarks/measure_fusion.py --render OUT/fusion.json           # tables into tables.md

Every pair of shape and precision is a process of its own; its variants are interleaved. Writes
OUT/fusion.json after each; --render puts its tables, and those of further files, between the markers of
benchmarks/tables.md, so that no table is typed by hand.
"""
import argparse
import itertools
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
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import torch

from fusion_lab.measuring.bounds.ceilings import ceiling_line
from fusion_lab.measuring.bounds.roofline import roofline_rows
from fusion_lab.measuring.comparison.compare import compare, release
from fusion_lab.measuring.comparison.table import table
from fusion_lab.measuring.comparison.variants import ALL, BASELINE, comparison_variants
from fusion_lab.measuring.tables import aligned, markdown
from fusion_lab.profiler.session import run_session
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import UserError, exit_code, finite, require_directory, write_json, write_text
from fusion_lab.training.flags import Parser, make_parser, parse, whole_number
from fusion_lab.training.machine import choose_device, process_settings
from fusion_lab.training.reading import read_json
from tiny_openfold_v2 import PROGRAM

PRECISIONS = {"fp32": [], "tf32": ["--use-tf32"], "bf16": ["--use-amp", "--amp-dtype", "bfloat16"]}
SHAPES = "4,64,16 2,128,32 1,256,64"
SMALL_MODEL = "--msa-dim 16 --pair-dim 16 --msa-heads 2 --pair-heads 2 --outer-product-dim 4 --num-blocks 1"
LONE_RUNS = {BASELINE: ["--disable-all-fusion"], ALL: []}  # variants that are counted once more: their flags
LAST_WORDS = 800  # characters of a failed process's log


def pair_name(shape, precision):
    return "B{} S{} N{} {}".format(*shape, precision)


def trainer_flags(shape, precision, options):
    b, s, n = shape
    flags = ["--batch-size", b, "--seq-len", s, "--num-seqs", n, "--num-steps", options.steps,
             "--warmup-steps", 3, *PRECISIONS[precision]]
    return [*map(str, flags), *(SMALL_MODEL.split() if options.quick else [])]


def count_kernels_in_a_trace(settings, device):
    """Kernels of one step by the exported trace of a plain profiler run, or None on CPU."""
    if device.type != "cuda":
        return None
    process_settings(settings, device)
    trainer = PROGRAM.trainer(PROGRAM, settings, device)
    batch = to_device(PROGRAM.open_source(settings).batch(0), device)
    for _ in range(3):  # first steps make what stays, and compile
        trainer.step(batch)
    with torch.profiler.profile() as profiler:
        trainer.step(batch)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            return sum(e.get("cat") == "kernel" for e in json.load(file)["traceEvents"])


def compare_child(settings):
    """A comparison of all variants, with kernels counted once more."""
    device = choose_device(settings.training.device)
    variants = comparison_variants(PROGRAM, settings, device.type == "cuda")
    if not settings.training.use_amp:  # the ladder above torch.compile is for mixed precision
        variants = [v for v in variants if not v.name.startswith("+")]
    result = compare(PROGRAM, settings, variants=variants)
    release(variants)
    result["plain_profiler_launches"] = {v.name: count_kernels_in_a_trace(v.settings, device)
                                         for v in variants if v.name in LONE_RUNS and v.reason is None}
    return result


def roofline_child(settings):
    """A session with roofline."""
    with tempfile.TemporaryDirectory() as directory:
        analysis = run_session(PROGRAM, settings, directory, roofline=True).as_dict()
    kept = ("ceilings", "roofline", "coverage", "launch", "findings", "step", "sublayers", "kinds",
            "launches_per_step", "memory_peak_mb", "config", "training_params", "fusion_config",
            "system_info")
    return finite(dict({key: analysis[key] for key in kept}, kernels=analysis["kernels"][:20]))


CHILDREN = dict(compare=compare_child, roofline=roofline_child)


def measured(part, flags, out, name):
    """What a child measures in a process of its own; or dict(error=the last words of its log)."""
    command = [sys.executable, os.path.abspath(__file__), "--child", part, *flags]
    with open(out / f"{name}.log", "w+", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            return json.loads(lines[-1])
        log.seek(0)
        return dict(error=log.read().strip()[-LAST_WORDS:] or f"exit code {done.returncode}")


def lone_run(flags, out, name):
    """Start the trainer by itself; its summary's peak is the max_memory_allocated of a lone run."""
    command = [sys.executable, PROGRAM.file, *flags, "--profile-dir", str(out / name)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def lone_peak(process):
    """Peak memory (MB) of a lone run, or None if it failed."""
    lines = process.communicate()[0].splitlines()
    if process.returncode or not lines:
        return None
    return json.loads(lines[-1])["performance_summary"]["peak_memory_mb"]


def compare_part(options, out, results, save):
    """Fill results, {shape and precision: comparison}, each with the lone runs of the checked variants, and
    save() after each."""
    for shape in options.shapes:
        for precision in options.precisions:
            name, flags = pair_name(shape, precision), trainer_flags(shape, precision, options)
            file = re.sub(r"\W+", "_", name)
            results[name] = measured("compare", flags, out, file)
            save()
            alone = {variant: lone_run([*flags, *more], out, f"{file}_{variant}")
                     for variant, more in LONE_RUNS.items()}
            results[name]["lone_run_peak_mb"] = {variant: lone_peak(run) for variant, run in alone.items()}
            save()
            print_comparison(name, results[name])


def print_comparison(name, result):
    print(f"\n{name}")
    if "error" in result:
        print(result["error"])
        return
    print("\n".join(aligned(table(result["variants"]))), flush=True)
    for row in agreement(result):
        print(f"   {row['variant']}: launches {row['launches']}, plain profiler {row['plain_launches']}; "
              f"peak {row['peak_mb']} MB, lone run {row['lone_peak_mb']} MB: {row['verdict']}")


def agreement(result):
    """Launches and peak memory of the checked variants against the independent counts."""
    rows = []
    for entry in result["variants"]:
        if entry["name"] not in LONE_RUNS or not entry["measured"]:
            continue
        launches, plain = entry["launches_per_step"], result["plain_profiler_launches"].get(entry["name"])
        peak, lone = entry["peak_memory_mb"], result.get("lone_run_peak_mb", {}).get(entry["name"])
        same = [abs(a / b - 1) <= limit for a, b, limit in ((launches, plain, 0.02), (peak, lone, 0.01))
                if a and b]
        rows.append(dict(variant=entry["name"], launches=launches, plain_launches=plain,
                         peak_mb=None if peak is None else round(peak, 1),
                         lone_peak_mb=None if lone is None else round(lone, 1),
                         verdict="not counted" if not same else "agree" if all(same) else "DISAGREE"))
    return rows


def roofline_part(options, out, results, save):
    """Fill results, {shape and precision: session with roofline}, for the first and the last
    shape, and save() after each."""
    first, last = options.precisions[0], options.precisions[-1]
    precisions = dict.fromkeys([last] if options.part == "all" else [first, last])
    shapes = dict.fromkeys([options.shapes[0], options.shapes[-1]])
    for shape, precision in itertools.product(shapes, precisions):
        name, flags = pair_name(shape, precision), trainer_flags(shape, precision, options)
        results[name] = result = measured("roofline", flags, out, "roofline_" + re.sub(r"\W+", "_", name))
        save()
        print(f"\n{name}: roofline")
        if "error" in result:
            print(result["error"])
            continue
        print("\n".join([ceiling_line(result["ceilings"]), *aligned(roofline_rows(result["roofline"])),
                         *([result["launch"]["text"]] if result["launch"] else [])]), flush=True)


def tables(result):
    """Markdown lines for benchmarks/tables.md from the content of fusion.json."""
    lines = [f"`{result['command']}`, {result['timestamp']}"]
    checks = []
    for name, part in result["compare"].items():
        if "error" in part:
            lines += ["", f"### {name}", "", f"failed: {part['error'].splitlines()[-1]}"]
            continue
        system = part["system_info"]
        commit = (system["git_commit"] or "unknown")[:7]
        lines += ["", f"### {name}", "", f"{system['gpu_name'] or system['host_cpu']}, torch "
                  f"{system['torch_version']}, commit {commit}, {part['training_params']['num_steps']} "
                  "interleaved steps.", "", *markdown(table(part["variants"]))]
        nothing = [f"{r['name']} ({r['speedup']:.2f}x)" for r in part["variants"][1:]
                   if r["measured"] and r["speedup_p20"] <= 1]
        lines += ["", "No gain shown (p20 of the paired speed-up at or below 1): "
                  f"{', '.join(nothing) or 'none'}."]
        checks += [dict(name=name, **row) for row in agreement(part)]
    keys = ("name", "variant", "launches", "plain_launches", "peak_mb", "lone_peak_mb", "verdict")
    if checks:
        lines += ["", "### Against independent counts", "", *markdown([
            ["shape", "variant", "launches", "plain profiler run", "peak MB", "lone run's MB", "verdict"],
            *([str(row[key]) for key in keys] for row in checks)])]
    for name, part in result["roofline"].items():
        if "error" not in part:
            commit = (part["system_info"]["git_commit"] or "unknown")[:7]
            lines += ["", f"### Roofline, {name}", "",
                      f"Commit {commit}. {ceiling_line(part['ceilings'])}", "",
                      *markdown(roofline_rows(part["roofline"])), "",
                      *([f"The step is {part['launch']['text']}.", ""] if part["launch"] else [])]
    return lines


BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def render(paths):
    """Replace what is between the markers in tables.md by the tables of result files."""
    page, parts = ROOT / "benchmarks" / "tables.md", []
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    for path in paths:
        try:
            parts.append("\n".join(tables(read_json(path))))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: no result of this program") from None
    body = "\n\n".join(parts)
    write_text(page, f"{before}{BEGIN}\n{body}\n{END}{after}")


def parse_shapes(text):
    words = [word.split(",") for word in text.split()]
    shapes = [tuple(map(int, word)) for word in words if len(word) == 3 and all(map(str.isdecimal, word))]
    if not words or len(shapes) < len(words) or any(min(shape) < 1 for shape in shapes):
        raise argparse.ArgumentTypeError(f'{text!r}: must be "B,S,N B,S,N ..."')
    return shapes


def child(part, flags):
    """Measure one part and print its result as the last line, as JSON."""
    _, settings, _ = parse(make_parser(PROGRAM), PROGRAM, flags)
    print(json.dumps(CHILDREN[part](settings)))
    return 0


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--child"]:
        return child(argv[1], argv[2:])
    parser = Parser(prog="measure_fusion.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="directory for fusion.json and logs")
    parser.add_argument("--render", metavar="JSON", nargs="+",
                        help="write the tables of these results into benchmarks/tables.md")
    parser.add_argument("--part", choices=("all", "compare", "roofline"), default="all",
                        help="(default: all)")
    parser.add_argument("--shapes", type=parse_shapes, default=parse_shapes(SHAPES), metavar='"B,S,N ..."',
                        help=f'(default: "{SHAPES}")')
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=list(PRECISIONS),
                        help="(default: all)")
    parser.add_argument("--steps", type=whole_number(), default=10,
                        help="timed steps of every variant (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(argv)
    if options.render:
        render(options.render)
        return 0
    if options.out is None:
        parser.error("--out is needed")
    require_directory(options.out)
    path, result = options.out / "fusion.json", dict(
        command=" ".join(["python benchmarks/measure_fusion.py", *sys.argv[1:]]),
        timestamp=time.strftime("%Y-%m-%d"), compare={}, roofline={})

    def save():
        write_json(path, result)
    if options.part in ("all", "compare"):
        compare_part(options, options.out, result["compare"], save)
    if options.part in ("all", "roofline"):
        roofline_part(options, options.out, result["roofline"], save)
    print(f"\n{path}: {path.stat().st_size / 1024:.0f} KB")
    failed = any("error" in part for kind in ("compare", "roofline") for part in result[kind].values())
    disagree = any(row["verdict"] == "DISAGREE" for part in result["compare"].values() if "error" not in part
                   for row in agreement(part))
    return int(failed or disagree)


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_fusion.py"))
