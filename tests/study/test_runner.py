"""launch_performance_study.sh: the study end to end, its files and its verdicts."""
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from fusion_lab.study import command, design, directory, runner
from fusion_lab.study.results import Row
from fusion_lab.training.flags import make_parser, read_settings
from tests.study.study_parts import WORDS, study_of, summary_of
from tests.support import PATIENCE, ROOT, gone, state_of, wait_for

FAKE = str(pathlib.Path(__file__).with_name("fake_trainer.py"))
TINY = ["--num-blocks", "1", "--msa-dim", "8", "--pair-dim", "8", "--msa-heads", "2", "--pair-heads", "2",
        "--outer-product-dim", "4"]
SMALL = ["--batch-sizes", "2", "--seq-lens", "32", "--num-runs", "2", "--no-plots"]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """study(*flags, **knobs) runs a study of the fake trainer in tmp_path; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINYOPENFOLD_SCRIPT", FAKE)

    def study(*flags, name="s", **knobs):
        monkeypatch.setenv("FAKE_TRAINER", json.dumps(knobs))
        return command.main(["--study-name", name, *map(str, flags)])
    return study


def rows_of(directory="s"):
    lines = pathlib.Path(directory, "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def start(*flags, **knobs):
    """A study of the fake trainer in a process of its own, in the current directory."""
    program = [sys.executable, ROOT / "fusion_lab" / "start.py", "fusion_lab.study.command"]
    return subprocess.Popen([*program, *flags], text=True,
                            env={**os.environ, "FAKE_TRAINER": json.dumps(knobs)},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def count_lines(path):
    return pathlib.Path(path).read_bytes().count(b"\n") if os.path.exists(path) else 0


# The whole thing

@pytest.mark.slow
def test_real_study(tmp_path):
    """Two settings, two runs, the real trainer, through the shell script. Two shapes: test_second_program."""
    out = tmp_path / "study"
    done = subprocess.run(
        [ROOT / "launch_performance_study.sh", "--batch-sizes", "2", "--seq-lens", "8", "--num-seqs", "4",
         "--num-runs", "2", "--num-steps", "3", "--warmup-steps", "1", "--jobs", "2", "--study-name", out,
         "--", *TINY],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary, rows = summary_of(out), rows_of(out)
    assert len(rows) == 4 and all(row["status"] == "ok" for row in rows)
    assert [(p["batch_size"], p["setting"], p["n"]) for p in summary["points"]] == [
        (2, "baseline", 2), (2, "fused", 2)]
    for point in summary["points"]:
        assert point["peak_memory_mb"] > 0 and point["launches_per_step"] > 100
        assert point["speedup_low"] <= point["speedup"] <= point["speedup_high"]
    assert {"config.json", "results.csv", "report.html", "pareto.png"} <= set(os.listdir(out))
    assert not (out / "running").exists()
    assert (out / "results.csv").read_text().count("\n") == 3
    assert "[4/4]" in done.stdout and "left 0 s" in done.stdout


def test_a_point_that_no_longer_listens_when_its_turn_comes_is_a_row(fake):
    assert fake(*SMALL, "--settings", "fused", "--num-runs", 1, deaf=True) == 1
    row, = rows_of()
    assert row["status"] == "failed" and "has gone" in row["reason"]


def test_point_that_fails(fake, capsys):
    flags = [*SMALL, "--settings", "baseline fused only-flash-attention"]
    assert fake(*flags, crash=["--enable-flash-attention"], memory_mb=17) == 0
    assert "n/a" not in capsys.readouterr().out
    by_setting = {point["setting"]: point for point in summary_of()["points"]}
    assert by_setting["only-flash-attention"]["reason"] == "failed: broken on purpose"
    assert by_setting["baseline"]["reason"] == "out of memory: lower --batch-size"
    assert by_setting["fused"]["n"] == 2 and by_setting["fused"]["speedup"] is None
    assert "broken on purpose" in pathlib.Path("s/report.html").read_text()
    assert len(list(pathlib.Path("s/logs").iterdir())) == 4
    assert fake(*flags) == 0 and len(rows_of()) == 6  # failed points are finished too
    assert fake(*flags, "--retry-failed") == 0
    assert all(row["status"] == "ok" for row in rows_of()) and len(rows_of()) == 6


def test_reason_is_the_error_and_not_the_advice_after_it(tmp_path):
    log, name = tmp_path / "stderr.txt", "tiny_openfold_v2.py"
    log.write_text("Traceback\n  File\ntorch.AcceleratorError: CUDA error: out of memory\nSearch for it.\n")
    assert runner.last_words(log, name) == "torch.AcceleratorError: CUDA error: out of memory"
    log.write_text(f"AttributeError: early\n{name}: error: out of memory: lower --batch-size\n\n")
    assert runner.last_words(log, name) == "out of memory: lower --batch-size"


def test_timeout(fake, capsys):
    assert fake(*SMALL, "--num-runs", 1, "--settings", "fused", "--timeout", "0.5", seconds=60) == 1
    assert rows_of()[0]["status"] == "timeout" and rows_of()[0]["reason"] == "not done after 0.5 s"
    assert capsys.readouterr().err.endswith("no point could be measured: timeout: not done after 0.5 s\n")


@pytest.mark.slow
def test_one_measures_at_a_time_also_on_several_gpus(fake, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert fake(*SMALL, "--num-runs", 3, "--jobs", 3, "--gpus", 2, seconds=0.15, log=str(log)) == 0
    events = [line.split() for line in log.read_text().splitlines()]
    assert len(events) == 12 and {gpu for _, _, gpu, _ in events} == {"4", "6"}
    for (word, pid, *_), (next_word, next_pid, *_) in zip(events[::2], events[1::2], strict=True):
        assert (word, next_word) == ("begin", "end") and pid == next_pid
    assert fake(*SMALL, "--jobs", 3, "--gpus", 4, name="t") == 4 and not os.path.exists("t")
    with pytest.raises(SystemExit, match="2"):
        fake(*SMALL, "--jobs", 3, "--gpus", 2, "--device", "cuda:1", name="t")


def order_of_plan(settings, num_runs):
    return study_of((2,), (32,), (16,), settings=tuple(settings), num_runs=num_runs, seed=42).points()


def flags_of(setting):
    return WORDS.flags(WORDS.parse(setting))


@pytest.mark.slow
def test_measured_in_planned_order(fake, tmp_path):
    """Whatever comes first in the plan starts slowest, so that all others are ready before it."""
    log, settings = tmp_path / "log", ["baseline", "fused", "only-flash-attention", "only-opm-fusion"]
    plan = order_of_plan(settings, 2)
    slow = flags_of(plan[0].setting)[-1:] or ["defaults"]
    assert fake(*SMALL, "--jobs", 4, "--settings", " ".join(settings), starts={slow[0]: 1}, log=str(log)) == 0
    begun = [line.split()[3] for line in log.read_text().splitlines() if line.startswith("begin")]
    assert begun == [point.file_name() for point in plan]
    turns = {Row.read(row, WORDS.axes).point: row["turn"] for row in rows_of()}
    assert sorted(plan, key=turns.get) == plan and sorted(turns.values()) == list(range(1, 9))
    page = pathlib.Path("s/report.html").read_text().replace("\n", " ")
    assert summary_of()["out_of_order"] == 0 and "measured in random order (seed 42)" in page
    rows = rows_of()
    again = [dict(row, turn=20 if row["turn"] == 3 else row["turn"]) for row in rows]
    pathlib.Path("s/results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in again))
    assert fake("--report-only", "--no-plots") == 0 and summary_of()["out_of_order"] == 1
    assert "but for 1 that came later" in pathlib.Path("s/report.html").read_text()
    for row in rows:
        del row["turn"]  # as in studies from before there were turns
    pathlib.Path("s/results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert fake("--report-only", "--no-plots") == 0
    page = pathlib.Path("s/report.html").read_text().replace("\n", " ")
    assert "measured in random order" not in page and "measured as they became ready" in page
    assert fake(*SMALL, "--num-runs", 3, "--settings", " ".join(settings)) == 0
    assert sorted(row["turn"] for row in rows_of()[8:]) == [1, 2, 3, 4]


# Interruption

def test_interrupt_keeps_results_and_resumes(fake, tmp_path):
    study = start(*SMALL, "--num-runs", "4", "--study-name", "s", seconds=0.3)
    wait_for(lambda: count_lines("s/results.jsonl") >= 2)
    study.send_signal(signal.SIGINT)
    output, errors = study.communicate(timeout=PATIENCE)
    assert study.returncode == 130 and "continues" in errors and errors.count("\n") == 1
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
def test_kill_leaves_no_orphans_and_resumes(fake, tmp_path):
    log = tmp_path / "log"
    study = start(*SMALL, "--num-runs", "3", "--jobs", "2", "--study-name", "s", seconds=0.5, log=str(log))
    wait_for(lambda: count_lines("s/results.jsonl") >= 1 and count_lines(log) >= 3)
    study.kill()
    study.communicate(timeout=PATIENCE)
    wait_for(lambda: all(gone(line.split()[1]) for line in log.read_text().splitlines()))
    before = rows_of()
    with open("s/results.jsonl", "ab") as file:
        file.write(b'{"batch_size": 2, "seq_len": 3')  # what a kill in the middle of a write leaves
    assert fake(*SMALL, "--num-runs", 3) == 0
    assert rows_of()[:len(before)] == before and len(rows_of()) == 6


@pytest.mark.slow
def test_kill_leaves_no_stopped_newborns(fake, tmp_path):
    """Processes that are stopped for another one's turn before they have asked to die with their parent."""
    log, settings = tmp_path / "log", ["only-flash-attention", "only-opm-fusion"]
    first, second = (flags_of(point.setting)[-1] for point in order_of_plan(settings, 1))
    study = start(*SMALL, "--num-runs", "1", "--jobs", "2", "--settings", " ".join(settings), "--study-name",
                  "s", after={first: 2}, seconds=30, orphans={second: 60}, log=str(log))
    wait_for(lambda: count_lines(log) == 3)  # the first one measures, the second one and its child are there
    pids = [line.split()[1] for line in log.read_text().splitlines()]
    wait_for(lambda: {state_of(pid) for pid in pids} == {"S", "T"})
    study.kill()
    study.communicate(timeout=PATIENCE)
    wait_for(lambda: all(map(gone, pids)))


def test_one_study_at_a_time(fake, capsys, monkeypatch):
    assert fake(*SMALL) == 0
    held = os.open("s", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(directory, "LOCK_PATIENCE_SECONDS", 0.2)
    assert fake(*SMALL) == 2
    assert capsys.readouterr().err.strip().endswith("s: this study is running already")
    monkeypatch.setattr(directory, "LOCK_PATIENCE_SECONDS", 30)
    threading.Timer(0.5, os.close, [held]).start()  # the killed one's last child lets go late
    assert fake(*SMALL) == 0


def test_figures_are_written_before_pictures_can_fail(fake, monkeypatch, capsys):
    def broken(summary, folder):
        raise RuntimeError("a picture")
    monkeypatch.setattr(directory, "draw", broken)
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
    assert fake(*SMALL) == 2 and "line 1 is not the result of a run" in capsys.readouterr().err


def test_more_runs_for_a_finished_study(fake, capsys):
    assert fake(*SMALL) == 0
    before = rows_of()
    assert fake(*SMALL, "--num-runs", 3, "--seq-lens", "64") == 2
    assert fake(*SMALL, "--num-runs", 1) == 2 and "only grow" in capsys.readouterr().err
    assert fake(*SMALL, "--num-runs", 4, "--dry-run") == 0
    assert json.loads(pathlib.Path("s/config.json").read_text())["study"]["num_runs"] == 2
    assert fake(*SMALL, "--num-runs", 4) == 0
    assert rows_of()[:4] == before and [point["n"] for point in summary_of()["points"]] == [4, 4]
    assert [row["turn"] for row in rows_of()] == list(range(1, 9)) and summary_of()["out_of_order"] == 0
    config = json.loads(pathlib.Path("s/config.json").read_text())
    assert config["study"]["num_runs"] == 4 and "--num-runs 4" in config["command"]
    assert fake(*SMALL) == 2


def test_unreadable_results_are_one_line(fake, capsys):
    assert fake(*SMALL, "--recommend") == 0 and capsys.readouterr()
    good = pathlib.Path("s/results.jsonl").read_text()
    row = json.loads(good.splitlines()[0])
    for broken in (dict(row, median_batch_time=None), {k: v for k, v in row.items() if k != "mfu"},
                   dict(row, status="failed"), dict(row, system=None), dict(row, seconds=None), [row]):
        pathlib.Path("s/results.jsonl").write_text(json.dumps(broken) + "\n")
        for flags in (SMALL, [*SMALL, "--dry-run"], ["--report-only"]):
            assert fake(*flags) == 2
            error = capsys.readouterr().err
            assert "line 1 is not the result of a run" in error and error.count("\n") == 1
    pathlib.Path("s/results.jsonl").write_text(good)
    for content in ("{", "[1]", '{"x": 1}'):
        pathlib.Path("s/accuracy.json").write_text(content)
        assert fake(*SMALL, "--recommend") == 2
        error = capsys.readouterr().err
        assert "accuracy.json: holds no accuracy verdicts" in error and error.count("\n") == 1


def test_default_directory_is_moved_aside(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(directory.time, "strftime",
                        lambda form: form.replace("%Y%m%d_%H%M%S", "now"))
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
    monkeypatch.setattr(directory, "SPARE_BYTES", 2 ** 62)
    assert fake(*SMALL) == 2 and "disk full" in capsys.readouterr().err


# Earlier studies, other programs

OLD_STUDY = ROOT / "benchmarks" / "results" / "study_h200_2026-11-21"  # its config.json names no program


def test_old_study_makes_the_same_results(tmp_path, capsys):
    shutil.copytree(OLD_STUDY, tmp_path / "old")
    assert command.main(["--report-only", "--no-plots", "--study-name", str(tmp_path / "old")]) == 0
    assert "[3.915, 4.050]" in capsys.readouterr().out
    before, after = summary_of(OLD_STUDY), summary_of(tmp_path / "old")
    assert after["study"] == dict(before["study"], program="tiny_openfold_v2.py")
    assert after.keys() == before.keys() and after["machine"] == before["machine"]
    for key in ("points", "scaling"):
        for mine, theirs in zip(after[key], before[key], strict=True):
            assert mine == {name: pytest.approx(value) for name, value in theirs.items()}
    new, old = ((where / "results.csv").read_text().splitlines() for where in (tmp_path / "old", OLD_STUDY))
    assert new[0] == old[0] and len(new) == len(old)


def test_old_study_continues(fake, capsys):
    """Keys that a later version would have are not read, and stay where they are."""
    assert fake(*SMALL, crash=["--disable-all-fusion"]) == 0
    config = json.loads(pathlib.Path("s/config.json").read_text())
    del config["study"]["program"]
    config["later"] = config["study"]["later"] = 1
    pathlib.Path("s/config.json").write_text(json.dumps(config))
    rows = [dict(row, later=1) for row in rows_of()]
    pathlib.Path("s/results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert fake(*SMALL, "--num-runs", 3, "--retry-failed") == 0
    config = json.loads(pathlib.Path("s/config.json").read_text())
    assert config["later"] == config["study"]["later"] == 1 and config["study"]["num_runs"] == 3
    assert [row for row in rows_of() if "later" in row] == [row for row in rows if row["status"] == "ok"]
    assert [point["n"] for point in summary_of()["points"]] == [3, 3]


@pytest.mark.slow
def test_second_program(fake, tmp_path, capsys):
    """Its own axes, switches, file names and error prefix, and the default sizes of its config."""
    program, knobs = "tests/second_program.py", dict(suffix="mlp", program="second_program.py")
    flags = ["--program", ROOT / program, "--num-runs", 2]
    assert fake(*flags, "--batch-sizes", 2, "--widths", "16 32", "--settings", "baseline all only-fused-relu",
                "--recommend", inaccurate=["--enable-all-fusion"], **knobs) == 0
    summary, config = summary_of(), json.loads(pathlib.Path("s/config.json").read_text())["study"]
    assert config["program"] == program and config["widths"] == [16, 32]
    assert [(p["batch_size"], p["width"], p["setting"], p["n"]) for p in summary["points"]] == [
        (2, width, setting, 2) for width in (16, 32) for setting in ("baseline", "all", "fused")]
    recommended = summary["recommendation"]["shapes"][0]
    assert recommended["passed_over"] == ["all: accuracy failed: distances: off by 1"]
    assert recommended["command"].startswith(f"python {program} --batch-size 2 --width 16 ")
    assert pathlib.Path("s/results.csv").read_text().startswith("batch_size,width,setting,")
    assert "Step time against width" in pathlib.Path("s/report.html").read_text()
    assert fake(*flags, "--widths", 16, "--settings", "all", name="f", crash=["--enable-all-fusion"],
                **knobs) == 1
    assert "measured: failed: broken on purpose" in capsys.readouterr().err
    assert fake("--report-only") == 2
    assert f"a study of another program; add --program {program}" in capsys.readouterr().err
    assert fake("--report-only", "--program", ROOT / program) == 0
    assert fake(*flags, "--dry-run", name="t") == 0 and "B 4 W 32 baseline run 1" in capsys.readouterr().out
    reference = ["--check-against", "s/results_summary.json"]
    assert fake(*SMALL, *reference, name="t") == 2
    assert "not the results_summary.json" in capsys.readouterr().err


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
    (["--max-regression", "5x"], "--max-regression: '5x'"),
    (["--max-regression", "5"], "--max-regression: '5': must be a share such as 5% or 0.05"),
    (["--target-memory-usage", "1.5"], "--target-memory-usage: '1.5'"),
    (["--find-batch-size"], "without a GPU needs --memory-limit-mb"),
    (["--min-speedup", "1.3"], "needs --check-against"),
    (["--check-against", "nowhere.json"], "nowhere.json: No such file"),
    (["--device", "cuda:77"], "--device cuda:77: there is no such GPU"),
    (["--report-only"], "--report-only: needs --study-name"),
    (["--num-runs", "10000000"], "--num-runs: 10000000: makes 80000000 points; 1000000 are the limit"),
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


# Settings

def test_settings_have_one_name():
    every = design.combinations([name for name in WORDS.switches if name in WORDS.everything][:5])
    names = [WORDS.name(on) for on in every]
    assert len(set(names)) == len(every) == 32
    assert [WORDS.parse(name) for name in names] == every
    assert WORDS.name(WORDS.parse("without-flash-attention")) in ("without-flash-attention", *WORDS.named)
    in_old_studies = "qkv-fusion-msa+torch-compile+master-weights+activation-checkpointing"
    assert WORDS.name(WORDS.parse(in_old_studies)) == in_old_studies


def test_setting_flags_mean_their_switches():
    parser = make_parser(WORDS.program)
    for name in (*WORDS.named, "only-flash-attention", "without-flash-attention"):
        fusion = read_settings(WORDS.program, parser.parse_args(flags_of(name))).fusion
        assert WORDS.switches_of(fusion) == WORDS.parse(name), name


def test_points_have_files_of_their_own():
    """Also where their names are too long for a file system and differ at the end only."""
    study = study_of((2,), (32,), (16,), settings=(WORDS.name(frozenset(WORDS.switches)), "baseline"))
    names = [point.file_name() for point in study.points()]
    assert len(set(names)) == 4 and max(map(len, names)) == design.MAX_NAME


def test_random_order_is_stored():
    study = study_of((1, 2, 4), (8, 16), (4,), settings=("baseline", "fused"))
    order = study.points()
    assert order == study.points() != dataclasses.replace(study, seed=2).points()
    assert dataclasses.replace(study, num_runs=3).points()[:24] == order
    assert len(set(order)) == 24 and {point.run for point in order[:12]} == {1}


def test_effects_of_a_study(fake):
    faster = {"--enable-qkv-fusion-msa": 2.0, "--enable-flash-attention": 1.25}
    assert fake(*SMALL, "--all-combinations", "--ablation", "--switches", "qkv-fusion-msa flash-attention",
                "--settings", "baseline", faster=faster, both=1.2, noise=0.001) == 0
    summary = summary_of()
    effects, = summary["effects"]
    assert effects["points"] == effects["of"] == 4
    together, = effects["interaction"]
    assert together["factor"] == pytest.approx(1.2, rel=0.02) and together["low"] < 1.2 < together["high"]
    first = summary["ablation"][0]
    assert first["switch"] == "qkv-fusion-msa" and first["last"]["factor"] == pytest.approx(2.4, rel=0.01)


# Decisions

@pytest.mark.slow
def test_check_against(fake, capsys):
    flags = [*SMALL, "--num-runs", 3]
    assert fake(*flags, name="then", noise=0.003) == 0
    against = ["--check-against", "then/results_summary.json"]
    assert fake(*flags, *against, "--min-speedup", 1.3, noise=0.003) == 0
    verdict = "PASS: time 3 pass, 0 fail, 0 undecided; memory 2 pass, 0 fail, 0 undecided"
    assert capsys.readouterr().out.splitlines()[-1] == verdict
    assert fake(*flags, *against, "--min-speedup", 1.6, "--max-regression", "40%", noise=0.003) == 1
    assert "FAIL      B 2 S 32 N 16 fused: speed-up 1." in capsys.readouterr().out
    slow = dict(defaults=1.3)  # 8% more time, 4% more memory
    assert fake(*flags, *against, name="slow", faster=slow, noise=0.003) == 1
    assert capsys.readouterr().out.count("FAIL ") == 1
    assert fake(*flags, *against, "--max-regression", "0.2", name="slow") == 0


def test_check_without_any_verdict_on_time_is_no_pass(fake, capsys):
    assert fake(*SMALL, name="then", noise=0.2) == 0
    assert fake(*SMALL, "--check-against", "then/results_summary.json", name="now", noise=0.2) == 1
    *_, help_line, last = capsys.readouterr().out.splitlines()
    assert last == "UNDECIDED: time 0 pass, 0 fail, 2 undecided; memory 2 pass, 0 fail, 0 undecided"
    assert "more --num-runs" in help_line


def test_recommendation_is_kept_until_there_are_more_runs(fake):
    assert fake(*SMALL, "--recommend", "--memory-limit-mb", 18.5) == 0
    recommended = summary_of()["recommendation"]
    assert recommended["memory_limit_mb"] == 18.5 and recommended["shapes"][0]["setting"] == "fused"
    assert fake(*SMALL) == fake("--report-only", "--no-plots") == 0
    assert summary_of()["recommendation"] == recommended
    assert '<table id="recommended">' in pathlib.Path("s/report.html").read_text()
    assert fake(*SMALL, "--num-runs", 3) == 0 and "recommendation" not in summary_of()


@pytest.mark.parametrize("optimize, batch", [("memory", 31), ("throughput", 8)])
def test_find_batch_size(fake, optimize, batch, capsys):
    """Fused at S 64, the fake needs 6.9 B + 13.5 MB, which for B 31 is 228 of the 230 MB there are; its
    samples/s are B / (0.71 + 3.86 B) thousand, at B 8 within 2% of those at B 31 and at B 4 not."""
    flags = ["--find-batch-size", "--seq-lens", "64", "--memory-limit-mb", 300, "--optimize", optimize]
    assert fake(*flags, memory_mb=230, noise=0) == 0
    found, = json.loads(pathlib.Path("s/batch_size.json").read_text())["found"]
    assert found["batch_size"] == batch, found
    out = capsys.readouterr().out
    assert found["peak_memory_mb"] <= 230 and "(does not fit into " in out
    share = json.loads(pathlib.Path("s/batch_size.json").read_text())["target_memory_usage"]
    assert f" MB ({100 * share:g}% of 300)" in out  # whoever set 300 reads why 250 is too much
    rows = len(rows_of())
    assert fake(*flags) == 0 and len(rows_of()) == rows  # trials are not repeated
    assert fake("--find-batch-size", "--memory-limit-mb", 1, name="none") == 1
    capsys.readouterr()
    assert fake("--report-only", "--no-plots") == 2 and not os.path.exists("s/report.html")
    assert "is a --find-batch-size, not a study" in capsys.readouterr().err
