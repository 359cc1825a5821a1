#!/usr/bin/env python3
"""How good folds are on families never seen: each model that real_families.py trained for a fold of its
cross-validation folds the families that were held out from it.

    python benchmarks/real_families.py --data DIR [DIR ...] --out OUT --jobs 4 -- --use-amp
    python benchmarks/nested_folds.py --runs OUT [--jobs 8] [--recipe full] [--seeds 1 2] [--most 5]

The model runs on the GPU if there is one, folds are made on the CPU, two threads each. Writes OUT/folds.json
whenever a few families are done. What the same models folded is not folded again, so a call that was stopped
goes on. Prints TM-score and lDDT-CA for each data directory: medians of families over the means of seeds,
with 95% intervals by drawing families. The file has the line of pLDDT, too (measure_folds.py), fitted to one
fold of each family, of the first seed that has it.
"""
import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import numpy as np
import torch
from measure_folds import calibration, judged, known_enough, predicted, write_line
from real_families import RECIPES, at_once, chosen_step, interval

from fusion_lab.training.files import UserError, exit_code, finite, require_writable, write_json
from fusion_lab.training.flags import Parser, whole_number
from fusion_lab.training.locks import hold_file
from fusion_lab.training.machine import choose_device
from fusion_lab.training.models import read_model
from fusion_lab.training.reading import read_json
from proteins import files
from tiny_openfold_v2 import PROGRAM

EVERY = 5.0  # seconds between two writings of the results
TABLE = {"TM-score": ("tm_score", np.median), "lDDT-CA": ("lddt_ca", np.median),
         "TM > .5": ("above_half", np.mean), "right hand": ("right_hand", np.mean)}


def held_out(runs, recipe, seeds):
    """{(seed, family): model file that never saw the family}. Raises UserError."""
    found = {}
    for seed in seeds:
        pattern = f"{recipe} {seed} fold ".replace(" ", "-")
        for directory in sorted((runs / "runs").glob(f"{pattern}*")):
            if not (directory / "done").exists():
                continue
            names = chosen_step(read_json(directory / PROGRAM.result("performance_summary")))[1]
            path = directory / "best.pt"
            if seen := set(names) & set(read_model(path, PROGRAM).card["trained_on"]):
                raise UserError(f"{path}: was trained on {', '.join(sorted(seen))}, which it was to fold")
            found |= {(seed, name): path for name in names}
    if not found:
        raise UserError(f"--runs {runs}: no training of recipe {recipe} for a fold is done there")
    return found


def chosen(tasks, families, most):
    """Tasks of at most so many families of each model, the longest families first: they take longest."""
    taken, result = {}, {}
    for seed, name in sorted(tasks, key=lambda task: (-families[task[1]].length, task)):
        path = tasks[seed, name]
        taken[path] = taken.get(path, 0) + known_enough(families[name])
        if known_enough(families[name]) and (most is None or taken[path] <= most):
            result[seed, name] = path
    return result


@functools.cache
def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forget_other_models(known, tasks):
    """Drop what is known of these tasks by models that were replaced since."""
    for (seed, name), path in tasks.items():
        if known.get(f"{seed} {name}", {}).get("model") != digest(path):
            known.pop(f"{seed} {name}", None)


def fold_all(tasks, families, known, jobs, device, write):
    """Fold what is not in known, {"seed name": figures}, and put it there; write() now and then."""
    saved = functools.cache(lambda path: read_model(path, PROGRAM))
    context = multiprocessing.get_context("spawn")  # a GPU in use cannot be forked
    waiting, written = {}, time.monotonic()
    try:
        with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool, at_once(pool):
            for count, ((seed, name), path) in enumerate(tasks.items(), 1):
                if f"{seed} {name}" not in known:
                    given = predicted(saved(path), families[name], seed, device)
                    waiting[pool.submit(judged, families[name], *given, seed)] = f"{seed} {name}", path
                while waiting and (len(waiting) > 2 * jobs or count == len(tasks)):  # distograms are large
                    done = wait(waiting, return_when=FIRST_COMPLETED).done
                    for job in sorted(done, key=lambda job: job.exception() is not None):  # errors last
                        key, model = waiting.pop(job)
                        known[key] = found = dict(job.result(), model=digest(model))
                        print(f"{key:16} {found['residues']:4d} residues, TM-score {found['tm_score']:.3f}, "
                              f"{found['seconds']['folding']:.0f} s", flush=True)
                    if time.monotonic() > written + EVERY:
                        write()
                        written = time.monotonic()
    finally:
        write()


def table(known, group):
    """{directory: {figure: (value, 95% interval)}} of {"seed name": figures}, means over seeds first."""
    result = {}
    for directory in sorted(set(group.values())):
        by_family = {}
        for key, found in known.items():
            name = key.split(" ", 1)[1]
            if group[name] == directory:
                by_family.setdefault(name, []).append(found | dict(above_half=found["tm_score"] > 0.5))
        if by_family:
            result[directory] = dict(families=len(by_family), folds=sum(map(len, by_family.values())))
            for title, (key, statistic) in TABLE.items():
                values = [statistics.fmean(one[key] for one in found) for found in by_family.values()]
                result[directory][title] = float(statistic(values)), interval(values, statistic=statistic)
    return result


def one_of_each(known, seeds):
    """Figures of every family once: of the first of these seeds that has it."""
    found = {}
    for key in sorted(known, key=lambda key: seeds.index(int(key.partition(" ")[0]))):
        found.setdefault(key.partition(" ")[2], known[key])
    return list(found.values())


def print_table(result):
    print(f"{'':16}{'families':>9}" + "".join(f"{title:>20}" for title in TABLE))
    for directory, found in result.items():
        cells = ("{:.2f} [{:.2f}, {:.2f}]".format(found[title][0], *found[title][1]) for title in TABLE)
        print(f"{directory:16}{found['families']:9d}" + "".join(f"{cell:>20}" for cell in cells))


def main(argv=None):
    parser = Parser(prog="nested_folds.py", description=__doc__)
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="--out of real_families.py")
    parser.add_argument("--recipe", choices=RECIPES, default="full", help="(default: full)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--jobs", type=whole_number(), default=max((os.cpu_count() or 1) // 2, 1),
                        help="folds at a time, of two threads each (default: half of the CPU's cores)")
    parser.add_argument("--most", type=whole_number(),
                        help="families of each model, the longest (default: all)")
    parser.add_argument("--device", default="auto", help="of the model (auto)")
    parser.add_argument("--card", type=pathlib.Path, metavar="FILE", help="write the line of pLDDT into this "
                        "model's file, made by the same recipe")
    a = parser.parse_args(argv)
    out = a.runs / "folds.json"
    require_writable(out)
    if a.card and read_model(a.card, PROGRAM).card.get("recipe") != a.recipe:
        raise UserError(f"--card {a.card}: not made by recipe {a.recipe}")
    try:
        hold_file(out)
    except BlockingIOError:
        raise UserError(f"{out}: another call is writing it") from None
    device, tasks = choose_device(a.device), held_out(a.runs, a.recipe, a.seeds)
    families = {family.name: family for family in files.load_families(a.runs / "families")}
    group = {name: (a.runs / "families" / f"{name}.a3m").resolve().parent.name for name in families}
    tasks = chosen(tasks, families, a.most)
    before = read_json(out) if out.exists() else dict(recipe=a.recipe, families={})
    if before["recipe"] != a.recipe:
        raise UserError(f"{out}: is of recipe {before['recipe']}; move it away")
    known = before["families"]
    forget_other_models(known, tasks)
    result = dict(recipe=a.recipe, command=sys.argv, device=device.type, torch=torch.__version__,
                  date=time.strftime("%Y-%m-%d"), families=known)
    print(f"{len(tasks)} folds, {sum(f'{s} {n}' in known for s, n in tasks)} of them known", flush=True)
    fold_all(tasks, families, known, a.jobs, device, lambda: write_json(out, finite(result)))
    asked = {key: found for key, found in known.items()
             if int(key.partition(" ")[0]) in a.seeds and key.partition(" ")[2] in group}
    result["table"] = table(asked, group)
    each = one_of_each(asked, a.seeds)
    result["calibration"] = calibration(each) if len(each) > 1 else None
    write_json(out, finite(result))
    if a.card and result["calibration"] is None:
        raise UserError("--card: a line needs two families")
    if a.card:
        write_line(a.card, result["calibration"],
                   "each folded by a model of the same recipe that never saw it")
    print_table(result["table"])
    print(json.dumps(finite(result["table"])))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "nested_folds.py"))
