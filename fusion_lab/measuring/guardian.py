"""Kills the process groups of a comparison that was itself killed: stopped processes, and what a trainer has
started, would otherwise stay for ever.

The parent runs this file and writes "+GROUP" for a group that it starts and "-GROUP" for one that has ended;
when the pipe closes, the groups that are left are killed. Standard library only.
"""
import contextlib
import os
import signal
import subprocess
import sys


def guard(lines):
    """Read lines until there are no more, then kill what is left."""
    groups = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


class Guardian:
    """The parent's end of it: a process that outlives the parent, however that ends."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-ISu", __file__], stdin=subprocess.PIPE, bufsize=0,
                                        stdout=subprocess.DEVNULL, start_new_session=True)

    def tell(self, sign, group):
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self.process.stdin.write(f"{sign}{group}\n".encode())

    def close(self):
        """Let it go; groups that it still knows of are killed."""
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    guard(sys.stdin)
