"""How programs end: exit codes, errors in a line, closed streams, signals."""
import os
import signal
import subprocess
import sys
import time

import pytest

from fusion_lab.training import errors
from fusion_lab.training.errors import UserError
from tests.support import ROOT


def raiser(error):
    def run(_argv):
        raise error
    return run


class OutOfMemoryError(RuntimeError):
    """torch's bears this name."""


@pytest.mark.parametrize("error, code, word", [
    (UserError("wrong"), 2, "wrong"), (UserError("absent", code=4), 4, "absent"),
    (KeyboardInterrupt(), 130, "interrupted"), (MemoryError(), 1, "out of memory"),
    (OutOfMemoryError("x"), 1, "out of memory"), (RuntimeError("cannot Allocate memory"), 1, "out of memory"),
    (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed\nmore"), 1, "a rank lost the others"),
    (RuntimeError("No working C++ compiler"), 3, "g++"),
    (OSError(2, "No such file", "data.a3m"), 2, "data.a3m")],
    ids=lambda value: type(value).__name__)
def test_expected_failures_are_a_line_and_a_code(error, code, word, capsys):
    assert errors.exit_code(raiser(error), [], "p") == code
    error = capsys.readouterr().err
    assert word in error and error.startswith("p: error: ") and error.count("\n") == 1


def test_mistakes_of_ours_are_not_hidden_and_success_is_silent(capsys):
    for error in (RuntimeError("a mistake"), ValueError("another")):
        with pytest.raises(type(error)):
            errors.exit_code(raiser(error), [], "p")
    assert errors.exit_code(lambda argv: len(argv), ["a", "b"], "p") == 2 and capsys.readouterr().err == ""


BEGIN = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from fusion_lab.training import errors
from fusion_lab.training.flags import Parser
"""
PRINTING = BEGIN + """
run = Parser(prog="p").parse_args if "--help" in sys.argv else lambda argv: print("x" * 10 ** 6) or 0
sys.exit(errors.exit_code(run, sys.argv[1:], "p"))
"""


def test_a_full_disk_or_a_closed_pipe_behind_the_output_ends_without_a_traceback():
    for flags in ([], ["--help"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-c", PRINTING, *flags], stdout=full,
                                  stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (
            1, "p: error: the output cannot be written: the disk is full\n")
    done = subprocess.run(f'{sys.executable} -c "$CODE" | head -c 1; exit ${{PIPESTATUS[0]}}', shell=True,
                          executable="/bin/bash", env={**os.environ, "CODE": PRINTING}, capture_output=True)
    assert done.returncode == errors.CLOSED_PIPE and done.stderr == b""


CLOSED = BEGIN + """
errors.begin(__name__)
with open(sys.argv[1], "w"):
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    sys.stdin.read()
    sys.exit(7)
"""


@pytest.mark.parametrize("closed, out, err", [
    (">&-", "", "to stderr\n"), ("2>&-", "to stdout\n", ""), ("<&- >&- 2>&-", "", "")])
def test_what_is_closed_stays_silent_and_no_file_takes_its_place(closed, out, err, tmp_path):
    command = ["bash", "-c", f'exec "$0" -c "$CODE" file {closed}', sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "CODE": CLOSED}, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (7, out, err)
    assert (tmp_path / "file").read_text() == ""


def test_the_first_signal_asks_and_the_second_one_acts():
    before = signal.getsignal(signal.SIGTERM)
    with errors.StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    with errors.StopRequest(patient=True) as stop:  # where several processes may pass on one signal twice
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert stop.signal == number
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_ignored_stays_so(monkeypatch):
    """As nohup has it for SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with errors.StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
