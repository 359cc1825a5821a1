"""The evaluations of a run: kept by step, for the best checkpoint and for early stopping."""
import contextlib

import torch

from fusion_lab.training.checkpoints import save
from fusion_lab.training.files import UserError, counted
from fusion_lab.training.program import nothing


def require_score(program, training):
    """Raise UserError if a choice between evaluations is asked for that the program cannot make."""
    for flag, asked in (("--save-best", training.save_best), ("--early-stopping", training.early_stopping)):
        if asked and program.score is nothing:
            raise UserError(f"{flag}: {program.name} does not say which evaluation is better")


@contextlib.contextmanager
def evaluating(model):
    """Within, the model runs without dropout, gradients and torch.compile: whole chains differ in length."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


class Evaluations:
    """Takes evaluations of a trainer on a source. Program.score says which is better; --save-best keeps the
    best, and after --early-stopping of them without a better one the run is stopped. The best so far is part
    of the trainer, so that a resumed run goes on counting."""

    def __init__(self, trainer, source, metrics):
        self.trainer, self.source, self.metrics, self.by_step = trainer, source, metrics, {}
        self.stopped = False  # before --num-steps, for want of a better evaluation
        self.interrupted = False  # a signal came during the last one

    def take(self, step, stop):
        """The evaluation after this step, or of the "final" weights, as a line. A signal ends it early."""
        trainer, program, final = self.trainer, self.trainer.program, step == "final"
        with trainer.averaged():
            found, signal = trainer.world.together(lambda: (
                program.evaluate(trainer, self.source, stop, final=final), stop.signal))
        self.by_step[step], self.interrupted = found, signal is not None
        self.metrics.evaluation(trainer.step_number, program.scores(found))
        score = program.score(found)
        if score is not None and signal is None:
            self.compare(trainer.step_number, score, final)
        return program.evaluation_line(found)

    def compare(self, step, score, final):
        trainer = self.trainer
        if trainer.best["score"] is None or score > trainer.best["score"]:
            trainer.best = dict(score=score, step=step, since=0)
            if trainer.training.save_best:
                save(trainer, trainer.training.save_best)
        elif not final:
            trainer.best["since"] += 1
            patience = trainer.training.early_stopping
            self.stopped = patience is not None and trainer.best["since"] >= patience

    def unfinished(self):
        """Whether a signal came before the end of the evaluation of the final weights."""
        return bool(self.trainer.program.evaluate) and (self.interrupted or "final" not in self.by_step)

    def in_words(self):
        """What came of it, or None."""
        best, path = self.trainer.best, self.trainer.training.save_best
        if best["score"] is None:
            return None
        return (f"Best evaluation: {best['score']:.3f} after step {best['step']}"
                + (f", saved in {path}" if path else "")
                + (f"; stopped: the next {counted(best['since'], 'evaluation')} brought nothing better"
                   if self.stopped else ""))
