"""Ctrl-C while a program starts or ends, when nothing is under way that would have to be saved: one line, no
traceback. Imports next to nothing, since whatever comes before quiet() is not covered by it."""
import os
import signal
import sys


def leave(number, _frame):
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)


def quiet(name):
    """The first call of a program, with its __name__; where that is imported, nothing happens. An ignored
    Ctrl-C stays ignored, as shells have it for what runs in the background."""
    if name == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


class Raised:
    """Within, Ctrl-C raises KeyboardInterrupt where quiet() has been called, so that work ends in order;
    before and after, while modules are imported and Python ends, it is leave()."""
    within = False

    def __enter__(self):
        self.was_quiet = signal.getsignal(signal.SIGINT) is leave
        if self.was_quiet:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Raised.within = True

    def __exit__(self, *_):
        if self.was_quiet:
            Raised.within = False
            signal.signal(signal.SIGINT, leave)


def leaving(work):
    """What work() returns. In a program Ctrl-C ends the process meanwhile, at once, though one operation of
    torch may take minutes, in which Python hears no signal: a thread does the work, and this one waits. For
    work that writes nothing."""
    import threading
    if not Raised.within or threading.current_thread() is not threading.main_thread():
        return work()
    result, errors = [], []

    def do():
        try:
            result.append(work())
        except BaseException as error:  # to be raised where it is waited for
            errors.append(error)

    sys.stdout.flush()  # leave() drops what is still to be written
    thread = threading.Thread(target=do, daemon=True)
    before = signal.signal(signal.SIGINT, leave)
    try:
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    if errors:
        raise errors[0]
    return result[0]
