#!/usr/bin/env python3
"""Contact precision on protein families never seen in training, by a protocol that cannot fool us.

    python benchmarks/real_families.py --data DIR [DIR ...] --out OUT --jobs 4 --gpus 4 -- --use-amp
    python benchmarks/real_families.py --data DIR --out OUT --recipes full scratch -- --batch-size 2
    python benchmarks/real_families.py --data DIR --out OUT --recipes folds --real-folds FILE

All families of all directories are one set. Relatives, found by alignment (proteins/homology.py), are always
in the same fold. For every recipe and seed: pre-train on synthetic proteins, then for every fold train on the
families outside of it, a tenth of which choose the step (validation); the families of the fold are looked at
at that step, whose weights are in runs/*/best.pt. MI-APC and mean-field DCA are computed here, from all rows
(at most 4,000) and from 512, which the alignment track reads. Writes OUT/real_families.json and learning.png,
prints a table with 95% intervals over families. Everything after -- goes to the trainer. Trainings that are
there already, made with the same flags, are kept: a second call goes on.
"""
import contextlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # yardsticks run side by side
import numpy as np
import torch

from fusion_lab.measuring.plotting import require_matplotlib, save
from fusion_lab.training.files import FAILED, UserError, exit_code, finite, require_directory, write_json
from fusion_lab.training.flags import Parser, whole_number
from fusion_lab.training.models import read_model, save_model
from proteins import contacts, files, homology, yardsticks
from proteins.evidence import learned_from
from tiny_openfold_v2 import PROGRAM

PRETRAIN = dict(synthetic_world="natural", num_steps=2500, learning_rate=1e-3, lr_schedule="cosine",
                lr_warmup_steps=100, ema_decay=0.999, eval_every=500)
TUNE = dict(num_steps=400, learning_rate=3e-4, lr_schedule="cosine", lr_warmup_steps=50, ema_decay=0.99,
            dropout=0.1, eval_every=100, validate_fraction=0.1)
MODEL = dict(num_seqs=128, seq_len=96, batch_size=4, coevolution="couplings", eval_seqs=512)
GIVEN = "--real-folds"  # stands for the file that is named by this option
FOLDS = dict(num_steps=5000, eval_every=1000)
FOLDS_TUNE = dict(num_steps=600, seq_len=128, eval_every=200)
RECIPES = {  # name: (what pre-training changes, None for none; what training changes; the model, in both)
    "full": ({}, {}, {}),
    "evoformer alone": ({}, {}, dict(coevolution="none")),
    "covariance": ({}, {}, dict(coevolution="covariance")),
    "scratch": (None, dict(num_steps=1500, eval_every=250, learning_rate=1e-3), {}),
    "world covarying": (dict(synthetic_world="covarying"), {}, {}),
    "no average": (dict(ema_decay=0), dict(ema_decay=0), {}),
    "constant rate": (dict(lr_schedule="constant"), dict(lr_schedule="constant"), {}),
    "half mixed": ({}, dict(num_steps=800, mix_synthetic=0.5, synthetic_world="natural"), {}),
    "not tuned": ({}, None, {}),
    # for structures: orientations, 8 blocks for 4, real chains among the folds, longer crops of families
    "folds": (FOLDS | dict(real_folds=GIVEN), FOLDS_TUNE, dict(orientations=True, num_blocks=8)),
}
ROWS = {"all": 4000, "512": 512}  # of the yardsticks


def train(directory, options, common, environment):
    """Run the trainer, unless its summary is there; returns the summary. Raises UserError."""
    summary = directory / PROGRAM.result("performance_summary")
    given = [word for name, value in options.items()
             for word in (f"--{name.replace('_', '-')}", *[str(value)] * (value is not True))]
    command = [sys.executable, PROGRAM.file, "--profile-dir", str(directory), *given, *common]
    flags = [word.replace(str(directory.parent.parent), "OUT") for word in command[2:]]
    if (directory / "done").exists():
        if json.loads((directory / "done").read_text(encoding="utf-8")).get("flags", flags) != flags:
            raise UserError(f"{directory}: made with other flags; take another --out")
    else:
        require_directory(directory)
        log, begun = directory / "run.log", time.time()
        with open(log, "w", encoding="utf-8") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False,
                                  env=os.environ | environment).returncode
        if code:
            last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
            raise UserError(f"{' '.join(command)}: exit {code}: {last} (all of it in {log})", code=FAILED)
        write_json(directory / "done", dict(seconds=time.time() - begun, flags=flags))
    seconds = json.loads((directory / "done").read_text(encoding="utf-8"))["seconds"]
    return json.loads(summary.read_text(encoding="utf-8")) | dict(seconds=seconds)


def chosen_step(summary):
    """(step that validation chose, held-out scores {family: precision} there)"""
    evaluations = summary[PROGRAM.evaluation_name]
    best = max(evaluations, key=lambda step: contacts.validation_score(evaluations[step]) or 0)
    return best, evaluations[best]["held_out"]


@contextlib.contextmanager
def at_once(pool):
    """An error or Ctrl-C does not wait for trainings that have not begun."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


class Runs:
    """All trainings of a call, some at a time, each on a GPU of its own in turn."""

    def __init__(self, arguments, folds):
        self.arguments, self.folds, self.pretrained = arguments, folds, {}
        self.places = itertools.cycle(range(arguments.gpus or 1))

    def environment(self):
        return dict(CUDA_VISIBLE_DEVICES=str(next(self.places))) if self.arguments.gpus else {}

    def pretrain(self, recipe, seed):
        before, _, model = RECIPES[recipe]
        directory = self.arguments.out / "runs" / f"{recipe} {seed}".replace(" ", "-")
        options = PRETRAIN | MODEL | model | before | dict(seed=seed, save_checkpoint=directory / "c.pt")
        options |= dict(real_folds=self.arguments.real_folds) if "real_folds" in before else {}
        return train(directory, options | self.arguments.steps(options), self.arguments.trainer,
                     self.environment())

    def tune(self, recipe, seed, fold):
        before, after, model = RECIPES[recipe]
        start, environment = {}, self.environment()
        directory = self.arguments.out / "runs" / f"{recipe} {seed} fold {fold}".replace(" ", "-")
        if before is not None:
            self.pretrained[source(recipe), seed].result()
            start = dict(init_from=directory.parent / f"{source(recipe)} {seed}".replace(" ", "-") / "c.pt")
        options = TUNE | MODEL | model | (dict(num_steps=1, learning_rate=0) if after is None else after)
        options |= dict(seed=seed, data=self.arguments.out / "families", holdout=",".join(self.folds[fold]),
                        save_best=directory / "best.pt")  # so that its held-out families can be folded
        return train(directory, options | self.arguments.steps(options) | start, self.arguments.trainer,
                     environment)

    def everything(self, recipe, seed, path):
        """Train a recipe on all families, a tenth of them for validation, and write the model file."""
        directory = self.arguments.out / "runs" / f"{recipe} {seed} model".replace(" ", "-")
        options = TUNE | MODEL | RECIPES[recipe][2] | RECIPES[recipe][1]
        options |= dict(seed=seed, data=self.arguments.out / "families", save_best=directory / "best.pt",
                        init_from=directory.parent / f"{source(recipe)} {seed}".replace(" ", "-") / "c.pt")
        summary = train(directory, options | self.arguments.steps(options), self.arguments.trainer,
                        self.environment())
        saved = read_model(directory / "best.pt", PROGRAM)
        given = self.arguments.real_folds
        before = {key: given.name if value is GIVEN else value for key, value in RECIPES[recipe][0].items()}
        known = [family for family in files.load_families(self.arguments.out / "families")
                 if family.name in saved.card["trained_on"]]
        card = dict(recipe=recipe, seed=seed, step=saved.card["step"], trained_on=saved.card["trained_on"],
                    sequences=learned_from(known),
                    seconds=summary["seconds"] + self.pretrained[source(recipe), seed].result()["seconds"],
                    device=summary["system_info"]["gpu_name"], torch=summary["system_info"]["torch_version"],
                    date=summary["timestamp"][:10], flags=self.arguments.trainer,
                    pretraining=PRETRAIN | MODEL | RECIPES[recipe][2] | before,
                    training=TUNE | RECIPES[recipe][1])
        save_model(path, PROGRAM, saved.weights, saved.config, card)
        print(f"Written: {path}")

    def run(self):
        """({(recipe, seed): summary}, {(recipe, seed, fold): summary})"""
        keys = list(itertools.product(self.arguments.recipes, self.arguments.seeds))
        with ThreadPoolExecutor(self.arguments.jobs) as pool, at_once(pool):
            for recipe, seed in keys:
                if RECIPES[recipe][0] is not None and (source(recipe), seed) not in self.pretrained:
                    self.pretrained[source(recipe), seed] = pool.submit(self.pretrain, source(recipe), seed)
            jobs = {(*key, fold): pool.submit(self.tune, *key, fold)
                    for key in keys for fold in range(len(self.folds))}
            return ({key: job.result() for key, job in self.pretrained.items()},
                    {key: job.result() for key, job in jobs.items()})


def source(recipe):
    """The recipe whose pre-training this one begins with: the first that does the same."""
    same = (name for name, (before, _, model) in RECIPES.items()
            if (before, model) == (RECIPES[recipe][0], RECIPES[recipe][2]))
    return next(same)


def link_families(directories, into):
    """One directory with the files of all of them; returns {family: directory}. Raises UserError."""
    require_directory(into)
    for path in into.iterdir():  # of an earlier call
        path.unlink()
    if len({directory.resolve().name for directory in directories}) < len(directories):
        raise UserError("--data: two directories of the same name")
    group = {}
    for directory in directories:
        for family in files.load_families(directory):
            if group.setdefault(family.name, directory.resolve().name) != directory.resolve().name:
                raise UserError(f"--data: {family.name} is in two directories")
        for path in directory.iterdir():
            if path.is_file() and not (into / path.name).exists():
                (into / path.name).symlink_to(path.resolve())
    return group


def folds_of(families, number):
    """Clusters of relatives dealt to folds, the largest first, each to the fold that has fewest families."""
    folds = [[] for _ in range(number)]
    order = np.random.default_rng(0).permutation(len(families))
    for cluster in sorted(homology.clusters([families[i] for i in order]), key=len, reverse=True):
        min(folds, key=len).extend(cluster)
    return [sorted(fold) for fold in folds]


def yardstick(family):
    """{method and rows: its precision} of one family."""
    seen = np.isfinite(family.coords[:, 0])
    coords, mask = torch.from_numpy(np.nan_to_num(family.coords)), torch.from_numpy(seen).float()
    found = {}
    for rows, most in ROWS.items():
        msa = yardsticks.some_rows(family.msa, most)
        weights = yardsticks.sequence_weights(msa)
        for method, scores in (("MI-APC", yardsticks.mutual_information(msa, weights)),
                               ("mean-field DCA", yardsticks.mean_field_dca(msa, weights=weights))):
            scores = torch.from_numpy(scores)
            far = contacts.contact_precision(scores, coords, mask, contacts.LONG_RANGE)["p_l2"]
            found[f"{method}, {rows} rows"] = dict(contacts.contact_precision(scores, coords, mask),
                                                   p_l2_long=far)
    return family.name, found


def interval(values, seed=0, statistic=np.median):
    """95% of the medians, or another statistic, of families drawn with replacement."""
    drawn = np.random.default_rng(seed).choice(values, (2000, len(values)))
    return np.quantile(statistic(drawn, axis=1), [0.025, 0.975]).tolist()


def table(scores, group):
    """{method: {directory: figures}} of {method: {family: precision, mean over seeds}}."""
    result = {}
    for method, by_family in scores.items():
        result[method] = {}
        for directory in dict.fromkeys(group.values()):
            families = [name for name in by_family if group[name] == directory]
            values = [by_family[name]["p_l2"] for name in families]
            far = [by_family[name]["p_l2_long"] for name in families
                   if by_family[name]["p_l2_long"] is not None]
            result[method][directory] = dict(
                families=len(values), median=statistics.median(values), mean=statistics.fmean(values),
                interval=interval(values), median_long=statistics.median(far) if far else None)
    return result


def print_table(result):
    for method, by_directory in result.items():
        cells = [f"{directory} {found['median']:.3f} [{found['interval'][0]:.2f}, {found['interval'][1]:.2f}]"
                 f" long {found['median_long'] or 0:.3f}" for directory, found in by_directory.items()]
        print(f"{method:26s} {' | '.join(cells)}")


def curve(summary):
    """[(seconds of steps, mean P(L/2) of what was held out)] of one run."""
    step = summary["performance_summary"]["median_batch_time"]
    return [(int(number) * step, statistics.fmean(p["p_l2"] for p in groups["held_out"].values()))
            for number, groups in summary[PROGRAM.evaluation_name].items() if number != "final"]


def draw(path, pretrained, tuned):
    """Precision against seconds, without start and compilation: means over runs, point by point."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    titles = "pre-training: synthetic, never seen", "then real families, never seen"
    for axis, title, runs in zip(axes, titles, (pretrained, tuned), strict=True):
        for recipe in dict.fromkeys(name for name, *_ in runs):
            found = [curve(summary) for (name, *_), summary in runs.items() if name == recipe]
            points = np.mean(found, axis=0)  # (evaluations, 2)
            if points.size:
                axis.plot(*points.T, "o-", markersize=4, label=f"{recipe} ({len(found)} runs)")
        axis.set(xlabel="seconds of steps", title=title, ylim=(0, 1))
        axis.legend()
    axes[0].set(ylabel="P(L/2), mean")
    save(figure, str(path))
    pyplot.close(figure)


def averaged(precisions):
    """Means over seeds of [{"p_l2": ...}]."""
    return {key: statistics.fmean(values) if None not in (values := [p[key] for p in precisions]) else None
            for key in precisions[0]}


def parse(argv):
    parser = Parser(prog="real_families.py", description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, nargs="+", required=True, help="directories of families")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for results")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["full"], metavar="NAME",
                        help=f"of {', '.join(RECIPES)} (default: full)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--folds", type=whole_number(0), default=5,
                        help="0: none, only --model (default: 5)")
    parser.add_argument("--model", type=pathlib.Path, metavar="FILE", help="train the first recipe, with the "
                        "first seed, on all families too, and write that model (default: no)")
    parser.add_argument("--jobs", type=whole_number(), default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--gpus", type=whole_number(), help="GPUs to spread them over (default: any)")
    parser.add_argument("--most-steps", type=whole_number(), help="cut every training to so many: a trial")
    parser.add_argument("--real-folds", type=pathlib.Path, metavar="FILE",
                        help="real chains, for recipes that pre-train on them (docs/learning.md)")
    parser.add_argument("trainer", nargs="*", help="flags of the trainer, after --")
    arguments = parser.parse_args(argv)
    if arguments.model and None in RECIPES[arguments.recipes[0]][:2]:
        parser.error(f"argument --model: recipe {arguments.recipes[0]} has no pre-training or no training")
    needing = [name for name in arguments.recipes if GIVEN in (RECIPES[name][0] or {}).values()]
    if needing and arguments.real_folds is None:
        parser.error(f"argument --recipes: {needing[0]} needs --real-folds FILE")
    arguments.steps = lambda options: cut(options, arguments.most_steps) if arguments.most_steps else {}
    return arguments


def cut(options, most):
    """Options that end a training after `most` steps; its warm-up must be shorter."""
    steps = min(options["num_steps"], most)
    return dict(num_steps=steps, lr_warmup_steps=min(options["lr_warmup_steps"], steps - 1))


def main(argv=None):
    arguments = parse(argv)
    require_directory(arguments.out)
    group = link_families(arguments.data, arguments.out / "families")
    families = files.load_families(arguments.out / "families")
    if arguments.folds == 1 or len(families) < arguments.folds:
        raise UserError(f"--folds {arguments.folds}: must be 0, or from 2 to {len(families)}, the families")
    folds = folds_of(families, arguments.folds) if arguments.folds else []
    parts = f" in folds of {', '.join(str(len(fold)) for fold in folds)}" if folds else ""
    print(f"{len(families)} families{parts}", flush=True)
    runs = Runs(arguments, folds)
    with ProcessPoolExecutor(os.cpu_count() // 2 or 1) as pool:
        rulers = pool.map(yardstick, families if folds else [])
        pretrained, tuned = runs.run()
        rulers = dict(rulers)
    if arguments.model:
        runs.everything(arguments.recipes[0], arguments.seeds[0], arguments.model)
    if folds:
        write_results(arguments, group, rulers, folds, pretrained, tuned)
    return 0


def write_results(arguments, group, rulers, folds, pretrained, tuned):
    scores = {method: {name: found[method] for name, found in rulers.items()}
              for method in next(iter(rulers.values()))}
    for recipe in arguments.recipes:
        found = [chosen_step(tuned[recipe, seed, fold])[1] for seed in arguments.seeds
                 for fold in range(len(folds))]
        scores[recipe] = {name: averaged([part[name] for part in found if name in part]) for name in group
                          if any(name in part for part in found)}
    result = table(scores, group)
    print_table(result)
    example = next(iter(tuned.values()))
    write_json(arguments.out / "real_families.json", finite(dict(
        command=sys.argv, folds=folds, table=result, by_family=scores,
        steps={" ".join(map(str, key)): chosen_step(summary)[0] for key, summary in tuned.items()},
        seconds={" ".join(map(str, key)): summary["seconds"]
                 for key, summary in [*pretrained.items(), *tuned.items()]},
        **{key: example[key] for key in ("config", "training_params", "system_info", "timestamp")})))
    if find_spec("matplotlib"):
        draw(arguments.out / "learning.png", pretrained, tuned)


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "real_families.py"))
