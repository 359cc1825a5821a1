"""The evaluations of a run: kept by step, for the best checkpoint and for early stopping."""
import math

from fusion_lab.training.checkpoints import save
from fusion_lab.training.files import UserError
from fusion_lab.training.program import nothing


def require_score(program, training):
    """Raise UserError if a choice between evaluations is asked for that the program cannot make."""
    for flag, asked in (("--save-best", training.save_best), ("--early-stopping", training.early_stopping)):
        if asked and program.score is nothing:
            raise UserError(f"{flag}: {program.name} does not say which evaluation is better")


class Evaluations:
    """Takes evaluations of a trainer on a source. Program.score says which is better; --save-best keeps the
    best, and after --early-stopping of them without a better one the run is exhausted."""

    def __init__(self, trainer, source, metrics):
        self.trainer, self.source, self.metrics, self.by_step = trainer, source, metrics, {}
        self.best, self.best_step, self.since_best = -math.inf, None, 0

    def take(self, step, stop):
        """The evaluation after this step, or of the "final" weights, as a line. A signal ends it early."""
        trainer, program, final = self.trainer, self.trainer.program, step == "final"
        with trainer.averaged():
            found = program.evaluate(trainer, self.source, stop, final=final)
        self.by_step[step] = found
        self.metrics.evaluation(trainer.step_number, program.scores(found))
        score = program.score(found)
        if score is not None and stop.signal is None:
            self.compare(trainer.step_number, score)
        return program.evaluation_line(found)

    def compare(self, step, score):
        if score > self.best:
            self.best, self.best_step, self.since_best = score, step, 0
            if self.trainer.training.save_best:
                save(self.trainer, self.trainer.training.save_best)
        else:
            self.since_best += 1

    @property
    def exhausted(self):
        patience = self.trainer.training.early_stopping
        return patience is not None and self.since_best >= patience

    def in_words(self):
        """What came of it, or None."""
        if self.best_step is None:
            return None
        path = self.trainer.training.save_best
        return (f"Best evaluation: {self.best:.3f} after step {self.best_step}"
                + (f", saved in {path}" if path else "")
                + (f"; stopped, as {self.since_best} since were no better" if self.exhausted else ""))
