"""metrics.jsonl: every step and evaluation once, of one run, also where it was resumed; and its picture."""
import json
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.measuring import metrics
from fusion_lab.training.directory import RunDirectory
from fusion_lab.training.distributed import ALONE
from fusion_lab.training.errors import UserError
from fusion_lab.training.evaluations import Evaluation
from tests.second_program import PROGRAM as SECOND


def of_run(directory, step=0):
    trainer = SimpleNamespace(world=ALONE, step_number=step,
                              settings=SECOND.settings(profile_dir=str(directory)))
    return metrics.Metrics(trainer, RunDirectory(SECOND, trainer.settings))


def noted(number, loss=1.0, norm=0.5, rate=1e-3):
    """Arguments of Metrics.step()."""
    return number, torch.tensor(loss), SimpleNamespace(
        gradient_norm=torch.tensor(norm), optimizer=SimpleNamespace(param_groups=[dict(lr=rate)]))


def line(step, norm=0.5, loss=2.0):
    return json.dumps(dict(step=step, loss=loss, learning_rate=1e-3, gradient_norm=norm)) + "\n"


def evaluation(step):
    return json.dumps(dict(step=step, evaluation=dict(score=0.5))) + "\n"


KNOWN = [line(1), line(2), evaluation(2), line(3), line(4)]


def test_they_are_read_when_they_are_written(tmp_path):
    """A norm that the trainer overwrites, and a rate that it changes, stay those of their step."""
    found = of_run(tmp_path)
    step = noted(1, loss=2.0)
    found.step(*step)
    step[2].gradient_norm.fill_(9.0)
    found.step(*noted(2, loss=float("nan"), rate=5e-4))
    assert not (tmp_path / "metrics.jsonl").exists()
    found.evaluation(2, Evaluation("a line", dict(score=0.25)))
    found.step(*noted(3))
    found.flush()
    found.flush()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        dict(step=1, loss=2.0, learning_rate=1e-3, gradient_norm=0.5),
        dict(step=2, loss=None, learning_rate=5e-4, gradient_norm=0.5),
        dict(step=2, evaluation=dict(score=0.25)),
        dict(step=3, loss=1.0, learning_rate=1e-3, gradient_norm=0.5)]


def test_a_long_run_keeps_no_loss_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MOST_PENDING", 10)
    found = of_run(tmp_path)
    for number in range(1, 26):
        found.step(*noted(number, loss=number))
        assert len(found.pending) < 10
    found.flush()
    assert found.losses.tolist() == [*range(1, 26)]
    assert [step["loss"] for step in metrics.read_metrics(found.path)[0]] == [*range(1, 26)]


@pytest.mark.parametrize("later", [[], [line(5)], [evaluation(5), line(5), line(6)], ['{"step": 5, "lo']])
def test_what_comes_again_is_cut(later, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(KNOWN + later))
    of_run(tmp_path, step=4)
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == (
        [json.loads(KNOWN[i]) for i in (0, 1, 3, 4)], [json.loads(KNOWN[2])])


@pytest.mark.parametrize("content, norm, resume, own", [
    (KNOWN, 0.5, "c.pt", True), (KNOWN, 0.25, "c.pt", False), (KNOWN[:4], 0.5, "c.pt", False),
    ([*KNOWN[:4], line(4, norm=None)], float("inf"), "c.pt", True), (KNOWN, 0.5, None, False),
    (None, 0.5, "c.pt", False)])
def test_a_resumed_run_knows_its_directory_by_the_norm_of_its_last_step(content, norm, resume, own, tmp_path):
    if content:
        (tmp_path / "metrics.jsonl").write_text("".join(content))
    settings = SECOND.settings(profile_dir=str(tmp_path), resume=resume)
    trainer = SimpleNamespace(settings=settings, step_number=4,
                              gradient_norm=torch.tensor(norm))
    assert metrics.resumes(trainer, RunDirectory(SECOND, settings)) is own


def test_of_a_step_that_stands_there_twice_the_last_counts(tmp_path):
    (tmp_path / "m").write_text(line(1) + line(2, loss=4.0) + line(2, loss=5.0))
    assert [step["loss"] for step in metrics.read_metrics(tmp_path / "m")[0]] == [2.0, 5.0]
    (tmp_path / "x").write_text("x\n" + line(1))
    for name, words in (("absent", "absent"), ("x", "line 1")):
        with pytest.raises(UserError, match=words):
            metrics.read_metrics(tmp_path / name)


def test_a_learning_curve_is_a_picture_and_never_ends_a_run(tmp_path, monkeypatch, capsys):
    curve = of_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 2, "evaluation": {"a": 0.5, "b": 0.25}}\n'
        '{"step": 4, "evaluation": {"a": 0.75}}\n')
    assert curve.draw() == str(tmp_path / "learning_curve.png")
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(metrics, "plot_curve", lambda *_: 1 / 0)
    assert curve.draw() is None
    error = capsys.readouterr().err
    assert "learning_curve.png" in error and error.count("\n") == 1
