#!/usr/bin/env python3
"""Contact precision on protein families never seen in training, over all folds of a data directory.

    python benchmarks/real_families.py --data DIR --out OUT --steps 1500 --pretrain-steps 1500

Settings: from scratch; pre-trained on each synthetic world, then real; the pre-trained models as they are.
Every family is held out once. Writes OUT/real_families.json and prints a table; a run that fails is an error.
All other flags go to the trainer.
"""
import json
import pathlib
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

from fusion_lab.training.files import FAILED, UserError, exit_code, require_directory, write_json
from fusion_lab.training.flags import Parser, whole_number
from tiny_openfold_v2 import PROGRAM

WORLDS = ("paired", "covarying")


def train(directory, flags):
    """Run the trainer; returns its summary. Raises UserError."""
    require_directory(directory)
    command = [sys.executable, PROGRAM.file, "--profile-dir", *map(str, [directory, *flags])]
    log = directory / "run.log"
    with open(log, "w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{' '.join(command)}: exit {code}: {last} (all of it in {log})", code=FAILED)
    return json.loads((directory / PROGRAM.result("performance_summary")).read_text(encoding="utf-8"))


def held_out_scores(summaries):
    """({family: P(L/2) at the end}, {step: median P(L/2)}) over the held-out families of all folds."""
    by_step = {}  # step -> {family: P(L/2)}
    for summary in summaries:
        for step, groups in summary[PROGRAM.evaluation_name].items():
            scores = {name: protein["p_l2"] for name, protein in groups["held_out"].items()}
            by_step.setdefault(step, {}).update(scores)
    final = by_step.pop("final")
    return final, {int(step): statistics.median(by_step[step].values()) for step in sorted(by_step, key=int)}


def run_all(arguments, common, folds):
    """Pre-train, then train every setting on every fold; ({world: summary}, {(setting, fold): summary})."""
    runs = arguments.out / "runs"

    def pretrain(world):
        return train(runs / world, [
            *common, "--synthetic-world", world, "--num-steps", arguments.pretrain_steps,
            "--learning-rate", 1e-3, "--eval-every", 1000, "--save-checkpoint", runs / f"{world}.pt"])

    def fine_tune(setting, fold, steps):
        resume = []
        if setting in pretrained:
            pretrained[setting].result()
            resume, steps = ["--resume", runs / f"{setting}.pt"], steps + arguments.pretrain_steps
        return train(runs / f"{setting}-{steps}-{fold}", [
            *common, *resume, "--data", arguments.data, "--holdout", folds[fold], "--num-steps", steps,
            "--eval-every", 500, "--plot-contacts", arguments.out / f"contacts-{setting}-{steps}"])

    with ThreadPoolExecutor(arguments.jobs) as pool:
        pretrained = {world: pool.submit(pretrain, world) for world in WORLDS}
        jobs = {(setting, fold): pool.submit(fine_tune, setting, fold, arguments.steps)
                for setting in ("scratch", *WORLDS) for fold in range(len(folds))}
        jobs |= {(f"{world}, not tuned", fold): pool.submit(fine_tune, world, fold, 1)
                 for world in WORLDS for fold in range(len(folds))}
        return ({world: job.result() for world, job in pretrained.items()},
                {key: job.result() for key, job in jobs.items()})


def print_results(results, synthetic):
    for setting, found in results.items():
        print(f"{setting:22s} held-out P(L/2): median {found['median']:.3f}, mean {found['mean']:.3f} "
              f"({len(found['p_l2'])} families) by step {found['median_by_step']}")
    print("synthetic held-out P(L/2), mean:", json.dumps(synthetic))


def main(argv=None):
    parser = Parser(prog="real_families.py", description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="directory of families")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for results")
    parser.add_argument("--steps", type=whole_number(), default=3000, help="(default: %(default)s)")
    parser.add_argument("--pretrain-steps", type=whole_number(), default=3000, help="(default: %(default)s)")
    parser.add_argument("--folds", type=whole_number(2), default=4, help="(default: %(default)s)")
    parser.add_argument("--jobs", type=whole_number(), default=6, help="trainings at a time (default: 6)")
    arguments, common = parser.parse_known_args(argv)
    names = sorted({path.name.split(".")[0] for path in arguments.data.iterdir()})
    if len(names) < arguments.folds:
        parser.error(f"--data {arguments.data}: {len(names)} families, fewer than --folds {arguments.folds}")
    folds = [",".join(names[i::arguments.folds]) for i in range(arguments.folds)]
    pretrained, summaries = run_all(arguments, common, folds)
    results = {}
    for setting in dict.fromkeys(setting for setting, _ in summaries):
        final, by_step = held_out_scores([s for (name, _), s in summaries.items() if name == setting])
        results[setting] = dict(p_l2=final, median_by_step=by_step, median=statistics.median(final.values()),
                                mean=statistics.fmean(final.values()))
    synthetic = {world: {step: statistics.fmean(p["p_l2"] for p in groups["held_out"].values())
                         for step, groups in summary[PROGRAM.evaluation_name].items()}
                 for world, summary in pretrained.items()}
    print_results(results, synthetic)
    example = next(iter(summaries.values()))
    kept = {key: example[key] for key in ("config", "training_params", "system_info", "timestamp")}
    write_json(arguments.out / "real_families.json", dict(
        command=sys.argv, folds=folds, results=results, synthetic_held_out=synthetic, **kept))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "real_families.py"))
