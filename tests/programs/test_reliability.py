"""Begun in order, and nothing lost: flags judged before torch, earlier results, other people's files, two
runs at once, signals."""
import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training.evaluations import Evaluation
from tests.second_program import PROGRAM as SMALL_PROGRAM
from tests.second_program import Numbers
from tests.support import PATIENCE, ROOT, last_json, run_program
from tests.tiny import flags_of

pytestmark = pytest.mark.usefixtures("quick_runs")
SMALL = flags_of(batch_size=1, warmup_steps=0, num_steps=2)


def train(directory, *flags):
    return tof.main([*SMALL, "--profile-dir", str(directory), *map(str, flags)])


TRAINER, SESSION, SECOND = "tiny_openfold_v2.py", "run_pytorch_profiler.py", "tests/second_program.py"


def begun(program, *flags, directory, **modules):
    """CompletedProcess of a program which finds modules with these texts in place of others."""
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text)
    return run_program(program, *flags, cwd=directory, env=dict(PYTHONPATH=str(directory)))


@pytest.mark.parametrize("program, flags, code, words", [
    (TRAINER, "--batchsize 3", 2, "--batchsize"), (TRAINER, "--seq-len 0", 2, "--seq-len"),
    (TRAINER, "--compare-fusion --variants foo", 2, "--variants"), (TRAINER, "query.a3m", 2, "--contacts"),
    (TRAINER, "--contacts nofile", 2, "nofile"), (TRAINER, "--contacts . --structure nofile:A", 2, "nofile"),
    (TRAINER, "--resume nofile", 2, "nofile"),
    (TRAINER, "--compare-with-v1 nofile", 2, "nofile"), (TRAINER, "--device gpu", 2, "gpu"),
    (TRAINER, "--help", 0, "--demo"), (SECOND, "--width 0", 2, "--width")])
def test_flags_names_and_paths_are_judged_before_torch_is_imported(program, flags, code, words, tmp_path):
    done = begun(program, *flags.split(), torch="raise SystemExit('torch was imported')", directory=tmp_path)
    assert done.returncode == code and words in done.stdout + done.stderr, done.stderr
    assert code == 0 or done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path):
    code = f"import os, sys; os.rmdir(os.getcwd()); os.execv({sys.executable!r}, ['python', *sys.argv[1:]])"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT / TRAINER)], cwd=tmp_path, check=False,
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "directory" in done.stderr, done.stderr


@pytest.mark.parametrize("program, module", [
    (TRAINER, "torch"), (SECOND, "torch"), (SESSION, "torch"), ("profile_summary.py", "csv"),
    ("run_rocprofv3.sh", "csv"), ("launch_performance_study.sh", "torch")])
def test_ctrl_c_while_modules_are_imported_is_one_line(program, module, tmp_path):
    """Those that take long to load say so first."""
    done = begun(program, *["--num-steps", "1"] * (program in (TRAINER, SECOND)), directory=tmp_path, **{
        module: "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(9)"})
    assert done.returncode == 130 and done.stderr == "interrupted\n"
    assert program not in (TRAINER, SECOND) or "loading PyTorch" in done.stdout


def test_a_second_run_in_the_default_directory_sets_the_first_aside(tmp_path, monkeypatch, capsys):
    """Of one that was named: test_a_start_that_is_refused_moves_nothing."""
    monkeypatch.chdir(tmp_path)
    flags = "--width 4 --num-steps 2 --warmup-steps 0 --device cpu".split()
    assert tof.main(flags, SMALL_PROGRAM) == 0
    before = (tmp_path / "pytorch_profiles_v2/metrics.jsonl").read_bytes()
    assert tof.main(flags, SMALL_PROGRAM) == 0
    old, = tmp_path.glob("pytorch_profiles_v2.old-*")
    assert old.name in capsys.readouterr().out and (old / "metrics.jsonl").read_bytes() == before


FOREIGN = {"victim.a3m": b">q\nMKTAYIAK\n", "other.pt": None, "empty.pt": b""}


class Choosing(Numbers):
    chooses = True

    def evaluate(self, trainer, stop):
        return Evaluation("better and better", {}, score=trainer.step_number)


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


def test_checkpoints_in_the_run_s_own_directory(tmp_path):
    place = tmp_path / "p"
    for force in ((), ("--force",)):  # the second sets the whole first run aside
        assert train_chooser(tmp_path, "--save-checkpoint", place / "c.pt", *force) == 0
        assert (place / "c.pt").exists() and not list(place.glob("*.lock")) and not list(place.glob("*.old*"))


def test_a_start_that_is_refused_moves_nothing(tmp_path):
    path, foreign = tmp_path / "c.pt", tmp_path / "x.pt"
    assert train_chooser(tmp_path, "--save-checkpoint", path) == 0
    foreign.write_bytes(b"mine")
    nowhere = tmp_path / "no" / "such" / "b.pt"
    # The directory is not empty; a file is foreign; a path of directories would be made
    for more in ((), ("--save-best", foreign, "--force"), ("--save-best", nowhere, "--force")):
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
    for place, flags in ((tmp_path / "p", ["--force"]), (tmp_path / "p", []),
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
    (tmp_path / "c.pt.lock").touch()  # as a kill leaves it
    assert train(tmp_path / "p", "--force", "--save-checkpoint", tmp_path / "c.pt") == 0
    assert not (tmp_path / "c.pt.lock").exists()
