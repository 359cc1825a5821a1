"""Nothing lost, nothing silently wrong: Ctrl-C, kills, names, earlier results."""
import dataclasses
import io
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
from tests.support import PATIENCE, ROOT

SMALL = ("--num-blocks 1 --msa-dim 8 --pair-dim 8 --msa-heads 2 --pair-heads 2 --outer-product-dim 4 "
         "--num-seqs 4 --seq-len 8 --batch-size 1 --warmup-steps 0 --num-steps 2 --device cpu").split()


def train(directory, *flags):
    return tof.main([*SMALL, "--profile-dir", str(directory / "p"), *map(str, flags)])


def train_small(directory, *flags, data):
    """The small program, with other data."""
    return tof.main([*"--width 4 --num-steps 2 --warmup-steps 0 --device cpu --profile-dir".split(),
                     str(directory / "p"), *map(str, flags)],
                    dataclasses.replace(SMALL_PROGRAM, data=data))


class Unlucky(Numbers):
    def evaluate(self, trainer, stop, final=False):
        if final:
            raise RuntimeError("no map today")


def test_a_failing_evaluation_leaves_the_summary(tmp_path):
    with pytest.raises(RuntimeError, match="no map today"):
        train_small(tmp_path, data=Unlucky)
    summary, = (tmp_path / "p").glob("performance_summary*.json")
    assert json.loads(summary.read_text())["training_params"]["num_steps"] == 2


@pytest.mark.parametrize("text", ['{"version": "v1"', '{"performance_summary": null}',
                                  '{"performance_summary": {"avg_training_speed": 1e400}}'])
def test_an_earlier_summary_is_judged_before_the_training(text, tmp_path, capsys):
    (tmp_path / "v1.json").write_text(text)
    assert train(tmp_path, "--compare-with-v1", tmp_path / "v1.json") == 2
    error = capsys.readouterr().err
    assert "v1.json" in error and error.count("\n") == 1 and not (tmp_path / "p").exists()


def written(stream):
    stream.seek(0)
    return stream.buffer.read().decode(errors="surrogateescape")


def test_names_of_any_bytes(tmp_path, monkeypatch):
    """Where the terminal takes UTF-8 only: names that are none, that break lines, that are mathematics."""
    pytest.importorskip("gemmi")
    from tests.proteins.structures import model
    place = tmp_path / os.fsdecode(b"dir \xe9\nx")
    place.mkdir()
    for name, letters in ((b"a$^$b", "MKTAYIAKQRQISFVKSHFS"), (b"\xe9\n", "GSWEDLKRTPYCHNMQVIFA")):
        (place / os.fsdecode(name + b".a3m")).write_text(f">q\n{letters}\n")
        (place / os.fsdecode(name + b".pdb")).write_text("\n".join([*model(letters), "END", ""]))
    (place / os.fsdecode(b"\xe8\n.a3m")).touch()
    flags = [*SMALL, "--data", str(place), "--profile-dir", str(place / "p"), "--save-checkpoint",
             str(place / "c.pt")]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8", "strict"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace"))
    assert tof.main([*flags, "--holdout", "a$^$b", "--plot-contacts", str(place / "maps")]) == 0
    text, error = written(sys.stdout), written(sys.stderr)
    assert error == ""
    assert r"\udce8\n.a3m" in text  # left out, on one line
    assert json.loads(text.splitlines()[-1])["summary_file"] == str(place / "p/performance_summary_v2.json")
    assert (place / "maps" / "a$^$b.png").exists()
    assert tof.main([*flags, "--holdout", os.fsdecode(b"\xff")]) == 2
    error = written(sys.stderr)
    assert error.count("\n") == 1 and r"--holdout \udcff: no such family in" in error and r"\udce9\n" in error


# --- Files -------------------------------------------------------------------------------------------------

FOREIGN = {"victim.a3m": b">q\nMKTAYIAK\n", "other.pt": None, "empty.pt": b""}


class Choosing(Numbers):
    chooses = True

    def evaluate(self, trainer, stop, final=False):
        return Evaluation("better and better", {}, score=trainer.step_number)


class Worsening(Choosing):
    def evaluate(self, trainer, stop, final=False):
        return Evaluation("worse and worse", {}, score=-trainer.step_number)


def train_chooser(directory, *flags, data=Choosing):
    """With evaluations that choose."""
    return train_small(directory, *flags, data=data)


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


def test_checkpoints_in_the_run_s_own_directory(tmp_path, capsys):
    place = tmp_path / "p"
    for force in ((), ("--force",)):  # the second sets the whole first run aside
        assert train_chooser(tmp_path, "--save-checkpoint", place / "c.pt", *force) == 0
        assert (place / "c.pt").exists() and not list(place.glob("*.lock")) and not list(place.glob("*.old*"))
    assert train_chooser(tmp_path, "--save-checkpoint", place / "metrics.jsonl", "--force") == 2
    assert "metrics.jsonl" in capsys.readouterr().err and len(os.listdir(tmp_path)) == 2


def test_a_start_that_is_refused_moves_nothing(tmp_path):
    path, foreign = tmp_path / "c.pt", tmp_path / "x.pt"
    assert train_chooser(tmp_path, "--save-checkpoint", path) == 0
    foreign.write_bytes(b"mine")
    for more in ((), ("--save-best", foreign, "--force")):  # the directory is not empty; a file is foreign
        assert train_chooser(tmp_path, "--save-checkpoint", path, *more) == 2
        assert sorted(os.listdir(tmp_path)) == ["c.pt", "p", "x.pt"] and foreign.read_bytes() == b"mine"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 damaged", "a directory", "foreign"])
def test_a_file_that_cannot_be_resumed_is_one_line(content, tmp_path, capsys):
    path = tmp_path / "c.pt"
    if content == "a directory":
        path.mkdir()
    elif content == "foreign":
        torch.save(dict(weight=torch.zeros(3)), path)
    else:
        path.write_bytes(content)
    assert train(tmp_path, "--resume", path) == 2
    error = capsys.readouterr().err
    assert "c.pt" in error and error.count("\n") == 1 and os.listdir(tmp_path) == ["c.pt"]


@pytest.fixture
def first_run(tmp_path):
    """A run in another process that goes on until the test ends."""
    command = [sys.executable, "-u", str(ROOT / "tiny_openfold_v2.py"), *SMALL, "--num-steps", "100000",
               "--log-every", "1", "--profile-dir", str(tmp_path / "p"), "--save-checkpoint",
               str(tmp_path / "c.pt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("Step ") for line in process.stdout)
            yield process
        finally:
            process.kill()


def test_a_second_run_in_the_same_directory_or_file_is_refused(first_run, tmp_path, capsys):
    """Even by force; once the first one was killed, nothing is in the way."""
    free = tmp_path / "free"
    for place, flags in ((tmp_path, ["--force"]), (tmp_path, []),
                         (free, ["--save-checkpoint", tmp_path / "c.pt"])):
        assert train(place, *flags) == 2
        error = capsys.readouterr().err
        assert "another run is writing into it" in error and error.count("\n") == 1
    assert first_run.poll() is None and not list(tmp_path.glob("*.old-*"))
    first_run.kill()
    first_run.wait(PATIENCE)
    assert train(tmp_path, "--force", "--save-checkpoint", tmp_path / "c.pt") == 0


# --- Ctrl-C and kills --------------------------------------------------------------------------------------

PROGRAMS = {  # a program, and a module that it imports after quiet()
    "run_pytorch_profiler.py": "torch", "profile_summary.py": "csv", "run_rocprofv3.sh": "csv",
    "launch_performance_study.sh": "torch"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_while_modules_are_imported(program, tmp_path):
    (tmp_path / f"{PROGRAMS[program]}.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(9)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHON": sys.executable}
    command = [str(ROOT / program)] if program.endswith(".sh") else [sys.executable, str(ROOT / program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 130 and done.stderr == "interrupted\n"


@pytest.mark.slow
def test_results_of_an_interrupted_program_are_whole(tmp_path):
    """The second Ctrl-C comes at once, in the middle of whatever the first one began."""
    path = tmp_path / "c.pt"
    command = [sys.executable, "-u", str(ROOT / "tiny_openfold_v2.py"), *SMALL, "--num-steps", "100000",
               "--log-every", "1", "--profile-dir", str(tmp_path / "p"), "--save-checkpoint", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("Step ") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    if path.exists():
        assert read_checkpoint(path, tof.PROGRAM, tof.PROGRAM.settings(
            num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4).model)
    assert not list(tmp_path.rglob("*.part"))
