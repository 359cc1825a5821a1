"""Evaluations of a run: they choose the best weights, end a run early, and change nothing else in it."""
import contextlib
import dataclasses
import os
import signal
from types import SimpleNamespace

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.metrics import read_metrics
from fusion_lab.training.distributed import World
from fusion_lab.training.evaluations import Evaluation, evaluate
from tests import second_program

pytestmark = pytest.mark.usefixtures("quick_runs")
FLAGS = ("--width 8 --batch-size 2 --warmup-steps 0 --device cpu --log-every 1000 --eval-every 2 "
         "--ema-decay 0.9").split()
# At 14 as good as at 8, which is not better
SCORES = {2: 0.5, 3: 0.1, 4: 0.4, 6: 0.3, 7: 0.95, 8: 0.9, 10: 0.6, 12: 0.8, 14: 0.9}


class Scored(second_program.Numbers):
    """Has the scores above, draws random numbers meanwhile, and is sent a signal at one step."""
    chooses, signalled, evaluated = True, None, []

    def evaluate(self, trainer, stop):
        self.evaluated.append(trainer.step_number)
        torch.rand(3)
        if trainer.step_number == self.signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        score = SCORES[trainer.step_number]
        weight = next(iter(trainer.model.parameters())).flatten()[0].item()  # of the averaged weights
        return Evaluation(f"score {score}", dict(score=score, weight=weight), score, dict(score=score))


def run(directory, *flags, signalled=None):
    data = type("Data", (Scored,), dict(signalled=signalled))
    Scored.evaluated.clear()
    program = dataclasses.replace(second_program.PROGRAM, data=data)
    return tof.main([*FLAGS, "--profile-dir", str(directory), *map(str, flags)], program)


def test_the_best_weights_are_kept_and_a_run_ends_when_nothing_better_comes(tmp_path, capsys):
    flags = ["--num-steps", 20, "--early-stopping", 3, "--save-best", tmp_path / "best.pt",
             "--save-checkpoint", tmp_path / "last.pt"]
    assert run(tmp_path / "r", *flags) == 0
    best, last = torch.load(tmp_path / "best.pt"), torch.load(tmp_path / "last.pt")
    assert best["step"] == 8 and last["step"] == 14 and last["best"] == dict(score=0.9, step=8, since=3)
    steps, evaluations = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert len(steps) == 14 and [e["step"] for e in evaluations] == [2, 4, 6, 8, 10, 12, 14]
    assert Scored.evaluated == [2, 4, 6, 8, 10, 12, 14]  # each once
    at_8 = evaluations[3]["evaluation"]["weight"]
    assert next(iter(best["average"].values())).flatten()[0].item() == pytest.approx(at_8)
    said = capsys.readouterr().out
    assert "Best evaluation: 0.900 after step 8" in said and "step 14 of 20: 3 evaluations" in said
    assert run(tmp_path / "r", *flags, "--resume", tmp_path / "last.pt") == 2  # nothing is left to do
    assert "--early-stopping" in capsys.readouterr().err


def test_the_best_weights_of_a_last_evaluation_are_known_when_the_run_goes_on(tmp_path):
    """At step 7 stands the best score of all: no later evaluation replaces these weights."""
    flags = ["--save-best", tmp_path / "best.pt", "--save-checkpoint", tmp_path / "last.pt"]
    assert run(tmp_path / "r", "--num-steps", 7, *flags) == 0
    assert torch.load(tmp_path / "last.pt")["best"] == dict(score=0.95, step=7, since=0)
    assert run(tmp_path / "r", "--num-steps", 10, *flags, "--resume", tmp_path / "last.pt") == 0
    best = torch.load(tmp_path / "best.pt")
    assert best["step"] == 7 and not list(tmp_path.glob("*.old-*"))
    torch.save(dict(best, best=dict(best["best"], score=7)), tmp_path / "best.pt")  # those of another run
    assert run(tmp_path / "r", "--num-steps", 12, *flags, "--resume", tmp_path / "last.pt") == 0
    assert len(list(tmp_path.glob("best.pt.old-*"))) == 1


def test_a_run_is_not_resumed_into_the_directory_of_another_one(tmp_path, capsys):
    for name in ("a", "b"):
        assert run(tmp_path / name, "--num-steps", 3, "--save-checkpoint", tmp_path / f"{name}.pt",
                   "--seed", ord(name)) == 0
    before = (tmp_path / "b" / "performance_summary_mlp.json").read_text()
    flags = ["--num-steps", 4, "--seed", ord("a"), "--resume", tmp_path / "a.pt"]
    assert run(tmp_path / "b", *flags) == 2 and "--force" in capsys.readouterr().err
    assert (tmp_path / "b" / "performance_summary_mlp.json").read_text() == before
    assert run(tmp_path / "a", *flags) == 0


def test_a_run_that_chooses_needs_a_score(tmp_path, capsys):
    program, flags = second_program.PROGRAM, [*FLAGS, "--profile-dir", str(tmp_path / "r")]
    for flag, value in (("--save-best", str(tmp_path / "b.pt")), ("--early-stopping", "2")):
        assert tof.main([*flags, flag, value], program) == 2 and flag in capsys.readouterr().err


def test_a_run_that_a_signal_ended_in_an_evaluation_goes_on_as_the_whole_one(tmp_path):
    """Weights, moments and averages bit for bit, and the metrics of each step."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--num-steps", 14, "--save-checkpoint"]
    assert run(whole, *flags, tmp_path / "a.pt") == 0
    assert run(parts, *flags, tmp_path / "b.pt", "--log-every", 1, signalled=8) == 128 + signal.SIGTERM
    assert run(parts, *flags, tmp_path / "b.pt", "--resume", tmp_path / "b.pt") == 0
    a, b = torch.load(tmp_path / "a.pt"), torch.load(tmp_path / "b.pt")
    for kind in ("model", "average"):
        assert all(torch.equal(a[kind][name], b[kind][name]) for name in a[kind])
    assert all(torch.equal(a["moments"][kind][name], b["moments"][kind][name])
               for kind in a["moments"] for name in a["model"])
    assert read_metrics(whole / "metrics.jsonl")[0] == read_metrics(parts / "metrics.jsonl")[0]


def test_a_signal_of_which_the_other_ranks_do_not_know_yet_waits(tmp_path, monkeypatch):
    """Or this rank would leave while they wait for it in the next step. It came in the evaluation at 8, too
    late for what the ranks agreed on after that step."""
    heard = []

    def agreed(_, stop):
        heard.extend([stop.signal] if stop.signal else [])
        return stop.signal if len(heard) > 1 else None
    monkeypatch.setattr(World, "agreed_signal", agreed)
    flags = "--num-steps", 14, "--save-checkpoint", tmp_path / "c.pt"
    assert run(tmp_path / "r", *flags, signalled=8) == 128 + signal.SIGTERM
    assert torch.load(tmp_path / "c.pt")["step"] == 9


@pytest.mark.parametrize("first, own", [(None, signal.SIGTERM), (signal.SIGTERM, None)])
def test_the_first_rank_says_whether_an_evaluation_counts(first, own, monkeypatch):
    evaluation = Evaluation("line", {}, 0.5, {})
    monkeypatch.setattr(World, "from_first", lambda *_: (evaluation, first))
    trainer = SimpleNamespace(world=World(), averaged=contextlib.nullcontext, device=torch.device("cpu"),
                              best=dict(score=None), step_number=8,
                              settings=second_program.PROGRAM.settings())
    metrics = SimpleNamespace(evaluation=lambda *_: None)
    evaluate(trainer, None, metrics, SimpleNamespace(signal=own), print)
    assert trainer.best["score"] == (0.5 if first is None else None)
