"""How a run went: every step's loss, learning rate and gradient norm, and every evaluation, in metrics.jsonl
and, where matplotlib is installed, as a picture."""
import importlib.util
import json
import os
from array import array

import torch

from fusion_lab.measuring.clocks import MOST_PENDING
from fusion_lab.measuring.plotting import drawn
from fusion_lab.training.errors import UserError, unwritten
from fusion_lab.training.files import finite, write_text

METRICS, CURVE = "metrics.jsonl", "learning_curve.png"


class Metrics:
    """The metrics of one run, which a resumed run continues. Values are read from the device when they are
    written, at flush(), so that no step waits for it. Of several ranks one writes."""

    def __init__(self, trainer, directory):
        """directory: the RunDirectory."""
        self.path, self.writes = directory.file(METRICS), directory.writes
        self.pending, self.losses = [], array("d")  # of steps that are on the device, and of all others
        self.by_step = {}  # {step or "final": Evaluation}
        if self.writes and os.path.exists(self.path):
            self.go_on(trainer)

    def go_on(self, trainer):
        """Keep only the lines up to the step of the checkpoint that is resumed."""
        steps, evaluations = read_metrics(self.path)
        known = [line for line in (*steps, *evaluations) if line["step"] <= trainer.step_number]
        write_text(self.path, lines_of(sorted(known, key=lambda line: line["step"])))

    def step(self, number, loss, trainer):
        """After step number (from 1): its loss, on the device."""
        rate = trainer.optimizer.param_groups[0]["lr"]
        rate = rate.clone() if isinstance(rate, torch.Tensor) else rate  # a graph's tensor changes in place
        self.pending.append((number, loss, trainer.gradient_norm.clone(), rate))
        if len(self.pending) == MOST_PENDING:
            self.flush()

    def evaluation(self, number, evaluation, final=False):
        """An Evaluation after step number."""
        self.by_step["final" if final else number] = evaluation
        self.flush([dict(step=number, evaluation=evaluation.scores)])

    def flush(self, more=()):
        """Read what has come since the last time, all at once, and write it."""
        numbers, *values, rates = zip(*self.pending, strict=True) if self.pending else ((), (), (), ())
        losses, norms = (torch.stack(each).tolist() if each else [] for each in values)
        lines = [dict(step=number, loss=loss, learning_rate=float(rate), gradient_norm=norm)
                 for number, loss, norm, rate in zip(numbers, losses, norms, rates, strict=True)]
        self.losses.extend(losses)
        self.pending = []
        if not self.writes:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(lines_of([*lines, *more]))
        except OSError as error:
            raise unwritten(self.path, error) from None

    def draw(self, interrupted=None):
        """Path of the learning curve of all steps in the file, a PNG; None where that cannot be made, and
        after an interruption, since it takes seconds. A picture never ends a run."""
        if interrupted or not self.writes or importlib.util.find_spec("matplotlib") is None:
            return None
        path = os.path.join(os.path.dirname(self.path), CURVE)
        return drawn(path, plot_curve, self.path, figsize=(7, 4))


def plot_curve(axis, path):
    """Losses of all steps in a metrics.jsonl, and on an axis of its own each figure of the evaluations."""
    steps, evaluations = read_metrics(path)
    axis.plot([s["step"] for s in steps], [s["loss"] for s in steps], color="0.4", linewidth=0.9)
    axis.set(xlabel="step", ylabel="training loss", title="Learning curve")
    if names := dict.fromkeys(name for e in evaluations for name in e["evaluation"]):
        right = axis.twinx()
        for name in names:
            points = [(e["step"], e["evaluation"][name]) for e in evaluations if name in e["evaluation"]]
            right.plot(*zip(*points, strict=True), "o-", markersize=4, label=name)
        right.set(ylim=(0, 1), ylabel="evaluation")
        right.legend()


def resumes(trainer, directory):
    """Whether a RunDirectory holds metrics of the run that the trainer resumes: their gradient norm after the
    checkpoint's last step is the checkpoint's."""
    path = directory.file(METRICS)
    if not trainer.settings.training.resume or not os.path.exists(path):
        return False
    norms = [s.get("gradient_norm") for s in read_metrics(path)[0] if s["step"] == trainer.step_number]
    return norms == [finite(trainer.gradient_norm.item())]


def lines_of(content):
    return "".join(json.dumps(finite(line)) + "\n" for line in content)


def read_metrics(path):
    """(steps, evaluations) of a metrics.jsonl, both lists of dicts; of a step that stands there twice, the
    last. A torn last line is left out. Raises UserError."""
    steps, evaluations = {}, {}
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            (evaluations if "evaluation" in line else steps)[line["step"]] = line
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise UserError(f"{path}: line {number} is no line of metrics") from None
    return [steps[n] for n in sorted(steps)], [evaluations[n] for n in sorted(evaluations)]
