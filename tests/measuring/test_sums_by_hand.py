"""Small sums and sentences by hand: totals of kernels, savings, shares of a step, recommendations, the best
evaluation."""
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.measuring.comparison import rows as comparison_rows
from fusion_lab.measuring.comparison import worth
from fusion_lab.rocm import records
from fusion_lab.study.design import Shape
from fusion_lab.study.recommendation import print_recommendation
from fusion_lab.study.summary import Recommendation, Recommended
from fusion_lab.training.distributed import ALONE
from fusion_lab.training.evaluations import Evaluations
from proteins import files
from tests.study.study_parts import WORDS


def test_totals_of_kernels():
    entries = [("a", 1, 2.0), ("b", 1, 1.0), ("a", 3, 5.0)]
    assert records.add_up(entries) == {"a": (4, 7.0), "b": (1, 1.0)}
    assert records.merge([{"a": (4, 7.0)}, {"b": (1, 1.0), "a": (1, 0.5)}]) == {"a": (5, 7.5), "b": (1, 1.0)}


def test_what_a_row_saves():
    before = dict(peak_memory_mb=100.0, saved_activation_mb=None, launches_per_step=40,
                  flops_per_step=800)
    row = dict(peak_memory_mb=25.0, saved_activation_mb=10.0, launches_per_step=50, flops_per_step=600,
               median_batch_time=2.0)
    comparison_rows.add_savings(row, before, 1200.0)
    assert {key: value for key, value in row.items() if key == "mfu" or "reduction" in key} == dict(
        mfu=0.25, peak_memory_reduction_percent=75.0, saved_activation_reduction_percent=None,
        launch_reduction_percent=-25.0, flop_reduction_percent=25.0)


def test_shares_of_a_step_are_medians(monkeypatch):
    """Forward and backward of "a" together; where a step has none of "b", its share is 0."""
    steps = [{("a", "forward"): 1.0, ("a", "backward"): 2.0, ("b", "forward"): 1.0},
             {("a", "forward"): 1.0, ("b", "backward"): 1.0}, {("a", "forward"): 4.0}]
    monkeypatch.setattr(worth, "amounts_in_a_step", lambda trainer, batch, clock: steps.pop(0))
    assert worth.shares_of_a_step(SimpleNamespace(device=None), None, 3) == {"a": 0.75, "b": 0.25}


def test_a_recommendation_in_words(capsys):
    def at(length, *passed_over, **known):
        return Recommended(Shape((2, length, 8), WORDS.axes), passed_over, **known)
    print_recommendation(Recommendation(150.0, (
        at(32, "all: broken", setting="fused", command="run it", median_ms=1.234, peak_memory_mb=100.06,
           speedup=2.345), at(64, setting="baseline", median_ms=5.0, speedup=1.0), at(96))))
    assert capsys.readouterr().out.splitlines() == [
        "", "Recommended: fastest, accurate, within 150 MB",
        "   B 2 S 32 N 8: fused, 1.23 ms, 100.1 MB, 2.35x the baseline", "      not all: broken",
        "      run it", "   B 2 S 64 N 8: baseline, 5.00 ms, n/a",
        "   B 2 S 96 N 8: none of the settings qualifies"]
    print_recommendation(Recommendation(None, (at(
        32, setting="fused", command="run it", median_ms=1.0, speedup=1.04, speedup_low=0.833,
        speedup_high=1.296),)))
    assert "1.04x the baseline (±, 0.83 to 1.30: undecided)\n" in capsys.readouterr().out
    print_recommendation(Recommendation(None, ()))
    assert capsys.readouterr().out == "\nRecommended: fastest, accurate\n"


@pytest.mark.parametrize("limit, error", [(150.0, None), (None, None), ("much", ValueError),
                                          (True, ValueError)])
def test_a_recommendation_that_was_read(limit, error):
    content = dict(memory_limit_mb=limit, shapes=[])
    if error:
        with pytest.raises(error):
            Recommendation.read(content, WORDS.axes)
    else:
        assert Recommendation.read(content, WORDS.axes) == Recommendation(limit, ())


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
        return self.evaluations.trainer.world.waiting()


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


@pytest.mark.parametrize("score, signal", [(None, None), (0.5, 2)])
def test_without_a_score_or_with_a_signal_nothing_is_compared(score, signal):
    trainer = Trainer(score, signal=signal)
    trainer.evaluations.take(10, trainer.stop)
    assert trainer.best["score"] is None
    assert (trainer.kept, trainer.evaluated) == ((["flushed"], 0) if signal else ([(7, score)], 7))


def test_rows_are_picked_by_words_of_four_letters(monkeypatch):
    """A row that shares its last four letters alone is looked at, one that shares three is not."""
    monkeypatch.setattr(files, "_best_chain", lambda *_: (None, None))
    monkeypatch.setattr(files, "_matches", lambda *_, **__: True)
    chains = [SimpleNamespace(sequence=files._tokens(b"ACDEFG"))]
    assert files._row_that_matches(["shares four"], [b"WW-DEFG"], chains) == "shares"
    assert files._row_that_matches(["three"], [b"WWWEFG"], chains) is None
    assert files._row_that_matches([""], [b"ACDEFG"], chains) is None  # a row without a name
