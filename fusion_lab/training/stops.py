"""Signals that end long work at once. One operation of torch may take minutes, in which Python hears nothing;
a thread beside it does."""
import contextlib
import os
import signal
import sys
import threading

from fusion_lab.training import locks
from fusion_lab.training.interrupts import Raised

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """SIGINT or SIGTERM came; no Exception, which whatever runs might take for a failure of its own."""


def end(code):
    """End the process without Python's own end, which with torch takes a second of processor time."""
    locks.release()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


@contextlib.contextmanager
def blocked():
    """Within, signals wait. Yields the mask that lets them through again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interruptible(finish, patience):
    """Within, a signal raises Interrupted, which ends it here; a second one acts at once. Yields what calls
    finish(number of the signal or None), an exit code, once it is over. After a signal a program (see
    interrupts.quiet) ends here, with that code; where what runs has not ended within patience (s), any
    process does."""
    heard, over, begun = [], threading.Event(), False

    def ask(number, _frame):
        heard.append(number)
        restore()
        raise Interrupted

    def restore():
        for number, handler in previous.items():
            signal.signal(number, handler)

    def watch():
        number = os.read(reader, 1)
        if number and not over.wait(patience):
            end(finish(number[0]))

    with blocked() as unblocked:  # or one would raise where nobody catches it
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = {number: signal.signal(number, ask) for number in SIGNALS}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            with contextlib.suppress(Interrupted):
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                begun = True
                yield lambda: finish(heard[0] if heard else None)
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        finally:
            over.set()
            signal.set_wakeup_fd(wakeup)
            restore()
            os.close(writer)
            watcher.join()
            os.close(reader)
    if heard and Raised.within:
        end(finish(heard[0]))
    if not begun:
        raise KeyboardInterrupt


def leaving(work):
    """What work() returns. In a program a signal ends the process meanwhile, at once. For work that writes
    nothing."""
    def say(number):
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + number

    if not Raised.within or threading.current_thread() is not threading.main_thread():
        return work()
    with interruptible(say, patience=0):
        return work()
