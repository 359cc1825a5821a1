"""How a session's command is run, ended in time and explained, and what is set aside."""
import shlex
import signal
import subprocess
import sys

import pytest

from fusion_lab.rocm import session
from fusion_lab.rocm.session import Command, Ended
from fusion_lab.training.files import NO_GPU, PROGRAM_FAILED, TIMEOUT
from tests.rocm.fake_rocm.machine import manifest, start, summary_of
from tests.support import PATIENCE, ROOT, gone, wait_for


def test_a_command_takes_its_environment_from_here(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "2")
    command = Command(["a b", "c"], {"SET": "x y", "KEPT": "3"}, ("GONE",), cwd="/d e")
    found = command.environment()
    assert (found["SET"], found["KEPT"]) == ("x y", "3") and "GONE" not in found and "PATH" in found
    assert command.script() == ["unset GONE", "export SET='x y'", "export KEPT=3", "cd '/d e'", "'a b' c"]


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
    assert sent[:3] == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    assert (ended.timed_out, ended.interrupted, ended.code) == (True, 0, -signal.SIGKILL)
    assert session.run(Command(["sleep", "0.05"]), str(tmp_path), 0).code == 0  # no limit


def test_what_a_command_leaves_behind_does_not_keep_its_output(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(session, "PIPE_SECONDS", 0.2)
    left = Command(["sh", "-c", "sleep 600 & echo $!"], log="its.log", echo=False)
    assert session.run(left, str(tmp_path), 0).code == 0 and not capfd.readouterr().out
    wait_for(lambda: gone(int((tmp_path / "its.log").read_text())), 5)


@pytest.mark.parametrize("ended, log, code, words", [
    (Ended(interrupted=2), "", 130, "got SIGINT"),
    (Ended(130), "", 130, "the profiled program ended by SIGINT"),
    (Ended(timed_out=True, seconds=12.4), "", TIMEOUT, "stopped after 12 s by --timeout"),
    (Ended(-15), "", 143, "the profiled program ended by SIGTERM"),
    (Ended(-9), "", PROGRAM_FAILED, "it died of SIGKILL. Try"),
    (Ended(139), "", PROGRAM_FAILED, "it died of SIGSEGV"),
    (Ended(160), "", PROGRAM_FAILED, "it ended with exit code 160"),  # a signal without a name
    (Ended(1), "Traceback (most recent call last):\n  x\nKeyError: 'a'\n", PROGRAM_FAILED, "Key"),
    (Ended(1), "Error: No HIP GPUs are available", NO_GPU, "No HIP GPUs are available. Torch")])
def test_why_a_command_failed(ended, log, code, words):
    found, reason = session.failure(ended, log)
    assert found == code and reason.startswith(words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_profile_is_flushed_and_summarised(number, machine):
    out = machine("7.0", FAKE_TRAINER="hang") / "out"
    with subprocess.Popen([ROOT / "run_rocprofv3.sh", "-o", "out"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as process:
        assert any(line.startswith("step 1") for line in process.stdout)
        process.send_signal(number)
        output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == manifest(out)["exit_code"] == 128 + number
    assert "1663 kernel launches" in output and summary_of(out)["steps"] is None  # nobody knows how many


def test_the_reader_of_the_output_goes_away(machine):
    workplace = machine("7.0")
    command = f"{shlex.quote(str(ROOT / 'run_rocprofv3.sh'))} -o out | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and manifest(workplace / "out")["status"] == "done"


def test_earlier_results_are_set_aside(machine):
    """A default directory whole; of one that was named and forced what comes anew."""
    workplace = machine("7.0")
    for _ in range(2):
        assert start("rocprof-sys").returncode == 0
    assert len(list(workplace.glob("rocprof_sys_profiles_v2*"))) == 2
    (workplace / "mine").mkdir()
    (workplace / "mine" / "run.log").write_text("old")
    assert start("rocprof-sys", "-o", "mine").returncode == 2
    assert start("rocprof-sys", "-o", "mine", "--force").returncode == 0
    kept, = (workplace / "mine").glob("run.log.old-*")
    assert kept.read_text() == "old"
