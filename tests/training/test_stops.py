"""A signal ends long work, whether or not the main thread can hear it."""
import os
import signal
import subprocess
import sys

import pytest

from fusion_lab.training import stops
from fusion_lab.training.stops import Interrupted, interruptible
from tests.support import PATIENCE, ROOT

DEAF = f"""
import os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
import torch
from fusion_lab.training.stops import interruptible


def finish(number):
    print("finished", number, flush=True)
    return 7


with interruptible(finish, 0.5):
    x = torch.rand(4000, 4000, dtype=torch.float64)
    threading.Timer(0.2, os.kill, (os.getpid(), 2)).start()
    torch.linalg.svd(x)  # many seconds in which Python runs nothing
    print("too late", flush=True)
"""


def test_an_end_writes_what_was_printed_and_leaves_no_lock(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = ("import sys; from fusion_lab.training import locks, stops; locks.hold_directory(sys.argv[1]); "
            "print('said'); stops.end(7)")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "held"], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("said\n", "", 7)
    assert not (tmp_path / "held").exists()


def test_operations_that_take_long_do_not_hold_up_the_end():
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.returncode) == ("finished 2\n", 7), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs_and_a_second_one_acts_at_once(number):
    before, log = signal.getsignal(number), []
    with interruptible(lambda given: log.append(given) or "code", 60) as done:
        try:
            signal.raise_signal(number)
        except Exception:
            pytest.fail("it is no reason of one variant")
        finally:
            log.append(signal.getsignal(number) is before)
        log.append("not reached")
    assert done() == "code" and log == [True, number]
    with interruptible(log.append, 60) as done:
        log.append(signal.getsignal(number) is before)
    done()
    assert log[2:] == [False, None] and not issubclass(Interrupted, Exception)


def test_errors_pass_through_and_leave_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), interruptible(print, 60):
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is before and signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("when", ["pipe", "close"])
def test_a_signal_while_it_begins_or_ends_is_heard(when, monkeypatch):
    """As on a busy machine: it went through as an error that nobody expects, with exit code 1."""
    called, ended, ran = getattr(os, when), [], []

    def interrupted(*given):
        monkeypatch.setattr(stops.os, when, called)
        signal.raise_signal(signal.SIGINT)
        return called(*given)
    monkeypatch.setattr(stops.os, when, interrupted)
    monkeypatch.setattr(stops, "end", ended.append)
    monkeypatch.setattr(stops.Raised, "within", True)
    with pytest.raises(KeyboardInterrupt), interruptible(lambda number: 128 + number, 0):
        ran.append(True)
    assert (ended, ran) == (([130], []) if when == "pipe" else ([], [True]))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


PROGRAM = f"""
import atexit, os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from fusion_lab.training import interrupts
interrupts.quiet(__name__)
from fusion_lab.training import files, stops


def finish(number):
    print("finished", number, flush=True)
    return 7


def compare(argv):
    files.results_directory(argv[1], default=False)
    with stops.interruptible(finish, 60):
        os.kill(os.getpid(), int(argv[0]))


def predict(argv):
    import torch
    x = torch.rand(4000, 4000, dtype=torch.float64)
    threading.Timer(0.2, os.kill, (os.getpid(), int(argv[0]))).start()
    print("began")
    stops.leaving(lambda: torch.linalg.svd(x))


atexit.register(print, "Python's own end")
sys.exit(files.exit_code(globals()[sys.argv[1]], sys.argv[2:], "program"))
"""


def run(*arguments):
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout, done.stderr


def test_a_program_ends_without_python_s_own_end(tmp_path):
    """With torch that took a second of processor time, eight on a busy machine. What it holds is let go."""
    place = tmp_path / "results"
    assert run("compare", 2, place) == (7, "finished 2\n", "") and not place.exists()


@pytest.mark.parametrize("number", [2, 15])
def test_work_that_writes_nothing_is_left_at_once(number):
    assert run("predict", number) == (128 + number, "began\n", "interrupted\n")
