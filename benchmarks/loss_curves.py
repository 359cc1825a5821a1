#!/usr/bin/env python3
"""Does the fastest setting still learn the same? The same training in several settings, side by side.

    python benchmarks/loss_curves.py --out OUT [--steps 500] [--seeds 42 43] [-- flags of the trainer]

Runs every setting with every seed, all at once on a GPU, else one after the other (it times nothing), and
writes OUT/loss_curves.json, OUT/loss_curves.png (where matplotlib is installed) and a table: the mean loss
of the last tenth of the steps, and P(L/2) on held-out synthetic proteins by step. A run that fails ends it.
"""
import json
import pathlib
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import torch

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.training.files import UserError, exit_code, write_json
from fusion_lab.training.flags import Parser, whole_number
from tiny_openfold_v2 import PROGRAM

SETTINGS = {
    "baseline fp32": "--disable-all-fusion",
    "baseline bf16": "--disable-all-fusion --use-amp --amp-dtype bfloat16",
    "everything bf16": "--enable-all-fusion --use-amp --amp-dtype bfloat16",
    "ultra bf16": "--enable-ultra --use-amp --amp-dtype bfloat16",
}
OWN = {"--seed", "--num-steps", "--log-every", "--profile-dir"}
STEP_LINE = re.compile(r"^Step +(\d+)/\d+ \| Loss: +([-\d.naif]+)", re.MULTILINE)


def train(name, seed, arguments):
    """One training; {"losses": {step: loss}, "p_l2": {step: mean over held-out proteins}}."""
    directory = arguments.out / "runs" / f"{name.replace(' ', '_')}_{seed}"
    flags = [*SETTINGS[name].split(), "--seed", seed, "--num-steps", arguments.steps, "--log-every", 5,
             "--eval-every", max(arguments.steps // 5, 1), "--profile-dir", directory, *arguments.flags]
    done = subprocess.run([sys.executable, PROGRAM.file, *map(str, flags)],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise UserError(f"{name}, seed {seed}: exit {done.returncode}: {last}", code=done.returncode)
    path = directory / PROGRAM.result("performance_summary")
    summary = json.loads(path.read_text(encoding="utf-8"))
    evaluations = {str(arguments.steps) if step == "final" else step: statistics.fmean(
        protein["p_l2"] for protein in groups["held_out"].values())
        for step, groups in summary[PROGRAM.evaluation_name].items()}
    return dict(name=name, seed=seed, flags=list(map(str, flags)), p_l2=evaluations,
                system_info=summary["system_info"],
                losses={int(step): float(loss) for step, loss in STEP_LINE.findall(done.stdout)})


def tail(run, steps):
    """Mean loss of the last tenth of the steps."""
    return statistics.fmean(loss for step, loss in run["losses"].items() if step > 0.9 * steps)


def draw(runs, path):
    """The losses of all runs as curves. Raises UserError where matplotlib is missing."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, name in enumerate(SETTINGS):
        for run in (run for run in runs if run["name"] == name):
            steps, losses = zip(*run["losses"].items(), strict=True)
            label = name if run["seed"] == runs[0]["seed"] else None
            axes.plot(steps, losses, color=f"C{number}", lw=0.9, label=label)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend()
    figure.savefig(path, dpi=110)


def main(argv=None):
    parser = Parser(prog="loss_curves.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for results")
    parser.add_argument("--steps", type=whole_number(), default=500, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=whole_number(0), nargs="+", default=[42, 43],
                        help="(default: 42 43)")
    parser.add_argument("flags", nargs="*", help="flags of the trainer for every run, after --")
    arguments = parser.parse_args(argv)
    if own := OWN.intersection(word.partition("=")[0] for word in arguments.flags):
        parser.error(f"flag {min(own)} after --: this program sets it itself")
    with ThreadPoolExecutor(8 if torch.cuda.is_available() else 1) as pool:
        runs = list(pool.map(lambda job: train(*job, arguments),
                             [(name, seed) for name in SETTINGS for seed in arguments.seeds]))
    for run in runs:
        run["tail_loss"] = tail(run, arguments.steps)
        print(f"{run['name']:16s} seed {run['seed']:3d}  loss {run['tail_loss']:.4f}  held-out P(L/2) "
              + "  ".join(f"{step}: {value:.3f}" for step, value in sorted(
                  run["p_l2"].items(), key=lambda item: int(item[0]))))
    result = dict(command=" ".join(["python benchmarks/loss_curves.py", *sys.argv[1:]]),
                  date=time.strftime("%F"), steps=arguments.steps, runs=runs)
    write_json(arguments.out / "loss_curves.json", result)
    try:
        draw(runs, arguments.out / "loss_curves.png")
    except UserError as error:
        print(f"no picture: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "loss_curves.py"))
