"""How a session's command is run, ended in time and explained, and what is set aside."""
import shlex
import signal
import subprocess
import sys

import pytest

from fusion_lab.rocm import session
from fusion_lab.rocm.session import Command, Outcome
from fusion_lab.training.files import NO_GPU, PROGRAM_FAILED, TIMEOUT
from tests.rocm.fake_rocm.machine import manifest, start, summary_of
from tests.support import PATIENCE, ROOT, gone, wait_for


def test_what_goes_on_too_long_is_asked_then_told_then_killed(tmp_path, monkeypatch):
    asked = "import os; print(os.getpid() == os.getpgid(0) == os.getsid(0))"
    session.run(Command([sys.executable, "-S", "-c", asked]), str(tmp_path), 0)
    assert (tmp_path / "run.log").read_text() == "True\n"  # or no signal would reach it
    sent, really = [], session.signal_group

    def signal_group(child, number):
        sent.append(number)
        if number == signal.SIGKILL:
            really(child, number)
    monkeypatch.setattr(session, "signal_group", signal_group)
    monkeypatch.setattr(session, "FLUSH_SECONDS", 0.05)
    ended = session.run(Command(["sleep", "600"]), str(tmp_path), 0.05)
    assert sent[:3] == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL] and ended.code == TIMEOUT
    assert session.run(Command(["sleep", "0.05"]), str(tmp_path), 0) == Outcome(
        0, "", str(tmp_path), pytest.approx(0.05, abs=5))  # no limit


def test_what_a_command_leaves_behind_does_not_keep_it(tmp_path):
    assert session.run(Command(["sh", "-c", "sleep 600 & echo $!"]), str(tmp_path), 0).code == 0
    wait_for(lambda: gone(int((tmp_path / "run.log").read_text())), 5)


@pytest.mark.parametrize("ended, log, code, words", [
    (Outcome(130, "got SIGINT"), "", 130, "got SIGINT"),
    (Outcome(130), "", 130, "the profiled program ended by SIGINT"),
    (Outcome(-15), "", 143, "the profiled program ended by SIGTERM"),
    (Outcome(-9), "", PROGRAM_FAILED, "it died of SIGKILL. Try"),
    (Outcome(139), "", PROGRAM_FAILED, "it died of SIGSEGV"),
    (Outcome(160), "", PROGRAM_FAILED, "it ended with exit code 160"),  # a signal without a name
    (Outcome(1), "Traceback (most recent call last):\n  x\nKeyError: 'a'\n", PROGRAM_FAILED, "Key"),
    (Outcome(1), "Error: No HIP GPUs are available", NO_GPU, "No HIP GPUs are available. Torch")])
def test_why_a_command_failed(ended, log, code, words):
    found, reason = session.failure(ended, log)
    assert found == code and reason.startswith(words)


@pytest.mark.parametrize("script, number", [
    ("run_rocprofv3.sh", signal.SIGINT), ("run_rocprofv3.sh", signal.SIGTERM),
    ("run_rocprof_sys.sh", signal.SIGINT), ("run_rocprof_compute.sh", signal.SIGTERM)])
def test_an_interrupted_profile_is_flushed_and_summarised(script, number, machine):
    out = machine("7.0", FAKE_TRAINER="hang") / "out"
    with subprocess.Popen([ROOT / script, "-o", "out"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as process:
        assert any(line.startswith("step 1") for line in process.stdout)
        assert "another run is writing into it" in start("rocprof-sys", "-o", "out", "--force").stderr
        process.send_signal(number)
        output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == manifest(out)["exit_code"] == 128 + number
    if script == "run_rocprofv3.sh":
        assert "1488 kernel launches" in output and summary_of(out)["steps"] is None  # nobody knows how many


def test_the_reader_of_the_output_goes_away(machine):
    workplace = machine("7.0")
    command = f"{shlex.quote(str(ROOT / 'run_rocprofv3.sh'))} -o out | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and manifest(workplace / "out")["exit_code"] == 0


def test_earlier_results_are_set_aside(machine):
    workplace = machine("7.0")
    for arguments in ([], [], ["-o", "mine"], ["-o", "mine", "--force"]):
        assert start("rocprof-sys", *arguments).returncode == 0
    assert sorted(path.name.partition("-")[0] for path in workplace.iterdir()) == [
        "mine", "mine.old", "rocprof_sys_profiles_v2", "rocprof_sys_profiles_v2.old"]
