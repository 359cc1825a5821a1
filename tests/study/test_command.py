"""launch_performance_study.sh: the study end to end, interrupted and continued, its files, wrong use."""
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from fusion_lab.study import command, run
from fusion_lab.study.design import Point
from tests.study.study_parts import SHAPE, row, small_study, study_of, summary_of
from tests.support import PATIENCE, ROOT, gone, wait_for

FAKE = str(pathlib.Path(__file__).with_name("fake_trainer.py"))
TINY = ["--num-blocks", "1", "--msa-dim", "8", "--pair-dim", "8", "--msa-heads", "2", "--pair-heads", "2",
        "--outer-product-dim", "4"]
SMALL = ["--batch-sizes", "2", "--seq-lens", "32", "--num-runs", "2", "--no-plots"]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """study(*flags, **knobs) runs a study of the fake trainer in tmp_path; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STUDY_TEST_TRAINER", FAKE)

    def study(*flags, name="s", **knobs):
        monkeypatch.setenv("FAKE_TRAINER", json.dumps(knobs))
        return command.main(["--study-name", name, *map(str, flags)])
    return study


def rows_of(directory="s"):
    lines = pathlib.Path(directory, "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def start(*flags, **knobs):
    """A study of the fake trainer in a process of its own, in the current directory, with a log of runs."""
    program = [sys.executable, ROOT / "launch_performance_study.py"]
    return subprocess.Popen([*program, *flags, "--study-name", "s"], text=True,
                            env={**os.environ, "FAKE_TRAINER": json.dumps(dict(knobs, log="log"))},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def count_lines(path):
    return pathlib.Path(path).read_bytes().count(b"\n") if os.path.exists(path) else 0


def pids():
    """Of all runs that the log names."""
    return [line.split()[0] for line in pathlib.Path("log").read_text().splitlines()]


# The whole thing

@pytest.mark.slow
def test_real_study(tmp_path):
    """Two settings, two runs, the real trainer, through the shell script. Two shapes: test_second_program."""
    out = tmp_path / "study"
    done = subprocess.run(
        [ROOT / "launch_performance_study.sh", "--batch-sizes", "2", "--seq-lens", "8", "--num-seqs", "4",
         "--num-runs", "2", "--num-steps", "3", "--warmup-steps", "1", "--study-name", out, "--", *TINY],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary, rows = summary_of(out), rows_of(out)
    assert len(rows) == 4 and all(row["status"] == "ok" for row in rows)
    assert [(p["batch_size"], p["setting"], p["n"]) for p in summary["points"]] == [
        (2, "baseline", 2), (2, "fused", 2)]
    for point in summary["points"]:
        assert point["peak_memory_mb"] > 0 and point["launches_per_step"] > 100
        assert point["speedup_low"] <= point["speedup"] <= point["speedup_high"]
    assert {"config.json", "results.csv", "report.html", "speedup_heat_map.png"} <= set(os.listdir(out))
    assert not {"running", "logs"} & set(os.listdir(out))
    assert (out / "results.csv").read_text().count("\n") == 3
    assert "[4/4]" in done.stdout and "left 0 s" in done.stdout


def test_points_run_in_the_planned_order(fake):
    settings = ("baseline", "fused", "only-flash-attention", "only-opm-fusion")
    assert fake(*SMALL, "--settings", " ".join(settings)) == 0
    plan = study_of((2,), (32,), (16,), settings=settings, seed=42).points()
    assert [(row["setting"], row["run"]) for row in rows_of()] == [(p.setting, p.run) for p in plan]


def test_an_ablation_has_a_gain_for_each_switch(fake):
    faster = {"--enable-qkv-fusion-msa": 2.0, "--enable-flash-attention": 1.25}
    assert fake(*SMALL, "--all-combinations", "--ablation", "--switches", "qkv-fusion-msa flash-attention",
                "--settings", "baseline", faster=faster, noise=0.001) == 0
    gains = {(entry["switch"], kind): entry[kind]["factor"] for entry in summary_of()["ablation"]
             for kind in ("alone", "last")}
    assert gains == {(f"{name[9:]}", kind): pytest.approx(factor, rel=0.01)
                     for name, factor in faster.items() for kind in ("alone", "last")}


def test_point_that_fails(fake, capsys):
    flags = [*SMALL, "--settings", "baseline fused only-flash-attention"]
    assert fake(*flags, crash=["--enable-flash-attention"], memory_mb=17) == 0
    assert "n/a" not in capsys.readouterr().out
    by_setting = {point["setting"]: point for point in summary_of()["points"]}
    assert by_setting["only-flash-attention"]["reason"] == "failed: broken on purpose"
    assert by_setting["baseline"]["reason"] == "out of memory: lower --batch-size"
    assert by_setting["fused"]["n"] == 2 and by_setting["fused"]["speedup"] is None
    assert "broken on purpose" in pathlib.Path("s/report.html").read_text()
    logs = list(pathlib.Path("s/logs").iterdir())
    assert len(logs) == 4 and all("error: " in log.read_text() for log in logs)
    before = rows_of()
    assert fake(*flags) == 0 and len(rows_of()) == 6 + 4  # who continues runs what has failed again
    assert rows_of()[:6] == before and [point["n"] for point in summary_of()["points"]] == [2, 2, 2]


def test_reason_is_the_error_and_not_the_advice_after_it(tmp_path):
    log, name = tmp_path / "stderr.txt", "tiny_openfold_v2.py"
    log.write_text("Traceback\n  File\ntorch.AcceleratorError: CUDA error: out of memory\nSearch for it.\n")
    assert run.last_words(log, name) == "torch.AcceleratorError: CUDA error: out of memory"
    log.write_text(f"AttributeError: early\n{name}: error: out of memory: lower --batch-size\n\n")
    assert run.last_words(log, name) == "out of memory: lower --batch-size"


def test_timeout(fake, capsys):
    assert fake(*SMALL, "--num-runs", 1, "--settings", "fused", "--timeout", "0.5", seconds=60) == 1
    assert rows_of()[0]["status"] == "timeout" and rows_of()[0]["reason"] == "not done after 0.5 s"
    assert "not done after 0.5 s" in capsys.readouterr().err


def test_what_is_left_is_guessed_from_what_was_run():
    """Runs of a setting take their mean; others 6 s, or 66 s where they compile."""
    study = small_study(settings=("baseline", "fused", "only-torch-compile"))
    points = [Point(SHAPE, name, run) for name in study.settings for run in (1, 2)]
    rows = [dict(row("fused", 1, 0.01), seconds=seconds) for seconds in (10, 30)]
    assert run.seconds_left(study, points, rows) == 2 * 6 + 2 * 20 + 2 * 66
    assert [run.duration(s) for s in (99.4, 100, 5999, 6000)] == ["99 s", "2 min", "100 min", "1.7 h"]


# Interruption

def test_interrupt_keeps_results_and_resumes(fake):
    study = start(*SMALL, "--num-runs", "4", seconds=0.3)
    wait_for(lambda: count_lines("s/results.jsonl") >= 2)
    study.send_signal(signal.SIGINT)
    output, errors = study.communicate(timeout=PATIENCE)
    assert study.returncode == 130 and "continues" in errors and errors.count("\n") == 1
    assert all(map(gone, pids())) and not os.path.exists("s/running")
    before = rows_of()
    assert 2 <= len(before) < 8
    assert fake(*SMALL, "--num-runs", 4) == 0
    assert rows_of()[:len(before)] == before and len(rows_of()) == 8


def test_a_study_in_a_directory_of_any_name_is_continued(fake):
    name = os.fsdecode(b"st\xe9 \ny")
    for runs in (1, 2):
        assert fake(*SMALL, "--num-runs", runs, "--settings", "fused", name=name) == 0
    assert len(rows_of(name)) == 2 and b"st\xe9" in pathlib.Path(name, "report.html").read_bytes()


@pytest.mark.slow
def test_a_killed_study_is_continued(fake):
    study = start(*SMALL, "--num-runs", "3", seconds=0.5)
    wait_for(lambda: count_lines("s/results.jsonl") >= 1 and count_lines("log") >= 2)
    study.kill()
    study.communicate(timeout=PATIENCE)
    before = rows_of()
    with open("s/results.jsonl", "ab") as file:
        file.write(b'{"batch_size": 2, "seq_len": 3')  # what a kill in the middle of a write leaves
    assert fake(*SMALL, "--num-runs", 3) == 0
    assert rows_of()[:len(before)] == before and len(rows_of()) == 6
    wait_for(lambda: all(map(gone, pids())))  # its run ends with its point


def test_one_study_at_a_time(fake, capsys):
    assert fake(*SMALL) == 0
    held = os.open("s", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert fake(*SMALL) == 2
    assert capsys.readouterr().err.strip().endswith("s: another run is writing into it; name another one")
    os.close(held)
    assert fake(*SMALL) == 0


def test_figures_are_written_before_pictures_can_fail(fake, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("a picture")
    monkeypatch.setattr(command, "draw", broken)
    assert fake(*SMALL[:-1]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: no pictures in report.html: a picture\n" and "Report: " in out
    assert len(summary_of()["points"]) == 2
    assert pathlib.Path("s/results.csv").read_text().count("\n") == 3
    assert "<table id=\"points\">" in pathlib.Path("s/report.html").read_text()


def test_directories(fake, capsys):
    assert fake(*SMALL) == 0
    assert fake(*SMALL, "--seq-lens", "64") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "seq_lens [32] there, [64] now" in error
    os.makedirs("other")
    pathlib.Path("other/precious").touch()
    assert fake(*SMALL, name="other") == 2 and os.listdir("other") == ["precious"]
    pathlib.Path("s/results_summary.json").unlink()
    assert fake("--report-only", "--no-plots") == 0 and len(summary_of()["points"]) == 2
    with open("s/results.jsonl", "r+b") as file:
        file.write(b"nonsense")
    for flags in (SMALL, [*SMALL, "--dry-run"], ["--report-only"]):
        capsys.readouterr()
        assert fake(*flags) == 2
        error = capsys.readouterr().err
        assert "line 1 is not the result of a run" in error and error.count("\n") == 1


def test_more_runs_for_a_finished_study(fake, capsys):
    assert fake(*SMALL) == 0
    before, created = rows_of(), json.loads(pathlib.Path("s/config.json").read_text())["created"]
    assert fake(*SMALL, "--num-runs", 3, "--seq-lens", "64") == 2
    assert fake(*SMALL, "--num-runs", 1) == 2 and "only grow" in capsys.readouterr().err
    assert fake(*SMALL, "--num-runs", 4, "--dry-run") == 0
    assert "4 points to run, 4 finished" in capsys.readouterr().out
    assert json.loads(pathlib.Path("s/config.json").read_text())["study"]["num_runs"] == 2
    assert fake(*SMALL, "--num-runs", 4) == 0
    assert rows_of()[:4] == before and [point["n"] for point in summary_of()["points"]] == [4, 4]
    config = json.loads(pathlib.Path("s/config.json").read_text())
    assert config["study"]["num_runs"] == 4 and "--num-runs 4" in config["command"]
    assert config["created"] == created and fake(*SMALL) == 2


def test_default_directory_is_moved_aside(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(time, "strftime", lambda form: form.replace("%Y%m%d_%H%M%S", "now"))
    for _ in range(2):
        assert command.main([*SMALL, "--num-runs", "1"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["performance_study_now", "performance_study_now.old-now"]


def test_full_disk(fake, capsys, monkeypatch):
    fake(*SMALL)
    os.unlink("s/results.jsonl")
    os.symlink("/dev/full", "s/results.jsonl")
    capsys.readouterr()
    monkeypatch.setattr(command.Results, "load", lambda self, mend=True: None)
    assert fake(*SMALL) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "No space left on device" in error


# Earlier studies, other programs

def test_old_study_continues(fake):
    """What its files hold beyond ours does not matter: a mode, turns; a program is not named there."""
    assert fake(*SMALL) == 0
    config = json.loads(pathlib.Path("s/config.json").read_text())
    del config["study"]["program"]
    config["study"]["mode"] = "study"
    pathlib.Path("s/config.json").write_text(json.dumps(config))
    rows = [dict(row, turn=1) for row in rows_of()]
    pathlib.Path("s/results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert fake(*SMALL, "--num-runs", 3) == 0
    assert rows_of()[:4] == rows and [point["n"] for point in summary_of()["points"]] == [3, 3]


@pytest.mark.slow
def test_second_program(fake, capsys):
    """Its own axes, switches, file names and error prefix, and the default sizes of its config."""
    program, knobs = "tests/second_program.py", dict(suffix="mlp", program="second_program.py")
    flags = ["--program", ROOT / program, "--num-runs", 2]
    assert fake(*flags, "--batch-sizes", 2, "--widths", "16 32", "--settings", "baseline all only-fused-relu",
                **knobs) == 0
    summary, config = summary_of(), json.loads(pathlib.Path("s/config.json").read_text())["study"]
    assert config["program"] == program and config["widths"] == [16, 32]
    assert [(p["batch_size"], p["width"], p["setting"], p["n"]) for p in summary["points"]] == [
        (2, width, setting, 2) for width in (16, 32) for setting in ("baseline", "all", "fused")]
    assert pathlib.Path("s/results.csv").read_text().startswith("batch_size,width,setting,")
    assert "Step time against width" in pathlib.Path("s/report.html").read_text()
    assert fake(*flags, "--widths", 16, "--settings", "all", name="f", crash=["--enable-all-fusion"],
                **knobs) == 1
    assert "measured: failed: broken on purpose" in capsys.readouterr().err
    assert fake("--report-only") == 2
    assert f"a study of another program; add --program {program}" in capsys.readouterr().err
    assert fake("--report-only", "--program", ROOT / program) == 0
    assert fake(*flags, "--dry-run", name="t") == 0 and "B 4 W 32 baseline run 1" in capsys.readouterr().out


# Wrong use

@pytest.mark.parametrize("flags, words", [
    (["--batch-sizes", "2 x"], "--batch-sizes: '2 x'"),
    (["--seq-lens", "0"], "--seq-lens: '0'"),
    (["--seq-lens", " "], "--seq-lens: ' '"),
    (["--settings", "fussed"], "'fussed' is no setting"),
    (["--settings", "baseline", "--no-baseline"], "zero points"),
    (["--settings", ""], "--settings: ''"),
    (["--switches", "speed"], "--switches: 'speed'"),
    (["--switches", ""], "--switches: ''"),
    (["--num-runs", "0"], "--num-runs: '0'"),
    (["--timeout", "0"], "--timeout: '0'"),
    (["--device", "cuda:77"], "--device cuda:77: there is no such GPU"),
    (["--report-only"], "--report-only: needs --study-name"),
    (["--num-runs", "10000000"], "--num-runs: 10000000: makes 20000000 points; 1000000 are the limit"),
    (["--program", "nowhere.py"], "nowhere.py: no such Python file"),
    (["--num-blocks", "1"], "arguments: --num-blocks 1; flags of tiny_openfold_v2.py go behind --"),
    (["--", "--program", "x.py"], "--program after --: the study sets it"),
    (["--", "--pair-dim", "7"], "--pair-heads: 4: must divide"),
    (["--", "--batch-size", "7"], "--batch-size after --: the study sets it"),
    (["--", "--disable-flash-attention"], "the study sets it"),
    (["--", "--frobnicate"], "--frobnicate")])
def test_wrong_use(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = command.main(flags)
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    assert code == (4 if "no such GPU" in words else 2)
    assert words in error and error.count("\n") == 1 and not os.listdir(tmp_path)


def test_without_matplotlib(fake, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert fake("--seq-lens", "32") == 3
    assert "--no-plots" in capsys.readouterr().err and not os.path.exists("s")


def test_dry_run(fake, capsys):
    assert fake(*SMALL, "--dry-run", "--", *TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[-1].startswith("4 points to run, 0 finished; about 24 s")
    assert any("--disable-all-fusion" in line and "--num-blocks 1" in line for line in lines)
    assert not os.path.exists("s")
