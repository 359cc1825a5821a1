"""A signal ends a comparison, whether or not the main thread can hear it."""
import signal
import subprocess
import sys

import pytest

from fusion_lab.measuring.comparison.pace import Interrupted, interruptible
from tests.support import PATIENCE, ROOT

DEAF = f"""
import os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
import torch
from fusion_lab.measuring.comparison.pace import interruptible


def finish(number):
    print("finished", number, flush=True)
    return 7


with interruptible(finish):
    x = torch.rand(4000, 4000, dtype=torch.float64)
    threading.Timer(0.2, os.kill, (os.getpid(), 2)).start()
    torch.linalg.svd(x)  # many seconds in which Python runs nothing
    print("too late", flush=True)
"""


def test_operations_that_take_long_do_not_hold_up_the_end():
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.returncode) == ("finished 2\n", 7), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs_and_a_second_one_acts_at_once(number):
    before, log = signal.getsignal(number), []
    with interruptible(lambda given: log.append(given) or "code") as done:
        try:
            signal.raise_signal(number)
        except Exception:
            pytest.fail("it is no reason of one variant")
        finally:
            log.append(signal.getsignal(number) is before)
        log.append("not reached")
    assert done() == "code" and log == [True, number]
    with interruptible(log.append) as done:
        log.append(signal.getsignal(number) is before)
    done()
    assert log[2:] == [False, None] and not issubclass(Interrupted, Exception)


def test_errors_pass_through_and_leave_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), interruptible(print):
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is before and signal.set_wakeup_fd(-1) == -1
