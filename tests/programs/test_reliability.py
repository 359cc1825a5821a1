"""Nothing lost: earlier results, other people's files, two runs at once, a second Ctrl-C."""
import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training.checkpoints import read_checkpoint
from fusion_lab.training.evaluations import Evaluation
from tests.second_program import PROGRAM as SMALL_PROGRAM
from tests.second_program import Numbers
from tests.support import PATIENCE, ROOT, last_json

SMALL = ("--num-blocks 1 --msa-dim 8 --pair-dim 8 --msa-heads 2 --pair-heads 2 --outer-product-dim 4 "
         "--num-seqs 4 --seq-len 8 --batch-size 1 --warmup-steps 0 --num-steps 2 --device cpu").split()


def train(directory, *flags):
    return tof.main([*SMALL, "--profile-dir", str(directory / "p"), *map(str, flags)])


@pytest.mark.parametrize("text", ['{"version": "v1"', '{"performance_summary": null}',
                                  '{"performance_summary": {"avg_training_speed": 1e400}}'])
def test_an_earlier_summary_is_judged_before_the_training(text, tmp_path, capsys):
    (tmp_path / "v1.json").write_text(text)
    assert train(tmp_path, "--compare-with-v1", tmp_path / "v1.json") == 2
    error = capsys.readouterr().err
    assert "v1.json" in error and error.count("\n") == 1 and not (tmp_path / "p").exists()


FOREIGN = {"victim.a3m": b">q\nMKTAYIAK\n", "other.pt": None, "empty.pt": b""}


class Choosing(Numbers):
    chooses = True

    def evaluate(self, trainer, stop):
        return Evaluation("better and better", {}, score=trainer.step_number)


class Worsening(Choosing):
    def evaluate(self, trainer, stop):
        return Evaluation("worse and worse", {}, score=-trainer.step_number)


def train_chooser(directory, *flags, data=Choosing):
    """The small program, with evaluations that choose."""
    return tof.main([*"--width 4 --num-steps 2 --warmup-steps 0 --device cpu --profile-dir".split(),
                     str(directory / "p"), *map(str, flags)],
                    dataclasses.replace(SMALL_PROGRAM, data=data))


class Unlucky(Numbers):
    def evaluate(self, trainer, stop):
        raise RuntimeError("no map today")


def test_a_failing_evaluation_leaves_the_summary(tmp_path):
    with pytest.raises(RuntimeError, match="no map today"):
        train_chooser(tmp_path, data=Unlucky)
    summary, = (tmp_path / "p").glob("performance_summary*.json")
    assert json.loads(summary.read_text())["training_params"]["num_steps"] == 2


@pytest.mark.parametrize("flag", ["--save-checkpoint", "--save-best"])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_checkpoint_is_never_overwritten(flag, name, tmp_path, capsys):
    """Told before the training, in one line."""
    path, content = tmp_path / name, FOREIGN[name]
    if content is None:  # a checkpoint of another program
        torch.save(dict(format="tiny_openfold_v2 checkpoint 1", step=1), path)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    assert train_chooser(tmp_path, flag, path) == 2
    error = capsys.readouterr().err
    assert flag in error and name in error and error.count("\n") == 1
    assert path.read_bytes() == before and os.listdir(tmp_path) == [name]


def test_checkpoints_of_an_earlier_run_are_set_aside(tmp_path, capsys):
    paths = tmp_path / "c.pt", tmp_path / "b.pt"
    flags = "--save-checkpoint", paths[0], "--save-best", paths[1]
    assert train_chooser(tmp_path / "a", *flags) == 0
    before = [path.read_bytes() for path in paths]
    assert train_chooser(tmp_path / "b", *flags, "--seed", 1) == 0
    out = capsys.readouterr().out
    for path, content in zip(paths, before, strict=True):
        old, = tmp_path.glob(f"{path.name}.old-*")
        assert old.name in out and old.read_bytes() == content != path.read_bytes()


def test_the_best_weights_of_the_run_that_is_resumed_stay(tmp_path):
    """Of another run they are set aside, as ever."""
    more = "--eval-every", 1, "--save-checkpoint", tmp_path / "c.pt", "--save-best", tmp_path / "b.pt"
    assert train_chooser(tmp_path, *more, data=Worsening) == 0
    best = (tmp_path / "b.pt").read_bytes()
    more += "--resume", tmp_path / "c.pt"
    assert train_chooser(tmp_path, *more, "--num-steps", 3, data=Worsening) == 0
    assert (tmp_path / "b.pt").read_bytes() == best and sorted(os.listdir(tmp_path)) == ["b.pt", "c.pt", "p"]
    saved = torch.load(tmp_path / "b.pt")
    torch.save(dict(saved, best=dict(saved["best"], score=-7)), tmp_path / "b.pt")
    assert train_chooser(tmp_path, *more, "--num-steps", 4, data=Worsening) == 0
    assert len(list(tmp_path.glob("b.pt.old-*"))) == 1


def test_checkpoints_in_the_run_s_own_directory(tmp_path):
    place = tmp_path / "p"
    for force in ((), ("--force",)):  # the second sets the whole first run aside
        assert train_chooser(tmp_path, "--save-checkpoint", place / "c.pt", *force) == 0
        assert (place / "c.pt").exists() and not list(place.glob("*.lock")) and not list(place.glob("*.old*"))


def test_a_start_that_is_refused_moves_nothing(tmp_path):
    path, foreign = tmp_path / "c.pt", tmp_path / "x.pt"
    assert train_chooser(tmp_path, "--save-checkpoint", path) == 0
    foreign.write_bytes(b"mine")
    for more in ((), ("--save-best", foreign, "--force")):  # the directory is not empty; a file is foreign
        assert train_chooser(tmp_path, "--save-checkpoint", path, *more) == 2
        assert sorted(os.listdir(tmp_path)) == ["c.pt", "p", "x.pt"] and foreign.read_bytes() == b"mine"


@pytest.fixture
def endless(tmp_path):
    """A run in another process that has made its first step and goes on."""
    command = [sys.executable, "-u", str(ROOT / "tiny_openfold_v2.py"), *SMALL, "--num-steps", "100000",
               "--log-every", "1", "--profile-dir", str(tmp_path / "p"), "--save-checkpoint",
               str(tmp_path / "c.pt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("Step ") for line in process.stdout)
            yield process
        finally:
            process.kill()


def test_two_runs_never_mix_and_a_signal_finishes_the_step_and_saves(endless, tmp_path, capsys):
    """A second run in the directory or with the checkpoint of the first is refused, by force, too; once the
    first has ended, nothing is in the way."""
    for place, flags in ((tmp_path, ["--force"]), (tmp_path, []),
                         (tmp_path / "free", ["--save-checkpoint", tmp_path / "c.pt"])):
        assert train(place, *flags) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert endless.poll() is None and not list(tmp_path.glob("*.old-*"))
    endless.send_signal(signal.SIGTERM)
    out, err = endless.communicate(timeout=PATIENCE)
    assert endless.returncode == 143 and "Traceback" not in err
    done = torch.load(tmp_path / "c.pt", weights_only=True)["step"]
    assert done == last_json(out)["performance_summary"]["total_samples"] > 0
    assert f"Interrupted at step {done} of 100000\n" in out and "c.pt --num-steps 100000\n" in out
    assert sorted(os.listdir(tmp_path)) == ["c.pt", "free", "p"]  # no lock, no half a file
    assert train(tmp_path, "--force", "--save-checkpoint", tmp_path / "c.pt") == 0


@pytest.mark.slow
def test_results_of_a_run_that_is_interrupted_twice_are_whole(endless, tmp_path):
    """The second Ctrl-C comes at once, in the middle of whatever the first one began."""
    endless.send_signal(signal.SIGINT)
    endless.send_signal(signal.SIGINT)
    _, err = endless.communicate(timeout=PATIENCE)
    assert endless.returncode == 130 and "Traceback" not in err
    if (tmp_path / "c.pt").exists():
        assert read_checkpoint(tmp_path / "c.pt", tof.PROGRAM, tof.PROGRAM.settings(
            num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4).model)
    assert not list(tmp_path.rglob("*.part"))
