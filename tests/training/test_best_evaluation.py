"""Which evaluation is the best, when a run stops for want of a better one, and what is said of it."""
import contextlib
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.training.distributed import ALONE
from fusion_lab.training.evaluations import Evaluations


class Trainer:
    """Evaluates to the scores that it is given, in turn."""
    world, step_number, evaluated, device = ALONE, 7, 0, torch.device("cpu")

    def __init__(self, *scores, signal=None, **training):
        self.scores, self.finals, self.best = list(scores), [], dict(score=None, step=None, since=0)
        self.training = SimpleNamespace(**{"save_best": None, "save_checkpoint": None, "early_stopping": None,
                                           **training})
        self.stop = SimpleNamespace(signal=signal)

        def evaluate(trainer, source, stop, final):
            self.finals.append(final)
            return self.scores.pop(0)
        self.program = SimpleNamespace(evaluate=evaluate, evaluation_line=lambda found: f"line {found}",
                                       scores=lambda found: found, score=lambda found: found)
        self.kept = []
        self.evaluations = Evaluations(self, None, SimpleNamespace(
            flush=lambda: self.kept.append("flushed"),
            evaluation=lambda step, scores: self.kept.append((step, scores))))

    def averaged(self):
        return contextlib.nullcontext()


def test_the_best_evaluation_in_words():
    trainer = Trainer(0.5, 0.75, 0.6, 0.7, 0.1, early_stopping=2)
    found = trainer.evaluations
    assert found.in_words() is None
    for number, step in enumerate((10, 20, 30, 40, "final")):
        trainer.step_number = number
        assert found.take(step, trainer.stop) == f"line {found.by_step[step]}"
        assert found.stopped == (number > 2)
    assert trainer.finals == [False] * 4 + [True] and trainer.best == dict(score=0.75, step=1, since=2)
    assert found.in_words() == "Best evaluation: 0.750 after step 1; stopped: the next 2 evaluations "\
        "brought nothing better"
    assert not found.unfinished()
    found.interrupted = True
    assert found.unfinished()
    assert trainer.kept == list(enumerate((0.5, 0.75, 0.6, 0.7, 0.1)))
    found.stopped, trainer.training.save_best = False, "best.pt"
    assert found.in_words() == "Best evaluation: 0.750 after step 1, saved in best.pt"


def test_the_line_of_weights_that_were_just_evaluated_is_not_said_again():
    """As after early stopping; the file has their final evaluation all the same."""
    trainer = Trainer(0.5, 0.4, 0.4, early_stopping=1)
    for trainer.step_number in (6, 7):
        trainer.evaluations.take(trainer.step_number, trainer.stop)
    assert trainer.evaluations.stopped
    said = trainer.evaluations.take("final", trainer.stop)
    assert said == "The final weights are those of step 7, evaluated above"
    assert trainer.evaluations.by_step == {6: 0.5, 7: 0.4, "final": 0.4}


@pytest.mark.parametrize("score, signal", [(None, None), (0.5, 2)])
def test_without_a_score_or_with_a_signal_nothing_is_compared(score, signal):
    trainer = Trainer(score, signal=signal)
    trainer.evaluations.take(10, trainer.stop)
    assert trainer.best["score"] is None
    assert (trainer.kept, trainer.evaluated) == ((["flushed"], 0) if signal else ([(7, score)], 7))
