"""Processes that take turns at measuring: each starts up, compiles and warms up when it likes, and measures
alone.

A parent starts its children through `invited`, waits for "ready" from each, and answers "go" when the machine
is free; the child's `turn()` says "ready", waits for the answer, and says "done". Without a parent that asked
for it, `turn()` does nothing. Standard library only.
"""
import contextlib
import ctypes
import os
import signal
import subprocess

from fusion_lab.measuring.roctx import child_environment

VARIABLE = "FUSION_LAB_TURN"  # "FD,FD,PID": where the child writes, where it reads, who its parent is
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def invitation():
    """(descriptor to write to, descriptor to read from, the parent's process id), or None. Given once: what a
    child starts itself is not asked."""
    text = os.environ.pop(VARIABLE, None)
    return tuple(map(int, text.split(","))) if text else None


INVITATION = invitation()


def die_with_parent():
    """Where a parent takes turns with us: end when it ends, however it ends, instead of keeping the machine
    busy for nobody. Linux only."""
    if INVITATION:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != INVITATION[2]:
            raise SystemExit("the parent of this process has gone")


@contextlib.contextmanager
def turn():
    """Within, this process has the machine for itself, as far as its parent can see to it."""
    if not INVITATION:
        yield
        return
    writer, reader, _ = INVITATION
    os.write(writer, b"ready\n")
    if not os.read(reader, 1):
        raise SystemExit("the parent of this process has gone")
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            os.write(writer, b"done\n")


class Guest:
    """A child that was asked to take turns: `process`; `reader`, a descriptor from which "ready" and "done"
    come; go() lets it measure."""

    def __init__(self, command, env=None, **options):
        self.reader, writer = os.pipe()
        reader, self.writer = os.pipe()
        try:
            env = child_environment() if env is None else env
            env = dict(env, **{VARIABLE: f"{writer},{reader},{os.getpid()}"})
            self.process = subprocess.Popen(command, env=env, pass_fds=[writer, reader], **options)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(writer)
            os.close(reader)

    def wait_until_ready(self):
        """Whether it is ready; False where it has ended instead."""
        return b"ready" in os.read(self.reader, 100)

    def go(self):
        with contextlib.suppress(BrokenPipeError):  # it ended while it waited
            os.write(self.writer, b"\n")

    def close(self):
        """Give back the pipes; a child that still waits ends."""
        for descriptor in (self.reader, self.writer):
            os.close(descriptor)
