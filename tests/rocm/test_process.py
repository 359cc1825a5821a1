"""How a command is run, ended in time, and why it failed."""
import contextlib
import signal

import pytest

from fusion_lab.rocm import process
from fusion_lab.training.files import NO_GPU, PROGRAM_FAILED, TIMEOUT


def test_a_command_takes_its_environment_from_here(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "2")
    command = process.Command(["a b", "c"], {"SET": "x y", "KEPT": "3"}, ("GONE",), cwd="/d e")
    found = command.environment()
    assert (found["SET"], found["KEPT"]) == ("x y", "3") and "GONE" not in found and "PATH" in found
    assert command.script() == ["unset GONE", "export SET='x y'", "export KEPT=3", "cd '/d e'", "'a b' c"]
    assert process.Command(["a"]).script() == ["a"]


def test_what_goes_on_too_long_is_asked_then_told_then_killed(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("ended, log, code, words", [
    (process.Ended(interrupted=2), "", 130, "got SIGINT"),
    (process.Ended(timed_out=True, seconds=12.4), "", TIMEOUT, "stopped after 12 s by --timeout"),
    (process.Ended(130), "", 130, "the profiled program ended by SIGINT"),
    (process.Ended(-15), "", 143, "the profiled program ended by SIGTERM"),
    (process.Ended(-9), "", PROGRAM_FAILED, "it died of SIGKILL. Try"),
    (process.Ended(128), "", PROGRAM_FAILED, "it ended with exit code 128"),
    (process.Ended(1), "Traceback (most recent call last):\n  x\nKeyError: 'a'\n", PROGRAM_FAILED, "Key"),
    (process.Ended(1), "Error: No HIP GPUs are available", NO_GPU, "No HIP GPUs are available. Torch")])
def test_why_a_command_failed(ended, log, code, words):
    found, reason = process.failure(ended, log)
    assert found == code and reason.startswith(words)


@pytest.mark.parametrize("code, words", [(139, "SIGSEGV"), (-11, "SIGSEGV"), (160, "exit code 160"),
                                         (3, "exit code 3")])
def test_an_exit_code_need_not_be_a_signal(code, words):
    """Numbers 32 and 33 lie among the signals and have no name."""
    found, reason = process.failure(process.Ended(code), "")
    assert found == 5 and words in reason
