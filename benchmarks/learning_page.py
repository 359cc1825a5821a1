#!/usr/bin/env python3
"""Precision against seconds, from the runs of real_families.py, as a picture.

    python benchmarks/learning_page.py --runs OUT/runs --out benchmarks/results/learning_h200.png

Left: pre-training, contact precision on synthetic proteins never seen. Right: training on real families, mean
over the families of all folds and seeds, never seen. Seconds are steps times the median step; without
start and compilation, and runs that shared a GPU are slower than alone.
"""
import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.measuring.plotting import require_matplotlib, save
from fusion_lab.training.files import UserError, exit_code
from fusion_lab.training.flags import Parser

RECIPES = ("full", "evoformer-alone", "scratch", "half-mixed")


def curve(directory):
    """[(seconds, mean P(L/2) of what was held out)] of one run."""
    summary = json.loads(next(directory.glob("performance_summary_*.json")).read_text(encoding="utf-8"))
    step = summary["performance_summary"]["median_batch_time"]
    return [(int(number) * step, statistics.fmean(p["p_l2"] for p in groups["held_out"].values()))
            for number, groups in summary["contact_precision"].items() if number != "final"]


def averaged(curves):
    """Point by point."""
    return [tuple(map(statistics.fmean, zip(*points, strict=True))) for points in zip(*curves, strict=False)]


def main(argv=None):
    parser = Parser(prog="learning_page.py", description=__doc__)
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="directory of the runs")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the picture, PNG")
    arguments = parser.parse_args(argv)
    if not any(arguments.runs.glob("*-[0-9]/performance_summary_*.json")):
        raise UserError(f"--runs {arguments.runs}: no finished runs")
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, pattern, title in zip(axes, ("{}-[0-9]", "{}-[0-9]-fold-[0-9]"), (
            "pre-training: synthetic, never seen", "then real families, never seen"), strict=True):
        for recipe in RECIPES:
            found = [curve(path) for path in sorted(arguments.runs.glob(pattern.format(recipe)))]
            if found:
                axis.plot(*zip(*averaged(found), strict=True), "o-", markersize=4,
                          label=f"{recipe} ({len(found)} runs)")
        axis.set(xlabel="seconds of steps", title=title, ylim=(0, 1))
        axis.legend()
    axes[0].set(ylabel="P(L/2), mean")
    save(figure, str(arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "learning_page.py"))
