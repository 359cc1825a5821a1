"""Evaluations of a run, which choose the best weights and may end it early."""
import contextlib
from dataclasses import dataclass, field

import torch

from fusion_lab.training.checkpoints import own_random_numbers, save


@dataclass(frozen=True)
class Evaluation:
    """What Data.evaluate() found."""
    line: str                # for people
    scores: dict             # {name: number}, for curves
    score: float = None      # by which weights are chosen, higher is better; None: this run does not choose
    details: dict = field(default_factory=dict)  # JSON, for the summary


@contextlib.contextmanager
def evaluating(model):
    """Within, no dropout, no gradients, no torch.compile, which would compile for every length of a chain."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


def evaluate(trainer, source, metrics, stop, say, final=False):
    """Evaluate the weights of this step, or their average if there is one, and say(a line). The best weights
    so far go into --save-best. After a signal there is no evaluation, and one that a signal cuts short does
    not count. If the last evaluation was of the same weights, as after --early-stopping, it is the final
    one."""
    if final and trainer.step_number in metrics.by_step:
        if not stop.signal:
            metrics.by_step["final"] = metrics.by_step[trainer.step_number]
        return
    with trainer.averaged(), own_random_numbers(trainer.device):
        evaluation, interrupted = trainer.world.from_first(
            lambda: (None if stop.signal else source.evaluate(trainer, stop), stop.signal))
    if evaluation is None:
        return
    if interrupted:
        say(f"Interrupted in the evaluation after step {trainer.step_number}")
        return
    say(evaluation.line)
    metrics.evaluation(trainer.step_number, evaluation, final)
    best, training = trainer.best, trainer.settings.training
    if evaluation.score is not None and (best["score"] is None or evaluation.score > best["score"]):
        trainer.best = dict(score=evaluation.score, step=trainer.step_number, since=0)
        if training.save_best:
            save(trainer, training.save_best)
        if training.save_best and final and training.save_checkpoint:  # again, because it holds `best`
            save(trainer, training.save_checkpoint)
    elif evaluation.score is not None and not final:
        trainer.best = dict(best, since=best["since"] + 1)
