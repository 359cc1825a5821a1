"""How a run went: every step's loss, learning rate and gradient norm, and every evaluation, in metrics.jsonl;
as a picture, and for TensorBoard, where these are installed."""
import importlib.util
import json
import os

import torch

from fusion_lab.measuring.plotting import require_matplotlib, save, spared
from fusion_lab.training.files import MISSING, UserError, finite, set_aside
from fusion_lab.training.reading import open_regular, parse_json, require_regular

METRICS, CURVE = "metrics.jsonl", "learning_curve.png"


class Metrics:
    """The metrics of one run, which a resumed run continues. Values are read from the device when they are
    written, at flush(), so that no step waits for it."""

    def __init__(self, settings, writes=True):
        directory, self.writes = settings.profiler.profile_dir, writes  # of several ranks one writes
        self.path, self.pending, self.writer = os.path.join(directory, METRICS), [], None
        if not writes:
            return
        if settings.training.resume:
            cut_torn_line(self.path)
        else:
            set_aside(self.path)
            set_aside(os.path.join(directory, CURVE))
        if settings.profiler.tensorboard:
            self.writer = summary_writer(directory)

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
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        if self.writer:
            for line in lines:
                for name, value in [*line.get("evaluation", {}).items(), *line.items()]:
                    if name not in ("step", "evaluation") and value is not None:
                        self.writer.add_scalar(name, value, line["step"])
            self.writer.flush()

    def draw(self):
        """Path of the learning curve of all steps in the file, a PNG; None where that cannot be made. A
        picture never ends a run."""
        if not self.writes or importlib.util.find_spec("matplotlib") is None:
            return None
        with spared(CURVE):
            return self.picture(require_matplotlib())

    def picture(self, pyplot):
        steps, evaluations = read_metrics(self.path)
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


def cut_torn_line(path):
    """Take off a last line that a kill cut short."""
    if os.path.exists(path):
        require_regular(path)
        with open(path, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def read_metrics(path):
    """(steps, evaluations) of a metrics.jsonl, both lists of dicts; of a step that was done twice, in a run
    and in the one that resumed it, the last. A torn last line and whatever is no such line are left out."""
    steps, evaluations = {}, {}
    with open_regular(path) as file:
        for text in file:
            try:
                line = parse_json(text)
                number, kind = line["step"], evaluations if "evaluation" in line else steps
                values = line["evaluation"].values() if "evaluation" in line else [line["loss"]]
                if type(number) is int and all(v is None or type(v) in (int, float) for v in values):
                    kind[number] = line
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
    return [steps[n] for n in sorted(steps)], [evaluations[n] for n in sorted(evaluations)]


def summary_writer(directory):
    """TensorBoard's writer. Raises UserError (code 3) where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs tensorboard: pip install tensorboard", code=MISSING)
    from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(directory)
