"""metrics.jsonl of a resumed run: the lines that its checkpoint knows of, once, and none of another run."""
import json
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.measuring.metrics import Metrics
from tests.second_program import PROGRAM as SECOND


def line(step, norm=0.5, **more):
    return json.dumps(dict(step=step, loss=2.0, learning_rate=1e-3, gradient_norm=norm, **more)) + "\n"


def evaluation(step, score=0.5):
    return json.dumps(dict(step=step, evaluation=dict(score=score))) + "\n"


def resumed(directory, content, step=4, evaluated=2, norm=0.5):
    """What becomes of a file with this content where a checkpoint continues, and what is set aside."""
    path = directory / "metrics.jsonl"
    path.write_text("".join(content))
    (directory / "learning_curve.png").write_text("curve")
    trainer = SimpleNamespace(step_number=step, evaluated=evaluated, gradient_norm=torch.tensor(norm),
                              training=SimpleNamespace(resume="c.pt"))
    Metrics(SECOND.settings(profile_dir=str(directory), resume="c.pt"), trainer=trainer)
    aside = [kept.read_text() for kept in directory.glob("metrics.jsonl.old-*")]
    return path.read_text() if path.exists() else None, *aside


KNOWN = [line(1), line(2), evaluation(2), line(3), line(4)]


@pytest.mark.parametrize("later, aside", [
    ([], False), ([evaluation(4, 0.1)], False), ([line(5)], True), ([evaluation(4), line(5), line(6)], True),
    (['{"step": 5, "lo'], False), (["nonsense\n"], True), ([line(4), evaluation(2)], False)])
def test_what_comes_again_is_cut(later, aside, tmp_path):
    """Where steps go, which another run may have gone on from, the file is kept."""
    found = resumed(tmp_path, KNOWN + later)
    assert found == ("".join(KNOWN), *["".join(KNOWN + later)] * aside)
    assert (tmp_path / "learning_curve.png").read_text() == "curve"


@pytest.mark.parametrize("content, norm", [(KNOWN, 0.25), (KNOWN[:4], 0.5), ([], 0.5)])
def test_the_file_of_another_run_is_set_aside(content, norm, tmp_path, capsys):
    assert resumed(tmp_path, content, norm=norm) == (None, "".join(content))
    assert capsys.readouterr().out == (
        f"{tmp_path / 'metrics.jsonl'}: of another run than c.pt; it is set aside\n")
    assert not (tmp_path / "learning_curve.png").exists()


def test_norms_that_json_cannot_hold_and_old_checkpoints(tmp_path):
    content = [*KNOWN[:4], line(4, norm=None)]
    assert resumed(tmp_path, content, norm=float("inf")) == ("".join(content),)
    assert resumed(tmp_path, KNOWN[:2], norm=0.0) == ("".join(KNOWN[:2]),)  # has no norm
