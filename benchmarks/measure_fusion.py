#!/usr/bin/env python3
"""What every fusion buys on one GPU, over shapes and precisions; and do the figures agree with other counts.

    python benchmarks/measure_fusion.py --out OUT              # everything, some minutes
    python benchmarks/measure_fusion.py --out OUT --part compare --shapes "4,64,16" --precisions fp32
    python benchmarks/measure_fusion.py --render benchmarks/results/fusion.json   # tables into README.md

Every pair of shape and precision is a process of its own; its variants are interleaved. With --jobs N, N of
them compile, warm up and count at the same time, and are then timed one by one, alone on the GPU, whose
memory they share until then. Writes OUT/fusion.json after each; --render puts its tables, and those of
further files, between the markers of benchmarks/README.md, so that no table is typed by hand.
"""
import argparse
import contextlib
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

PRECISIONS = {"fp32": [], "tf32": ["--use-tf32"], "bf16": ["--use-amp", "--amp-dtype", "bfloat16"]}
SHAPES = "4,64,16 2,128,32 1,256,64"
SMALL_MODEL = "--msa-dim 16 --pair-dim 16 --msa-heads 2 --pair-heads 2 --outer-product-dim 4 --num-blocks 1"
CHECKED = ("baseline", "all")


def trainer_flags(shape, precision, options):
    b, s, n = shape
    flags = ["--batch-size", b, "--seq-len", s, "--num-seqs", n, "--num-steps", options.steps,
             "--warmup-steps", 3, *PRECISIONS[precision]]
    return [*map(str, flags), *(SMALL_MODEL.split() if options.quick else [])]


# --------------------------------------------------------------------------------------------------------
# In a process of its own
# --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_turn():
    """Say "ready" to the parent and wait until it is this process's turn on the GPU."""
    print("ready", flush=True)
    sys.stdin.readline()
    yield


def count_kernels_in_a_trace(trainer, batch):
    """Kernels of one step by the exported trace of a plain profiler run, or None on CPU."""
    import torch
    if trainer.device.type != "cuda":
        return None
    with torch.profiler.profile() as profiler:
        trainer.step(batch)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            return sum(e.get("cat") == "kernel" for e in json.load(file)["traceEvents"])


def compare_child(flags):
    """A comparison of all variants, with kernels counted once more, as one line of JSON."""
    from fusion_lab.measuring import comparison
    from fusion_lab.training.feeding import to_device
    from fusion_lab.training.flags import make_parser, parse
    from fusion_lab.training.machine import choose_device
    from proteins.batches import open_source
    _, (config, training, fusion, _), _ = parse(make_parser(), flags)
    variants = comparison.comparison_variants(config, fusion, training, choose_device(training.device))
    if not training.use_amp:  # the ladder above torch.compile is for mixed precision; it takes minutes
        variants = [v for v in variants if not v.name.startswith("+")]
    result = comparison.compare(config, fusion, training, variants=variants, gate=own_turn())
    batch = to_device(open_source(config, training).batch(0), variants[0].trainer.device)
    result["plain_profiler_launches"] = {v.name: count_kernels_in_a_trace(v.trainer, batch)
                                         for v in variants if v.name in CHECKED and v.reason is None}
    print(json.dumps(result), flush=True)


def roofline_child(flags):
    """A session with roofline, and predictions against measurement, as one line of JSON."""
    from fusion_lab.measuring.predictions import predict_mode
    from fusion_lab.profiler.session import finite, run_session
    from fusion_lab.training.flags import parse
    from run_pytorch_profiler import make_parser
    with own_turn(), tempfile.TemporaryDirectory() as directory:
        options, configs, _ = parse(make_parser(), flags)
        options.roofline = options.check_prediction = True
        analysis = run_session(configs, directory, options)
        checks = predict_mode(configs, options)["checks"]
    kept = ("ceilings", "roofline", "coverage", "launch", "findings", "step", "sublayers", "kinds",
            "launches_per_step", "memory_peak_mb", "config", "training_params", "fusion_config",
            "system_info")
    print(json.dumps(finite(dict({key: analysis[key] for key in kept}, checks=checks,
                                          kernels=analysis["kernels"][:20]))), flush=True)


# --------------------------------------------------------------------------------------------------------
# The parent
# --------------------------------------------------------------------------------------------------------


class Child:
    """A process that gets ready, waits for its turn, and prints its result as its last line."""

    def __init__(self, mode, flags, out, name):
        self.log = open(out / f"{name}.log", "w+", encoding="utf-8")  # noqa: SIM115
        command = [sys.executable, os.path.abspath(__file__), "--child", mode, *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True,
                                        env={"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ})

    def wait_until_ready(self):
        for line in self.process.stdout:
            if line.strip() == "ready":
                return

    def take_turn(self):
        """The result; or dict(error=the log's last lines)."""
        with contextlib.suppress(OSError):
            self.process.stdin.write("go\n")
            self.process.stdin.close()
        lines = self.process.stdout.read().splitlines()
        if self.process.wait() == 0 and lines:
            return json.loads(lines[-1])
        self.log.seek(0)
        return dict(error=self.log.read()[-800:])


def lone_run(flags, out, name):
    """Start the trainer by itself; its summary's peak is the max_memory_allocated of a lone run."""
    command = [sys.executable, str(ROOT / "tiny_openfold_v2.py"), *flags, "--profile-dir", str(out / name)]
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
    todo = [(f"B{b} S{s} N{n} {p}", trainer_flags((b, s, n), p, options))
            for b, s, n in options.shapes for p in options.precisions]
    for first in range(0, len(todo), options.jobs):
        started, pairs = time.monotonic(), dict(todo[first:first + options.jobs])
        files = {name: re.sub(r"\W+", "_", name) for name in pairs}
        children = {name: Child("compare", flags, out, files[name]) for name, flags in pairs.items()}
        for child in children.values():
            child.wait_until_ready()
        print(f"{len(children)} processes warm after {time.monotonic() - started:.0f} s", flush=True)
        for name, child in children.items():
            results[name] = child.take_turn()
            save()
        alone = {(name, variant): lone_run([*flags, *more], out, f"{files[name]}_{variant}")
                 for name, flags in pairs.items()
                 for variant, more in (("baseline", ["--disable-all-fusion"]), ("all", []))}
        for (name, variant), process in alone.items():
            results[name].setdefault("lone_run_peak_mb", {})[variant] = lone_peak(process)
        save()
        for name in pairs:
            print_comparison(name, results[name])


def print_comparison(name, result):
    from fusion_lab.measuring.comparison import table
    from fusion_lab.measuring.tables import aligned
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
        if entry["name"] not in CHECKED or not entry["measured"]:
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
    """Fill results, {shape and precision: session with roofline and predictions}, for the first and the last
    shape, and save() after each."""
    from fusion_lab.measuring.tables import aligned
    from fusion_lab.profiler.report import ceiling_line, prediction_rows, roofline_rows
    shapes = options.shapes
    chosen = {f"B{s[0]} S{s[1]} N{s[2]} {p}": (s, p) for s in (shapes[0], shapes[-1])
              for p in (options.precisions[0], options.precisions[-1])}
    for name, pair in chosen.items():
        if options.part == "all" and pair[1] != options.precisions[-1]:
            continue
        label = "roofline_" + re.sub(r"\W+", "_", name)
        child = Child("roofline", trainer_flags(*pair, options), out, label)
        child.wait_until_ready()
        results[name] = result = child.take_turn()
        save()
        print(f"\n{name}: roofline and predictions")
        if "error" in result:
            print(result["error"])
            continue
        print("\n".join([ceiling_line(result["ceilings"]), *aligned(roofline_rows(result["roofline"])),
                         *aligned(prediction_rows(result["checks"])), result["launch"]["text"]]), flush=True)


# --------------------------------------------------------------------------------------------------------
# Tables for README.md
# --------------------------------------------------------------------------------------------------------


def tables(result):
    """Markdown lines for benchmarks/README.md from the content of fusion.json."""
    from fusion_lab.measuring.comparison import table
    from fusion_lab.measuring.tables import markdown
    from fusion_lab.profiler.report import ceiling_line, prediction_rows, roofline_rows
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
                      f"The step is {part['launch']['text']}.", "",
                      f"### Predictions, {part['ceilings']['dtype']}", "",
                      *markdown(prediction_rows(part["checks"]))]
    return lines


BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def render(paths):
    """Replace what is between the markers in README.md by the tables of result files."""
    from fusion_lab.training.files import UserError
    readme, parts = ROOT / "benchmarks" / "README.md", []
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    for path in paths:
        try:
            parts.append("\n".join(tables(json.loads(pathlib.Path(path).read_text(encoding="utf-8")))))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: no result of this program") from None
    body = "\n\n".join(parts)
    readme.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")


def parse_shapes(text):
    words = [word.split(",") for word in text.split()]
    shapes = [tuple(map(int, word)) for word in words if len(word) == 3 and all(map(str.isdecimal, word))]
    if not words or len(shapes) < len(words) or any(min(shape) < 1 for shape in shapes):
        raise argparse.ArgumentTypeError(f'{text!r}: must be "B,S,N B,S,N ..."')
    return shapes


def main(argv=None):
    if sys.argv[1:2] == ["--child"]:
        {"compare": compare_child, "roofline": roofline_child}[sys.argv[2]](sys.argv[3:])
        return
    from fusion_lab.training.flags import Parser, whole_number
    parser = Parser(prog="measure_fusion.py", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="directory for fusion.json and logs")
    parser.add_argument("--render", metavar="JSON", nargs="+",
                        help="write the tables of these results into benchmarks/README.md")
    parser.add_argument("--part", choices=("all", "compare", "roofline"), default="all")
    parser.add_argument("--shapes", type=parse_shapes, default=parse_shapes(SHAPES), metavar='"B,S,N ..."')
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--jobs", type=whole_number, default=1,
                        help="comparisons that get ready at the same time (default: 1)")
    parser.add_argument("--steps", type=whole_number, default=10, help="timed steps of every variant")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(argv)
    if options.render:
        render(options.render)
        return
    if options.out is None:
        parser.error("--out is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    result = dict(command=" ".join(["python benchmarks/measure_fusion.py", *sys.argv[1:]]),
                  timestamp=time.strftime("%Y-%m-%d"), compare={}, roofline={})
    from fusion_lab.training.files import write_json
    path = options.out / "fusion.json"

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
    from fusion_lab.training.files import exit_code
    sys.exit(exit_code(main, None, "measure_fusion.py"))
