"""How a run went: every step's loss, learning rate and gradient norm, and every evaluation, in metrics.jsonl,
and as a picture, where matplotlib is installed."""
import importlib.util
import json
import math
import os
import shutil

import torch

from fusion_lab.measuring.plotting import require_matplotlib, save, spared
from fusion_lab.training import locks
from fusion_lab.training.files import UserError, finite, name_aside, set_aside, write_atomically
from fusion_lab.training.reading import open_regular, parse_json, read_regular

METRICS, CURVE = "metrics.jsonl", "learning_curve.png"


class Metrics:
    """The metrics of one run, which a resumed run continues: trainer is what its checkpoint has. Values are
    read from the device when they are written, at flush(), so that no step waits for it."""

    def __init__(self, settings, writes=True, trainer=None):
        directory, self.writes = settings.profiler.profile_dir, writes  # of several ranks one writes
        self.path, self.pending = os.path.join(directory, METRICS), []
        if not writes:
            return
        if settings.training.resume and continues(self.path, trainer):
            cut_what_comes_again(self.path, trainer)
        else:
            set_aside(self.path)
            set_aside(os.path.join(directory, CURVE))

    def step(self, number, loss, trainer):
        """After step number (from 1): its loss, on the device."""
        rate = trainer.optimizer.param_groups[0]["lr"]
        rate = rate.clone() if isinstance(rate, torch.Tensor) else rate  # a graph's tensor changes in place
        self.pending.append((number, loss, trainer.gradient_norm.clone(), rate))

    def evaluation(self, number, scores):
        """scores {name: number} of an evaluation after step number."""
        self.flush([dict(step=number, evaluation=scores)])

    def flush(self, more=()):
        """Write what has come since the last time."""
        lines = [finite(dict(step=number, loss=float(loss), learning_rate=float(rate),
                             gradient_norm=float(norm))) for number, loss, norm, rate in self.pending]
        self.pending = []
        lines += more
        if not self.writes:
            return
        try:
            with open(locks.present(self.path), "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None

    def draw(self):
        """Path of the learning curve of all steps in the file, a PNG; None where that cannot be made. A
        picture never ends a run."""
        if not self.writes or importlib.util.find_spec("matplotlib") is None:
            return None
        with spared(CURVE):
            return self.picture(require_matplotlib())

    def picture(self, pyplot):
        steps, evaluations = read_metrics(locks.present(self.path))
        figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axis.plot([s["step"] for s in steps], [s["loss"] for s in steps], color="0.4", linewidth=0.9)
        axis.set(xlabel="step", ylabel="training loss", title="Learning curve")
        names = dict.fromkeys(name for e in evaluations for name in e["evaluation"])
        right = axis.twinx() if names else None
        for name in names:
            points = [(e["step"], e["evaluation"][name]) for e in evaluations if name in e["evaluation"]]
            right.plot(*zip(*points, strict=True), "o-", markersize=4, label=name)
        if names:
            right.set(ylim=(0, 1), ylabel="evaluation")
            right.legend()
        path = os.path.join(os.path.dirname(self.path), CURVE)
        save(figure, path)
        pyplot.close(figure)
        return path


def continues(path, trainer):
    """Whether a file holds the run that a checkpoint is from, by the gradient norm of the checkpoint's last
    step; one that is not there, too. Otherwise it is said."""
    norm = finite(trainer.gradient_norm.item())
    if not os.path.exists(path) or trainer.step_number == 0 or norm == 0:  # 0: an old checkpoint knows none
        return True
    last = [step for step in read_metrics(path)[0] if step["step"] == trainer.step_number]
    found = bool(last) and last[0].get("gradient_norm") == norm
    if not found:
        print(f"{path}: of another run than {trainer.training.resume}; it is set aside")
    return found


def cut_what_comes_again(path, trainer):
    """Leave a line for each step and evaluation that a checkpoint knows of, the last one, in a file of its
    run. Where steps go, the file as it was is kept beside it."""
    if not os.path.exists(path):
        return
    whole, kept, gone = read_regular(path), {}, False
    for text in whole.splitlines(keepends=True):
        step, of_evaluation, _ = parsed(text) or (math.inf, False, None)
        if step <= (trainer.evaluated if of_evaluation else trainer.step_number):
            kept[step, of_evaluation] = text
        else:
            gone |= text.endswith(b"\n") and not of_evaluation  # else a kill cut it short
    content = b"".join(kept[key] for key in sorted(kept))
    if gone:
        shutil.copy2(path, name_aside(path))
    if content != whole:
        write_atomically(path, lambda file: file.write(content))


def parsed(text):
    """(step, whether it is of an evaluation, the line's content) of a line of such a file, or None."""
    try:
        line = parse_json(text)
        number, of_evaluation = line["step"], "evaluation" in line
        values = line["evaluation"].values() if of_evaluation else [line["loss"]]
        sound = type(number) is int and all(v is None or type(v) in (int, float) for v in values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return (number, of_evaluation, line) if sound else None


def read_metrics(path):
    """(steps, evaluations) of a metrics.jsonl, both lists of dicts; of a step that was done twice, in a run
    and in the one that resumed it, the last. A torn last line and whatever is no such line are left out."""
    steps, evaluations = {}, {}
    with open_regular(path) as file:
        for text in file:
            if found := parsed(text):
                number, of_evaluation, line = found
                (evaluations if of_evaluation else steps)[number] = line
    return [steps[n] for n in sorted(steps)], [evaluations[n] for n in sorted(evaluations)]
