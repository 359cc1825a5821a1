"""Wherever a run is stopped, --resume makes it the whole run: best, early stopping, metrics, weights."""
import dataclasses
import json
import os
import signal

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.measuring.metrics import Metrics
from fusion_lab.training.program import nothing
from tests.second_program import PROGRAM as SECOND
from tests.support import last_json

FLAGS = ("--width 8 --batch-size 2 --warmup-steps 0 --device cpu --log-every 1000 --eval-every 2 "
         "--ema-decay 0.9 --early-stopping 3").split()
SCORES = {2: 0.5, 4: 0.4, 6: 0.3, 7: 0.95, 8: 0.9, 10: 0.6, 12: 0.8, 14: 0.7}
STEPS, ENDS = 20, 14  # of three evaluations without a better one, after the one of step 8


class Killed(BaseException):
    """Ends a run where a kill would."""


class Evaluate:
    """Scores as they stand above; in the evaluation after a step what is to happen happens."""

    def __init__(self, happens):
        self.happens = dict(happens)

    def __call__(self, trainer, source, stop, final=False):
        step = trainer.step_number
        act = self.happens.pop("final" if final else step, None)
        if act == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
            return dict(score=0.0)
        if act == "kill":
            raise Killed
        torch.rand(3)  # an evaluation may draw random numbers
        weight = next(iter(trainer.model.parameters())).flatten()[0].item()  # of the averaged weights
        return dict(score=SCORES[step] + (0.01 if final else 0.0), weight=weight)


@pytest.fixture(scope="module", autouse=True)
def without_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "draw", lambda metrics: None)
        yield


def run(directory, *flags, **happens):
    """Exit code of a run with such evaluations, or "killed"."""
    happens = {int(key[1:]) if key[1:].isdigit() else key: act for key, act in happens.items()}
    program = dataclasses.replace(
        SECOND, evaluate=Evaluate(happens), scores=dict, score=lambda found: found["score"],
        evaluation_line=str, closing=nothing)
    saved = directory / "run.pt"
    resume = ["--resume", saved] if saved.exists() else []
    try:
        return tof.main([*FLAGS, *map(str, [
            "--num-steps", STEPS, "--save-checkpoint", saved, "--save-best", directory / "best.pt",
            "--save-every", 1, *resume, *flags, "--profile-dir", directory])], program)
    except Killed:
        return "killed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    assert run(directory) == 0
    return directory


def loaded(path):
    saved = torch.load(path, weights_only=True)
    del saved["training"]  # has paths
    return saved


def require_alike(found, expected, where=""):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            require_alike(found[key], value, f"{where} {key}")
    else:
        assert found == expected, where


def test_the_whole_run(whole):
    assert loaded(whole / "run.pt")["step"] == ENDS
    assert loaded(whole / "run.pt")["best"] == dict(score=0.9, step=8, since=3)
    assert loaded(whole / "best.pt")["step"] == 8
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, ENDS + 1))
    assert [line["step"] for line in lines if "loss" not in line] == [2, 4, 6, 8, 10, 12, 14, 14]


@pytest.mark.parametrize("stops", [
    [dict(_8="signal")], [dict(_8="signal"), dict(_8="signal")], [dict(_8="kill")],
    [dict(_2="kill"), dict(_2="signal"), dict(_8="kill"), dict(_8="kill")],
    [dict(final="kill")], [dict(final="signal"), dict(final="kill")],
    [dict(_14="signal"), dict(final="signal")], [dict(_14="kill"), dict(_14="kill")]], ids=str)
def test_a_run_stopped_in_an_evaluation_repeats_it(stops, whole, tmp_path):
    for happens in stops:
        assert run(tmp_path, **happens) == (143 if "signal" in happens.values() else "killed")
    assert run(tmp_path) == 0
    require_the_whole(tmp_path, whole)


def require_the_whole(directory, whole):
    for name in ("run.pt", "best.pt"):
        require_alike(loaded(directory / name), loaded(whole / name), name)
    assert (directory / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("step", [6, 8, 9])
def test_a_kill_after_an_evaluation_and_before_the_next_checkpoint(step, every, whole, tmp_path, monkeypatch):
    """The best checkpoint is that of an evaluation which no other checkpoint knows of."""
    trained = tof.Trainer.step

    def kill(trainer, *given):
        if trainer.step_number == step and trainer.optimizer.state:
            raise Killed
        return trained(trainer, *given)
    monkeypatch.setattr(tof.Trainer, "step", kill)
    assert run(tmp_path, "--save-every", every) == "killed"
    monkeypatch.undo()
    assert run(tmp_path, "--save-every", every) == 0
    require_the_whole(tmp_path, whole)


def test_a_longer_run_has_the_evaluations_of_a_whole_one(whole, tmp_path):
    """The final evaluation of a shorter one, at a step where a longer one has none, counts for that alone."""
    for steps in (7, 8, 10):
        assert run(tmp_path, "--num-steps", steps) == 0
    assert run(tmp_path) == 0
    require_alike(loaded(tmp_path / "run.pt"), loaded(whole / "run.pt"))
    assert (tmp_path / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_what_has_ended_is_not_done_again(whole, tmp_path, capsys):
    assert run(whole) == 2
    said = capsys.readouterr().err
    assert "--early-stopping 3: " in said and "ended by it at step 14" in said
    assert run(tmp_path, "--num-steps", 4) == 0 and run(tmp_path, "--num-steps", 4) == 2
    assert "is at step 4 already" in capsys.readouterr().err


def test_a_run_that_only_owed_its_last_evaluation(tmp_path, capsys):
    """No step, so no speed: null, and nothing to compare with an earlier summary."""
    assert run(tmp_path, "--num-steps", 2, "--early-stopping", 9, final="kill") == "killed"
    earlier = tmp_path / "earlier.json"
    os.rename(tmp_path / "performance_summary_mlp.json", earlier)
    capsys.readouterr()
    assert run(tmp_path, "--num-steps", 2, "--compare-with-v1", earlier, "--enable-all-profiling") == 0
    summary = last_json(capsys.readouterr().out)
    figures = summary["performance_summary"]
    assert figures["total_samples"] == 0 and figures["flops_per_step"] > 0
    assert {figures[key] for key in ("median_batch_time", "first_loss", "mfu", "avg_batch_time")} == {None}
    assert list(summary["evaluation"]) == ["final"] and summary["evaluation"]["final"]["score"] == 0.51


def test_an_interrupted_evaluation_is_no_result(tmp_path, capsys):
    assert run(tmp_path, _4="signal") == 143
    said = capsys.readouterr().out
    assert "\nInterrupted in the evaluation after step 4\n" in said and "Interrupted at step 4 of 20" in said
    assert list(last_json(said)["evaluation"]) == ["2"]
    assert (tmp_path / "metrics.jsonl").read_text().count("evaluation") == 1
