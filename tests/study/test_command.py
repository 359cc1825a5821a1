"""launch_performance_study.sh: the study end to end, interrupted and continued, its files, wrong use."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from fusion_lab.study import command, report
from fusion_lab.training import errors
from tests.support import PATIENCE, ROOT, code_of, gone, wait_for

FAKE = str(pathlib.Path(__file__).with_name("fake_program.py"))
SMALL = ["--program", FAKE, "--batch-sizes", "2", "--widths", "16 32", "--num-runs", "2", "--no-plots"]
TINY = ["--num-blocks", "1", "--msa-dim", "8", "--pair-dim", "8", "--msa-heads", "2", "--pair-heads", "2",
        "--outer-product-dim", "4"]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """study(*flags, **knobs) runs a study of the fake program in tmp_path; returns its exit code."""
    monkeypatch.chdir(tmp_path)

    def study(*flags, name="s", **knobs):
        monkeypatch.setenv("FAKE", json.dumps(knobs))
        return command.main([*SMALL, "--study-name", name, *map(str, flags)])
    return study


def start(*flags, **knobs):
    """A study of the fake program in a process of its own, in the current directory; `log` names its runs."""
    command_line = [sys.executable, ROOT / "launch_performance_study.py", *SMALL, "--study-name", "s", *flags]
    return subprocess.Popen(command_line, env={**os.environ, "FAKE": json.dumps(dict(knobs, log="log"))},
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def lines_of(directory="s"):
    path = pathlib.Path(directory, "results.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def points_of(directory="s"):
    """{(width, variant): point} of its summary."""
    summary = json.loads(pathlib.Path(directory, "results_summary.json").read_text())
    return {(point["width"], point["variant"]): point for point in summary["points"]}


# The whole thing

@pytest.mark.slow
def test_real_study(tmp_path):
    """Two runs of the real trainer, through the shell script; killed once and continued."""
    out = tmp_path / "study"
    flags = [ROOT / "launch_performance_study.sh", "--batch-sizes", "2", "--seq-lens", "8", "--num-seqs",
             "4", "--num-runs", "2", "--num-steps", "6", "--study-name", out]
    flags, environment = [*flags, "--", *TINY], {**os.environ, "PYTHON": sys.executable}
    killed = subprocess.Popen(flags, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: lines_of(out))
    killed.kill()
    killed.wait()
    before = lines_of(out)
    done = subprocess.run(flags, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines, summary = lines_of(out), json.loads((out / "results_summary.json").read_text())
    assert lines[:len(before)] == before and len(lines) == 2 and all(line["ok"] for line in lines)
    assert [(p["variant"], p["n"]) for p in summary["points"]] == [("baseline", 2), ("fused", 2)]
    for point in summary["points"]:
        assert point["peak_memory_mb"] > 0 and point["launches_per_step"] > 100
        assert point["speedup_low"] <= point["speedup"] <= point["speedup_high"]
    assert {*os.listdir(out)} == {"config.json", "results.jsonl", "results.csv", "results_summary.json",
                                  "report.html", "speedups.png"}
    assert "data:image/png;base64," in (out / "report.html").read_text()


def test_every_shape_runs_once_in_random_order_before_any_runs_again(fake):
    assert fake("--widths", "4 8 12 16 20 24") == 0
    runs = [[line["width"] for line in lines_of() if line["run"] == run] for run in (1, 2)]
    assert [line["run"] for line in lines_of()] == [1] * 6 + [2] * 6
    assert sorted(runs[0]) == sorted(runs[1]) == [4, 8, 12, 16, 20, 24]
    assert runs[0] != runs[1] and runs[0] != sorted(runs[0])


def test_an_ablation_has_each_switch_alone_and_left_out_and_combinations_are_all(fake):
    assert fake("--all-combinations", "--widths", 32, "--num-runs", 1, name="all") == 0
    assert len(points_of("all")) == 8
    assert fake("--ablation", "--widths", 32) == 0
    gains = {name: point["speedup"] for (_, name), point in points_of().items()}
    assert gains == pytest.approx({"baseline": 1, "fused": 2.2, "only-first": 2, "only-second": 1.1,
                                   "only-third": 1, "without-first": 1.1, "without-second": 2,
                                   "without-third": 2.2})


def test_what_is_not_measured_says_why(fake, capsys):
    """A variant without figures ends with its point; a point that is out of memory runs again."""
    assert fake("--variants", "fused only-first", failing=["only-first"], memory_mb=1) == 0
    out, points = capsys.readouterr().out, points_of()
    assert points[16, "only-first"]["reason"] == "broken on purpose" and points[16, "fused"]["n"] == 2
    assert points[32, "fused"]["reason"] == "out of memory: lower --batch-size" in out
    assert "broken on purpose" in pathlib.Path("s/report.html").read_text()
    before = lines_of()
    assert fake("--variants", "fused only-first") == 0
    assert all(line in lines_of() for line in before if line["ok"]) and len(lines_of()) == 4
    assert points_of()[32, "fused"]["n"] == 2 and fake("--variants", "fused only-first", "--dry-run") == 0
    assert "0 points to run" in capsys.readouterr().out


def test_a_study_of_failures_fails(fake, capsys):
    assert fake("--num-runs", 1, memory_mb=0) == 1
    assert "no point could be measured: out of memory" in capsys.readouterr().err
    started = time.monotonic()
    assert fake("--num-runs", 1, "--widths", 16, "--timeout", 1, name="t", seconds=60) == 1
    assert "not done after 1 s" in capsys.readouterr().err and time.monotonic() - started < 30


# Interruption

def test_an_interrupted_study_tells_what_it_found_and_goes_on(fake):
    study = start("--num-runs", "4", seconds=0.5)
    wait_for(lambda: len(lines_of()) >= 2)
    study.send_signal(signal.SIGINT)
    sent = time.monotonic()
    output, errors = study.communicate(timeout=PATIENCE)
    assert study.returncode == 130 and errors.count("\n") == 1 and "continues" in errors
    assert time.monotonic() - sent < 10  # 2 s on a machine with nothing else to do
    assert all(map(gone, pathlib.Path("log").read_text().split())) and points_of() and "fused" in output
    before = lines_of()
    assert 2 <= len(before) < 8 and not [name for name in os.listdir("s") if "running" in name]
    assert fake("--num-runs", 4) == 0
    assert lines_of()[:len(before)] == before and len(lines_of()) == 8


def test_a_line_that_a_kill_cut_short_runs_again_and_a_whole_one_without_its_end_counts(fake):
    assert fake() == 0
    path, before = pathlib.Path("s/results.jsonl"), lines_of()
    path.write_bytes(path.read_bytes() + b'{"batch_size": 2, "wid')
    assert fake() == 0 and fake("--num-runs", 3) == 0
    assert lines_of()[:4] == before and len(lines_of()) == 6
    before = lines_of()
    path.write_bytes(path.read_bytes().rstrip())  # as an editor leaves it
    assert fake("--num-runs", 4) == 0 and lines_of()[:6] == before and len(lines_of()) == 8


@pytest.mark.parametrize("file, content", [
    ("results.jsonl", "nonsense\n"), ("results.jsonl", '{"run": 1}\n'), ("results.jsonl", {"rows": None}),
    ("results.jsonl", {"rows": [{"name": "fused", "median_batch_time": 1.0}]}),
    ("config.json", "["), ("config.json", {"num_runs": "2"}),
    ("config.json", '{"study": {"variants": ["baseline"], "seq_lens": [8]}, "command": "", "created": ""}')])
def test_files_of_another_form_are_one_line(fake, capsys, file, content):
    assert fake() == 0
    path = pathlib.Path("s", file)
    if isinstance(content, dict):  # changes of what is there
        there = json.loads(path.read_text()) if file == "config.json" else lines_of()[0]
        (there["study"] if file == "config.json" else there).update(content)
        content = json.dumps(there) + "\n"
    path.write_text(content)
    for flags in ([], ["--dry-run"]):
        capsys.readouterr()
        assert fake(*flags) == 2
        error = capsys.readouterr().err
        assert file in error and error.count("\n") == 1


def test_more_runs_for_a_finished_study(fake, capsys):
    assert fake() == 0
    before, created = lines_of(), json.loads(pathlib.Path("s/config.json").read_text())["created"]
    assert fake("--num-runs", 1) == 2 and "only grow" in capsys.readouterr().err
    assert fake("--num-runs", 4, "--dry-run") == 0
    assert "4 points to run, 4 finished; about" in capsys.readouterr().out and lines_of() == before
    assert fake("--num-runs", 4) == 0
    assert lines_of()[:4] == before and {point["n"] for point in points_of().values()} == {4}
    config = json.loads(pathlib.Path("s/config.json").read_text())
    assert config["study"]["num_runs"] == 4 and config["created"] == created


# Directories

def test_two_studies_never_mix(fake, capsys, monkeypatch):
    assert fake() == 0
    for flags in (["--widths", 64], ["--variants", "only-first"], ["--", "--seed", "1"]):
        assert fake(*flags) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "there" in error and "now" in error
    os.makedirs("other")
    pathlib.Path("other/precious").touch()
    assert fake(name="other") == 2 and os.listdir("other") == ["precious"]
    study = start("--num-runs", "3", seconds=60)
    wait_for(lambda: os.path.exists("log"))
    assert fake() == 2 and "another run is writing into it" in capsys.readouterr().err
    study.terminate()
    assert study.wait(PATIENCE) == 128 + signal.SIGTERM


def test_figures_are_written_before_the_picture_can_fail(fake, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("a picture")
    monkeypatch.setattr(report, "draw", broken)
    flags = [flag for flag in SMALL if flag != "--no-plots"]
    assert command.main([*flags, "--study-name", "s"]) == 0
    assert capsys.readouterr().err == "warning: no speedups.png: a picture\n"
    assert len(points_of()) == 4 and "<table>" in pathlib.Path("s/report.html").read_text()


# Wrong use

@pytest.mark.parametrize("flags, words", [
    (["--batch-sizes", "2 x"], "--batch-sizes: '2 x'"), (["--widths", "0"], "--widths: '0'"),
    (["--variants", "fussed"], "--variants 'fussed'"), (["--num-runs", "0"], "--num-runs: '0'"),
    (["--device", "cuda:77"], "--device cuda:77"),
    (["--program", "nowhere.py"], "no such Python file"),
    (["--depth", "1"], "--depth 1; flags of fake_program.py go behind --"),
    (["--", "--learning-rate", "-1"], "--learning-rate: -1.0"),
    (["--", "--program", "x.py"], "the study sets it"), (["--", "--batch-size=7"], "the study sets it"),
    (["--", "--disable-first"], "the study sets it"), (["--", "--retune"], "not allowed with"),
    (["--", "--save-checkpoint", "x"], "belongs to training"), (["--", "--frobnicate"], "--frobnicate")])
def test_wrong_use(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = code_of(command.main, "--program", FAKE, *flags)
    error = capsys.readouterr().err
    assert code == (errors.NO_GPU if "cuda" in words else errors.USAGE), error
    assert words in error and error.count("\n") == 1 and not os.listdir(tmp_path)


def test_without_matplotlib(fake, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["--program", FAKE]) == 3
    assert "plots need matplotlib" in capsys.readouterr().err and not os.listdir()


def test_a_dry_run_shows_commands_that_run(fake, capsys):
    assert fake("--dry-run", "--variants", "given", "--", "--disable-first") == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5 and shown[-1].startswith("4 points to run, 0 finished") and not os.listdir()
    command_line = shown[0].partition(": ")[2]
    assert "--disable-first" in command_line
    subprocess.run(f"{command_line} --profile-dir by_hand", shell=True, check=True)
    assert os.listdir("by_hand")
