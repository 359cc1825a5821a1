"""How a command is run, ended in time, and why it failed."""
import contextlib
import shlex
import signal
import subprocess
import sys
import threading

import pytest

from fusion_lab.rocm import process
from fusion_lab.training.files import NO_GPU, PROGRAM_FAILED, TIMEOUT
from tests.rocm.fake_rocm.machine import ROOT, interrupt, manifest, summary_of
from tests.support import complaint, gone, wait_for


def test_a_command_takes_its_environment_from_here(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "2")
    command = process.Command(["a b", "c"], {"SET": "x y", "KEPT": "3"}, ("GONE",), cwd="/d e")
    found = command.environment()
    assert (found["SET"], found["KEPT"]) == ("x y", "3") and "GONE" not in found and "PATH" in found
    assert command.script() == ["unset GONE", "export SET='x y'", "export KEPT=3", "cd '/d e'", "'a b' c"]
    assert process.Command(["a"]).script() == ["a"]


def test_what_goes_on_too_long_is_asked_then_told_then_killed(tmp_path, monkeypatch):
    asked = "import os; print(os.getpid() == os.getpgid(0) == os.getsid(0))"
    process.run(process.Command([sys.executable, "-S", "-c", asked]), str(tmp_path), 0)
    assert (tmp_path / "run.log").read_text() == "True\n"  # or no signal would reach it
    sent, really = [], process.signal_group

    def signal_group(child, number):
        sent.append(number)
        if number == signal.SIGKILL:
            really(child, number)
    monkeypatch.setattr(process, "signal_group", signal_group)
    monkeypatch.setattr(process, "FLUSH_SECONDS", 0.05)
    ended = process.run(process.Command(["sleep", "600"]), str(tmp_path), 0.05)
    assert sent[:3] == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    assert (ended.timed_out, ended.interrupted, ended.code) == (True, 0, -signal.SIGKILL)
    assert process.run(process.Command(["sleep", "0.05"]), str(tmp_path), 0).code == 0  # no limit
    monkeypatch.setattr(process, "signal_group", really)
    monkeypatch.setattr(process, "caught_signals", lambda: contextlib.nullcontext([signal.SIGTERM]))
    ended = process.run(process.Command(["sleep", "600"]), str(tmp_path), 0)
    assert (ended.timed_out, ended.interrupted, ended.code) == (False, signal.SIGTERM, -signal.SIGINT)


def test_what_a_command_leaves_behind_does_not_keep_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "PIPE_SECONDS", 0.2)
    assert process.run(process.Command(["sh", "-c", "sleep 600 & echo $!"]), str(tmp_path), 0).code == 0
    wait_for(lambda: gone(int((tmp_path / "run.log").read_text())), 5)


def test_output_is_shown_and_logged(tmp_path, capfd):
    quiet = process.Command(["sh", "-c", "echo out; echo err >&2; cat"], log="its.log", echo=False)
    ended = process.run(quiet, str(tmp_path), 10)
    assert (ended.code, (tmp_path / "its.log").read_text()) == (0, "out\nerr\n") and 0 < ended.seconds < 10
    assert not capfd.readouterr().out
    process.say("two", "lines")
    assert capfd.readouterr().out == "two\nlines\n"
    assert process.run(process.Command(["echo", "shown"]), str(tmp_path), 0).timed_out is False
    assert capfd.readouterr().out == (tmp_path / "run.log").read_text() == "shown\n"


@pytest.mark.parametrize("ended, log, code, words", [
    (process.Ended(interrupted=2), "", 130, "got SIGINT"),
    (process.Ended(timed_out=True, seconds=12.4), "", TIMEOUT, "stopped after 12 s by --timeout"),
    (process.Ended(130), "", 130, "the profiled program ended by SIGINT"),
    (process.Ended(-15), "", 143, "the profiled program ended by SIGTERM"),
    (process.Ended(-9), "", PROGRAM_FAILED, "it died of SIGKILL. Try"),
    (process.Ended(128), "", PROGRAM_FAILED, "it ended with exit code 128"),
    (process.Ended(139), "", PROGRAM_FAILED, "it died of SIGSEGV"),
    (process.Ended(-11), "", PROGRAM_FAILED, "it died of SIGSEGV"),
    (process.Ended(160), "", PROGRAM_FAILED, "it ended with exit code 160"),  # a signal without a name
    (process.Ended(1), "Traceback (most recent call last):\n  x\nKeyError: 'a'\n", PROGRAM_FAILED, "Key"),
    (process.Ended(1), "Error: No HIP GPUs are available", NO_GPU, "No HIP GPUs are available. Torch")])
def test_why_a_command_failed(ended, log, code, words):
    found, reason = process.failure(ended, log)
    assert found == code and reason.startswith(words)


def test_what_takes_longer_than_a_moment_is_said(monkeypatch, capsys):
    timers, timer = [], threading.Timer

    def sooner(seconds, *call):
        timers.append(timer(seconds / 10, *call))
        return timers[-1]
    monkeypatch.setattr(threading, "Timer", sooner)
    with process.said_if_slow("slow"):
        timers[0].join()
    with process.said_if_slow("quick"):
        assert timers[1].daemon and timers[1].is_alive()
    timers[1].join()
    assert capsys.readouterr() == ("", "slow\n")


def test_signals_are_noted_and_their_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with process.caught_signals() as caught:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert caught == [signal.SIGTERM, signal.SIGINT]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_profile_is_flushed_and_summarised(number, machine):
    code, out, output = interrupt("run_rocprofv3.sh", number, machine)
    assert code == 128 + number and "1663 kernel launches" in output
    assert manifest(out)["exit_code"] == code
    summary = summary_of(out)
    assert summary["launches"] == 1663 and summary["launches_per_step"] is None  # nobody knows the steps


def test_reader_of_the_output_goes_away(machine):
    workplace = machine("7.0")
    command = f"{shlex.quote(str(ROOT / 'run_rocprofv3.sh'))} -o out | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, complaint(done.stderr)) == (0, "")
    assert manifest(workplace / "out")["status"] == "done"
