"""The evaluations of a run: kept by step, for the best checkpoint and for early stopping."""
import contextlib

import torch

from fusion_lab.training.checkpoints import out_of_patience, save
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


def own_random_numbers(device):
    """Within, whoever draws random numbers leaves those of the training alone, which a resumed run needs."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class Evaluations:
    """Takes evaluations of a trainer on a source. Program.score says which is better; --save-best keeps the
    best, and after --early-stopping of them without a better one the run is stopped. What a resumed run must
    know of them is part of the trainer: the best so far, and after which step the last one was."""

    def __init__(self, trainer, source, metrics):
        self.trainer, self.source, self.metrics, self.by_step = trainer, source, metrics, {}
        self.stopped = out_of_patience(trainer)  # before --num-steps, for want of a better evaluation
        self.interrupted = False  # a signal came during the last one

    def owed(self):
        """Whether the evaluation after the last step is still to come, as it also is where a stop came
        between a checkpoint and the end of its evaluation."""
        step, training = self.trainer.step_number, self.trainer.training
        return bool(self.trainer.program.evaluate) and step % training.eval_every == 0 \
            and self.trainer.evaluated < step < training.num_steps

    def ended(self):
        """Whether no further step is wanted: after a signal the next run takes the evaluation again, of the
        same weights."""
        return self.stopped or self.interrupted

    def take(self, step, stop):
        """The evaluation after this step, or of the "final" weights, as a line. A signal ends it early; then
        it counts for nothing."""
        trainer, program, final = self.trainer, self.trainer.program, step == "final"
        with trainer.averaged(), own_random_numbers(trainer.device):
            found, signal = trainer.world.from_first(lambda: (
                program.evaluate(trainer, self.source, stop, final=final), stop.signal))
        self.interrupted = signal is not None
        if self.interrupted:
            self.metrics.flush()
            self.by_step.update({step: found} if final else {})
            return f"Interrupted in the evaluation after step {trainer.step_number}"
        self.by_step[step], before = found, trainer.best
        self.metrics.evaluation(trainer.step_number, program.scores(found))
        trainer.evaluated = trainer.evaluated if final else trainer.step_number
        if (score := program.score(found)) is not None:
            self.compare(trainer.step_number, score, final)
        if final and trainer.training.save_checkpoint:
            self.note_end(before)
        if final and trainer.step_number in self.by_step:  # as after early stopping
            return f"The final weights are those of step {trainer.step_number}, evaluated above"
        return program.evaluation_line(found)

    def compare(self, step, score, final):
        trainer = self.trainer
        if trainer.best["score"] is None or score > trainer.best["score"]:
            trainer.best = dict(score=score, step=step, since=0)
            if trainer.training.save_best:
                save(trainer, trainer.training.save_best)
        elif not final:
            trainer.best = dict(trainer.best, since=trainer.best["since"] + 1)
            self.stopped = out_of_patience(trainer)

    def note_end(self, best):
        """Let the checkpoint say that nothing is owed any more. Its best is the one from before the final
        evaluation, which a run of more steps would not have taken here."""
        trainer = self.trainer
        found, trainer.best, trainer.ended = trainer.best, best, True
        save(trainer, trainer.training.save_checkpoint)
        trainer.best = found

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
