"""The ranks of a run look after each other: where one fails or is gone, all end soon, and one says why.

A rank that waits in a collective for one that has ended would wait for long, some backends for ever. So a
thread of each rank looks, a few times a second, whether another one has failed, whether the processes of its
own host are still there, and how long its own rank has waited.
"""
import contextlib
import os
import sys
import threading
import time

from fusion_lab.training.files import FAILED, TIMEOUT

PERIOD = 0.25  # s between looks
PATIENCE = 5.0  # s for which the first rank waits for the others to end as well
GRACE = 1.0    # s in which a rank may end by itself after another one failed


def host():
    """What processes that can see each other's numbers have in common; without /proc, as on macOS, the host's
    name."""
    if not os.path.exists("/proc"):
        return os.uname().nodename
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def runs(pid):
    """Whether this process is there and has not ended; without /proc one that has ended counts until its
    parent has asked for its exit code."""
    try:
        if not os.path.exists("/proc"):
            os.kill(pid, 0)
            return True
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Watch(threading.Thread):
    """store: what all ranks can read and write; say(text) prints the reason of an end."""

    def __init__(self, store, place, limit, say):
        super().__init__(name="watch", daemon=True)
        self.store, self.place, self.limit, self.say = store, place, limit, say
        self.closed, self.waiting_since, self.neighbours = threading.Event(), None, {}
        store.set(f"process {place.rank}", f"{os.getpid()} {host()}")
        for rank in set(range(place.size)) - {place.rank}:  # set() of another rank may still be to come
            pid, where = store.get(f"process {rank}").decode().split(" ", 1)
            if where == host():
                self.neighbours[rank] = int(pid)
        self.start()

    def claim(self, code):
        """Whether this rank is the first to fail: then it says why, and all end with this code."""
        if self.store.add("failures", 1) > 1:
            return False
        self.store.set("code", str(code))
        return True

    def code(self):
        """The exit code of a rank that failed, or None."""
        try:
            return int(self.store.get("code")) if self.store.check(["code"]) else None
        except RuntimeError:  # whoever keeps the store has ended
            return FAILED

    def code_within(self, seconds):
        """The same, where it may still be to come."""
        deadline = time.monotonic() + seconds
        while (code := self.code()) is None and time.monotonic() < deadline:
            time.sleep(PERIOD / 5)
        return code

    @contextlib.contextmanager
    def waiting(self):
        """Within, this rank waits for others, which the time limit is for."""
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = None

    def run(self):
        while not self.closed.wait(PERIOD):
            try:
                code = self.look()
            except Exception:  # whoever keeps the store has ended
                code = FAILED
            if code is not None and not self.closed.wait(GRACE):
                self.leave(code)

    def look(self):
        """The exit code if this run is to end."""
        if (code := self.code()) is not None:
            return code
        for rank, pid in self.neighbours.items():
            if not runs(pid) and not self.store.check([f"done {rank}"]) and self.code_within(GRACE) is None:
                return self.fail(FAILED, f"rank {rank} has ended without a word; was it killed?")
        since = self.waiting_since
        if since is not None and time.monotonic() - since > self.limit:
            return self.fail(TIMEOUT, f"rank {self.place.rank} has waited {self.limit} s for the others "
                             "(--collective-timeout)")
        return None

    def fail(self, code, text):
        if self.claim(code):
            self.say(text)
        return code

    def close(self):
        """This rank has ended as it should. The first one, which may keep the store, waits for the others."""
        self.closed.set()
        self.join()
        self.wave()

    def wave(self):
        self.store.set(f"done {self.place.rank}", "")
        deadline, others = time.monotonic() + PATIENCE, set(range(1, self.place.size))
        while self.place.rank == 0 and others and time.monotonic() < deadline:
            others = {rank for rank in others if not self.store.check([f"done {rank}"])
                      and runs(self.neighbours.get(rank, os.getpid()))}
            time.sleep(PERIOD / 25)

    def leave(self, code):
        """End at once, whatever this process waits for."""
        with contextlib.suppress(Exception):
            self.wave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
