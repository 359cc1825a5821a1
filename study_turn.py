"""Runs the trainer as one point of a performance study, which lets one process measure at a time.

    python study_turn.py FD SCRIPT [flags of SCRIPT]

The trainer is untouched but for this: before its measured steps it writes "ready" to file descriptor FD and
waits for a line on stdin, after them it writes "done". Start-up, compilation and warm-up of several points
can so overlap, while each one's measured steps have the machine for themselves.
"""
import contextlib
import ctypes
import importlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent():
    """A study that is killed must not leave processes behind that hold the GPU. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(descriptor, script, *flags):
    die_with_parent()
    descriptor = int(descriptor)
    os.set_inheritable(descriptor, False)
    directory, name = os.path.split(os.path.abspath(script))
    sys.path.insert(0, directory)
    trainer = importlib.import_module(name.removesuffix(".py"))
    measure = trainer.run_steps

    def in_turn(*args, **kwargs):
        os.write(descriptor, b"ready\n")
        if not sys.stdin.readline():
            raise SystemExit("the study that started this process has gone")
        try:
            return measure(*args, **kwargs)
        finally:
            os.write(descriptor, b"done\n")

    trainer.run_steps = in_turn
    return trainer.main(list(flags))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
