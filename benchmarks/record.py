#!/usr/bin/env python3
"""Check a candidate by the rules of benchmarks/RECORDS.md, and print its row of the table.

    python benchmarks/record.py step --out OUT --record ../record -- --use-amp --amp-dtype bfloat16 ...
    python benchmarks/record.py learn --out OUT --data families -- --coevolution couplings --num-steps 300

What follows -- are the candidate's flags of tiny_openfold_v2.py. "step" times a training step at both sizes,
and beside the code of the record if --record names its checkout. "learn" trains with three seeds and adds up
the time of all steps. Writes OUT/record.json. Exit code 1 if a rule is broken, 2 for flags that the rules
forbid, 4 if "step" has no GPU (--quick tries a tiny size on a CPU).
"""
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from statistics import fmean, median

from script import ROOT, begin, gpu_or_trial, parser_of, write_result

begin(__name__, "torch")

import torch
from measure_ladder import SHAPES, TINY, ULTRA, checkout, compared, measured, summary_of

from fusion_lab.measuring.accuracy import compare_numerics
from fusion_lab.training.errors import UserError, exit_code
from fusion_lab.training.flags import make_parser, parse
from fusion_lab.training.machine import choose_device, system_info
from tiny_openfold.proteins.coevolution import mean_field_dca
from tiny_openfold.proteins.contacts import contact_precision
from tiny_openfold.proteins.files import load_families
from tiny_openfold.proteins.prediction import YARDSTICK_ROWS, some_rows
from tiny_openfold_v2 import PROGRAM

SIZES = ("B4 S64 N16", "B1 S256 N64")
FREE = ("use_amp", "amp_dtype", "use_tf32", "device")  # what a step may choose beside its fusions
LOSS_TOLERANCE = 2e-3  # of the mean loss of 200 steps: precisions differ by 7e-4, seeds by 15e-3
SEEDS = ("1", "2", "3")
AS_ALL = ("--eval-every", "1000000", "--log-every", "10")  # data is loaded during both, but their time is not
HELD_OUT = "1AQT_A,1CZP_A,1GN0_A,1MVO_A,1T8K_A,1UCS_A,1Z2U_A,2EVB_A,2O9S_A,2QLC_A"


def step(asked, settings):
    """(cells of the row, figures for the file, broken rules) of a training step."""
    default = PROGRAM.settings()
    learning = replace(settings.training, **{name: getattr(default.training, name) for name in FREE})
    if (settings.model, learning) != (default.model, default.training):
        raise UserError("a record keeps the default model and learning: choose only fusions and precision")
    flags = {" (candidate)": asked.flags, " (record)": ULTRA.split()}
    roots = {" (candidate)": ROOT} | ({" (record)": asked.record} if asked.record else {})
    shapes = [TINY] if asked.quick else [SHAPES[name] for name in SIZES]
    timed, compared_steps = (2, 5) if asked.quick else (30, 200)
    rows = [row for sizes in shapes for row in measured(
        [(sizes + label, root, flags[label] + sizes.split()) for label, root in roots.items()], timed)]
    print(*compared(rows, list(roots)), sep="\n")
    mine = [row for row in rows if row["name"].endswith(" (candidate)")]
    broken = [row.get("failed") or row["failures"][0] for row in rows if not row.get("accurate")]
    if broken:
        return [], rows, broken
    plain = ["--disable-all-fusion", "--device", settings.training.device]
    runs = [summary_of([*chosen, *shapes[0].split(), "--num-steps", str(compared_steps)])
            for chosen in (plain, asked.flags)]
    losses = [run["performance_summary"]["avg_loss"] for run in runs]
    print("mean loss of {} steps: {:.4f} in plain float32, {:.4f}".format(compared_steps, *losses))
    if not abs(losses[1] / losses[0] - 1) <= LOSS_TOLERANCE:
        broken.append(f"the mean losses differ by more than {LOSS_TOLERANCE:.1%}")
    return ["{median_ms:.2f} ({p20_ms:.2f}, {p80_ms:.2f})".format(**row) for row in mine], rows, broken


def dca_precision(data, names):
    """Mean P(L/2) of mean-field DCA on these families of a directory. UserError where one is missing."""
    found, families = [], {protein.name: protein for protein in load_families(data)[0]}
    if missing := [name for name in names if name not in families]:
        raise UserError(f"{data}: lacks {', '.join(missing)}; RECORDS.md says how the directory is made")
    for protein in map(families.get, names):
        coords = torch.from_numpy(protein.coords)
        scores = mean_field_dca(some_rows(protein.msa, YARDSTICK_ROWS))
        found.append(contact_precision(scores, coords.nan_to_num(), coords.isfinite().all(dim=1))["p_l2"])
    return fmean(found)


def learn(asked, settings):
    """(cells of the row, figures for the file, broken rules) of training until DCA is passed."""
    if settings.training.init_from or settings.training.resume:
        raise UserError("--init-from and --resume begin with weights whose training would not be counted")
    broken, runs = compare_numerics(PROGRAM, settings, choose_device(settings.training.device))[1], []
    if broken:
        return [], runs, broken[:3]
    dca = dca_precision(asked.data, HELD_OUT.split(","))
    for seed in SEEDS:
        found = summary_of([*asked.flags, *AS_ALL, "--data", asked.data, "--holdout", HELD_OUT,
                            "--seed", seed])
        figures, families = found["performance_summary"], found["evaluation"]["final"]["held_out"]
        runs.append(dict(seed=seed, seconds=figures["total_samples"] / figures["avg_training_speed"], dca=dca,
                         p_l2=fmean(family["p_l2"] for family in families.values()), families=families))
        print("seed {seed}: {seconds:.2f} s, P(L/2) {p_l2:.3f}, DCA {dca:.3f}".format(**runs[-1]), flush=True)
    seconds, least = sorted(run["seconds"] for run in runs), min(run["p_l2"] for run in runs)
    if not least > dca:
        broken.append("P(L/2) is not above DCA's with every seed")
    return [f"{median(seconds):.2f} ({seconds[0]:.2f}, {seconds[-1]:.2f})", f"{least:.3f}"], runs, broken


def main(argv=None):
    parser = parser_of(__file__, __doc__, required=True, quick="step: a tiny size, to try it on a CPU")
    parser.usage = "%(prog)s [options] {step,learn} -- FLAGS"
    parser.add_argument("track", choices=("step", "learn"))
    parser.add_argument("--record", type=checkout, help="step: checkout of the record, timed with the"
                        f" flags {ULTRA} (default: none)")
    parser.add_argument("--data", type=os.path.abspath, help="learn: directory of families of RECORDS.md")
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    asked = parser.parse_args(argv[:end])
    asked.flags = argv[end + 1:]
    settings = parse(make_parser(PROGRAM), PROGRAM, asked.flags)[1]
    if asked.track == "learn" and not asked.data:
        parser.error("learn needs --data")
    if asked.track == "step":
        gpu_or_trial(asked.quick)
    device = choose_device(settings.training.device)
    cells, figures, broken = (step if asked.track == "step" else learn)(asked, settings)
    write_result(asked.out / "record.json", device, broken=broken, rows=figures)
    if broken:
        print("Refused:", *broken, sep="\n")
        return 1
    system = system_info(device)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode == 1
    commit = (system["git_commit"] or "no commit")[:7] + ", changed" * changed
    print("", time.strftime("%F"), f"`{shlex.join(asked.flags)}`", commit,
          system["gpu_name"] or system["host_cpu"], *cells, "", sep=" | ")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "record.py"))
