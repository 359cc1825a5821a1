"""How ranks meet and end, in this process: a watch that keeps what it is told, a clock that sleep() turns."""
import os
import signal
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.training import distributed, files, torchrun, watch
from fusion_lab.training.files import FAILED, MISSING, OK, TIMEOUT, USAGE, UserError
from fusion_lab.training.torchrun import Place
from tests.training.test_distributed import CPU, Mesh, Watching, new_store

SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture
def rank_1_of_2(monkeypatch):
    """What torchrun tells this process; a function that makes a Watching its watch, in a world that logs."""
    counts = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="here",
                  MASTER_PORT="1234")
    for name, value in counts.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(files, "drop_output", lambda: None)

    def make(**known):
        log = []
        world = SimpleNamespace(watch=Watching(log, **known), rank=1, limit=7, log=log)
        world.close = lambda code: log.append(("together", code))
        monkeypatch.setattr(distributed, "current", world)
        return world
    return make


# --- How they meet ----------------------------------------------------------------------------------------

def settings(sharing=1, profile_rank="all"):
    return SimpleNamespace(training=SimpleNamespace(collective_timeout=7, sequence_parallel=sharing),
                           profiler=SimpleNamespace(profile_rank=profile_rank))


def refusal(*values, device=CPU):
    """(message, exit code) with which begin() refuses these settings."""
    with pytest.raises(UserError) as caught:
        distributed.begin(settings(*values), device)
    return str(caught.value), caught.value.code


def test_what_cannot_begin(rank_1_of_2, monkeypatch):
    words = "--sequence-parallel {}: must divide the number of processes, which is {}"

    def does_not_meet(*_, **__):
        raise RuntimeError(f"{210 * 'x'}\nmore")
    monkeypatch.setattr(torch.distributed, "init_process_group", does_not_meet)
    monkeypatch.setattr(torch.distributed, "init_device_mesh",
                        lambda *_, **__: pytest.fail("they have not met"))
    assert refusal(3) == (words.format(3, 2), USAGE)
    assert refusal(1, "2") == ("--profile-rank 2: there are 2 ranks, the first is 0", USAGE)
    for profile_rank in ("1", "all"):
        assert refusal(1, profile_rank) == (
            f"2 ranks did not meet at here:1234 within 7 s: {200 * 'x'}", FAILED)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert refusal() == ("this torch has no torch.distributed", MISSING)
    for name in torchrun.COUNTS:
        monkeypatch.delenv(name)
    assert refusal(2) == (words.format(2, 1) + ": start it with torchrun", USAGE)
    assert distributed.begin(settings(), CPU) is distributed.ALONE


def test_who_has_met_meets_nobody_again(rank_1_of_2, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", pytest.fail)
    world = rank_1_of_2()
    assert distributed.begin(settings(2), CPU) is world


@pytest.mark.parametrize("device, backend, own, at", [
    (CPU, "gloo", None, (1, 0)), (torch.device("cuda", 1), "nccl", torch.device("cuda", 1), (0, 1))])
def test_how_ranks_meet(device, backend, own, at, rank_1_of_2, monkeypatch, capsys):
    calls, shape = [], (2, 1) if at[0] else (1, 2)

    def mesh(kind, shape, mesh_dim_names):
        calls.append((kind, shape, mesh_dim_names))
        return Mesh(shape, at)
    monkeypatch.setattr(torch.distributed, "init_process_group",
                        lambda *given, **named: calls.append((*given, named)))
    monkeypatch.setattr(torch.distributed, "init_device_mesh", mesh)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: "the store")
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda *given: given)
    monkeypatch.setattr(distributed, "Watch", lambda *given: calls.append(given) or "a watch")
    monkeypatch.setattr(distributed, "Ranks", lambda *given: given)
    monkeypatch.setattr(distributed, "current", distributed.ALONE)
    monkeypatch.setattr(signal, "signal", lambda *given: calls.append(given))
    monkeypatch.setattr(sys, "argv", ["/some/where/program.py", "--flag"])
    place, chosen, met, found = distributed.begin(settings(shape[1]), device)
    assert (place, chosen, met.shape, found) == (Place(1, 2, 1, 2), device, shape, "a watch")
    assert distributed.current is distributed.world() == (place, chosen, met, found)
    group, mesh, (store, where, limit, say), handler = calls
    assert group == (backend, dict(timeout=timedelta(seconds=7), device_id=own))
    assert mesh == (device.type, shape, ("data", "sequence")) and repr(mesh[1]) == repr(shape)  # not 2.0
    assert (store, where, limit) == (("fusion_lab", "the store"), place, 7)
    assert handler == (SIGTERM, distributed.terminated)
    say("a word")
    assert capsys.readouterr().err == "program.py: error: a word\n"


def test_what_is_for_one_process_says_so_once(rank_1_of_2, monkeypatch):
    words = "--retune is for one process, and torchrun started 2: start it without"
    for rank, lines in (("1", ()), ("0", (words,))):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UserError) as caught:
            torchrun.require_alone("--retune")
        assert caught.value.lines == lines and str(caught.value) == words
    for name, value in zip(torchrun.COUNTS, "0101", strict=True):
        monkeypatch.setenv(name, value)
    torchrun.require_alone("--retune")


# --- How they end -----------------------------------------------------------------------------------------

def ending(run):
    """The exit code of a program that does this."""
    try:
        return distributed.exit_code(run, ["--flag"], "program.py")
    except SystemExit as end:  # os._exit
        return end.code


def fails_with(error):
    def run(argv):
        assert argv == ["--flag"]
        raise error
    return run


GLOO = RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer\nmore")
PEER = torch.distributed.DistError("it has gone")


@pytest.mark.parametrize("run, known, code, log, said", [
    (lambda argv: OK, {}, 0, [("together", 0)], ""),
    (lambda argv: 130, {}, 130, [("together", 130)], ""),
    (lambda argv: 143, {}, 143, [("together", 143)], ""),
    (lambda argv: OK, dict(failed=5, within=5), 5, [("claim", 0), ("within", 1), ("leave", 5)], ""),
    (lambda argv: 2, {}, 2, [("claim", 2), ("within", 1), ("leave", 2)], ""),
    (lambda argv: 2, dict(within=6), 6, [("claim", 2), ("within", 1), ("leave", 6)], ""),
    (fails_with(UserError("why", 6)), {}, 6, [("claim", 6), ("claim", 6), ("within", 1), ("leave", 6)],
     "program.py: error: why\n"),
    (fails_with(UserError("why", 6)), dict(claimed=False), 6,
     [("claim", 6), ("claim", 6), ("within", 1), ("leave", 6)], ""),
    (fails_with(MemoryError()), dict(claimed=False), 1,
     [("claim", 1), ("claim", 1), ("within", 1), ("leave", 1)], ""),
    (fails_with(RuntimeError("CUDA out of memory")), {}, 1,
     [("claim", 1), ("claim", 1), ("within", 1), ("leave", 1)], "program.py: error: out of memory: lower "
     "--batch-size, --seq-len or --num-seqs, or add --use-amp\n"),
    (fails_with(GLOO), dict(within=2), 2, [("within", 4), ("claim", 2), ("within", 1), ("leave", 2)], ""),
    (fails_with(PEER), {}, 1, [("within", 4), ("claim", 1), ("claim", 1), ("within", 1), ("leave", 1)],
     "program.py: error: rank 1 lost the others: it has gone\n"),
    (fails_with(RuntimeError("NCCL has Timed OUT")), {}, 124,
     [("claim", 124), ("claim", 124), ("within", 1), ("leave", 124)],
     "program.py: error: rank 1 has waited 7 s for the others (--collective-timeout)\n"),
    (fails_with(KeyError("a mistake")), dict(claimed=False), 1,
     [("claim", 1), ("claim", 1), ("within", 1), ("leave", 1)], "")])
def test_how_one_of_several_ends(run, known, code, log, said, rank_1_of_2, capsys):
    """The log: who has failed is asked for, at most so many seconds, claimed, and followed."""
    world = rank_1_of_2(**known)
    assert ending(run) == code and capsys.readouterr().err == said
    assert world.log == log


def test_a_mistake_of_all_has_one_traceback(rank_1_of_2, capsys):
    world = rank_1_of_2()
    assert ending(fails_with(ValueError())) == FAILED
    assert world.log == [("claim", FAILED), ("leave", FAILED)]
    assert capsys.readouterr().err.count("Traceback") == 1


def test_one_alone_ends_as_ever(monkeypatch, capsys):
    dropped = []
    monkeypatch.setattr(files, "drop_output", lambda: dropped.append(True))
    assert ending(lambda argv: 3) == 3 and ending(fails_with(UserError("why", 6))) == 6
    assert capsys.readouterr().err == "program.py: error: why\n" and dropped == []
    for mistake in (GLOO, KeyError("a mistake")):
        with pytest.raises(type(mistake)) as caught:
            distributed.exit_code(fails_with(mistake), ["--flag"], "program.py")
        assert caught.value is mistake
    monkeypatch.setenv("RANK", "1")  # before the ranks have met, the first one says it
    assert ending(fails_with(UserError("why", 6))) == 6 and capsys.readouterr().err == ""
    assert dropped == [True]


def test_words_of_a_lost_rank_are_short(rank_1_of_2):
    rank_1_of_2()
    error = distributed.lost(201 * "x")
    assert str(error) == f"rank 1 lost the others: {200 * 'x'}" and error.code == FAILED
    assert distributed.lost("timeout").code == TIMEOUT


@pytest.mark.parametrize("within, log", [
    (None, [("within", 2), ("claim", 143), ("leave", 143)]), (5, [("within", 2), ("leave", 5)])])
def test_sigterm_where_no_step_is_under_way(within, log, rank_1_of_2):
    world = rank_1_of_2(within=within)
    with pytest.raises(SystemExit):
        distributed.terminated(SIGTERM, None)
    assert world.log == log


@pytest.mark.parametrize("backend, log, code", [
    ("gloo", [(SIGINT, "ignored"), (SIGTERM, "ignored"), "asked", "close", "destroyed"], None),
    ("nccl", [(SIGINT, "ignored"), (SIGTERM, "ignored"), "asked", ("leave", 130)], 130)])
def test_ranks_leave_together(backend, log, code, monkeypatch):
    rank, found = distributed.Ranks.__new__(distributed.Ranks), []
    rank.watch, rank.backend, rank.from_first = Watching(found), backend, lambda make: found.append("asked")
    monkeypatch.setattr(signal, "signal", lambda number, handler: found.append(
        (number, {signal.SIG_IGN: "ignored"}[handler])))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: found.append("destroyed"))
    monkeypatch.setattr(distributed, "current", rank)
    try:
        rank.close(130)
    except SystemExit as end:
        assert end.code == code
    assert found == log and (distributed.current is rank) == (backend == "nccl")


def test_what_is_put_back_after_an_error_only_alone():
    acts = []
    for size in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt), distributed.finally_alone(
                SimpleNamespace(size=size), lambda size=size: acts.append(size)):
            raise KeyboardInterrupt
        with distributed.finally_alone(SimpleNamespace(size=size), lambda size=size: acts.append(-size)):
            pass
    assert acts == [1, -1, -2, -3]


# --- The watch --------------------------------------------------------------------------------------------

class Clock:
    """time, which only sleep() turns on; then(time) happens there."""

    def __init__(self, then=lambda now: None):
        self.now, self.then, self.naps = 100.0, then, 0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert 0 < seconds <= 0.25 and self.now < 200, "an endless wait"
        self.now, self.naps = self.now + seconds, self.naps + 1
        self.then(self.now)


ELSEWHERE = "elsewhere pid:[1]"


@pytest.fixture
def watching(monkeypatch):
    """A function that makes the Watch of a rank: of four, of which 1 and 2 are on this host, as processes 11
    and 12, and 3 is on another; `ended` are processes that have. Its thread is not started; what it says and
    how it ends is in `log`."""
    def make(rank=0, size=4, then=lambda now: None):
        log, store = [], new_store()
        monkeypatch.setattr(watch.Watch, "start", lambda self: log.append("started"))
        monkeypatch.setattr(watch, "time", Clock(then))
        monkeypatch.setattr(watch, "host", lambda: "here pid:[1]")
        for other, process in enumerate(("10 here pid:[1]", "11 here pid:[1]", "12 here pid:[1]",
                                         f"11 {ELSEWHERE}")[:size]):
            store.set(f"process {other}", process)
        found = watch.Watch(store, Place(rank, size, 0, 1), 7, log.append)
        found.log, found.ended = log, set()
        monkeypatch.setattr(watch, "runs", lambda pid: pid in {10, 11, 12, os.getpid()} - found.ended)
        return found
    return make


def test_a_watch_knows_the_processes_of_its_host(watching):
    one = watching(2)
    assert one.neighbours == {0: 10, 1: 11} and one.log == ["started"] and one.daemon
    assert one.store.get("process 2").decode() == f"{os.getpid()} here pid:[1]"


def test_the_first_to_fail_says_why(watching):
    one = watching()
    assert one.code() is None and one.fail(5, "why") == 5 and one.fail(6, "why not") == 6
    assert one.log == ["started", "why"] and one.code() == 5
    assert [one.claim(code) for code in (7, 8)] == [False, False] and one.code() == 5

    def gone(keys):
        raise RuntimeError
    one.store = SimpleNamespace(check=gone)
    assert one.code() == FAILED


def test_a_code_may_be_to_come(watching):
    one = watching(then=lambda now: now > 100.5 and one.claim(5))
    assert one.code_within(0) is None and watch.time.naps == 0
    assert one.code_within(0.4) is None and watch.time.now == pytest.approx(100.4, abs=0.06)
    assert one.code_within(9) == 5 and watch.time.now == pytest.approx(100.5, abs=0.06)
    assert one.code_within(9) == 5 and watch.time.now == pytest.approx(100.5, abs=0.06)


def test_a_watch_looks_at_neighbours_and_at_its_own_waiting(watching):
    one = watching()
    one.ended = {12}
    one.store.set("done 2", "")  # it has said so
    assert one.look() is None and watch.time.now == 100
    one.ended = {11}
    watch.time.then = lambda now: now > 100.5 and one.claim(9)
    assert one.look() is None  # it had failed, and said why a little later
    assert one.look() == 9 and one.log == ["started"]
    two = watching()
    two.ended = {11}
    assert two.look() == FAILED == two.code() and watch.time.now == pytest.approx(101, abs=0.06)
    assert two.log == ["started", "rank 1 has ended without a word; was it killed?"]


def test_a_watch_knows_how_long_its_rank_has_waited(watching):
    one = watching(1)
    with pytest.raises(KeyError), one.waiting():
        assert one.waiting_since == 100
        raise KeyError
    watch.time.now = 300
    assert one.look() is None
    with one.waiting():
        watch.time.now = 307
        assert one.look() is None
        watch.time.now = 307.25
        assert one.look() == TIMEOUT == one.code()
    assert one.log[1:] == ["rank 1 has waited 7 s for the others (--collective-timeout)"]


@pytest.mark.parametrize("looks, closed, waits, left", [
    ([None, None, 5], [False, False, False, False], [0.25, 0.25, 0.25, 1], 5),  # for GRACE it may end itself
    ([5], [False, True, True], [0.25, 1, 0.25], None), ([OSError], [False, False], [0.25, 1], FAILED),
    ([None], [False, True], [0.25, 0.25], None), ([], [True], [0.25], None)])
def test_the_thread_of_a_watch(looks, closed, waits, left, watching, monkeypatch):
    one, found = watching(), []
    looks, closed = iter(looks), iter(closed)

    def look():
        if (code := next(looks)) is OSError:
            raise code
        return code

    def leave(code):
        raise SystemExit(code)
    monkeypatch.setattr(one, "look", look)
    monkeypatch.setattr(one, "leave", leave)
    one.closed = SimpleNamespace(wait=lambda seconds: found.append(seconds) or next(closed))
    try:
        one.run()
        assert left is None
    except SystemExit as end:
        assert end.code == left
    assert found == waits


def test_the_first_rank_leaves_last(watching):
    def others_end(now):
        for rank, when in ((1, 101), (3, 103)):  # 3, on another host
            if now > when:
                one.store.set(f"done {rank}", "")
        one.ended |= {12} if now > 102 else set()  # without a word
    one = watching(then=others_end)
    one.join = lambda: one.log.append(("joined", one.closed.is_set(), one.store.check(["done 0"])))
    one.close()
    assert one.log[1:] == [("joined", True, False)] and one.store.check(["done 0"])
    assert watch.time.now == pytest.approx(103, abs=0.06)


@pytest.mark.parametrize("rank, size, seconds", [(0, 2, 5), (0, 4, 5), (0, 1, 0), (1, 4, 0), (3, 4, 0)])
def test_how_long_a_rank_waits_for_others_that_do_not_end(rank, size, seconds, watching):
    one = watching(rank, size)
    one.wave()
    assert watch.time.now - 100 == pytest.approx(seconds, abs=0.06) and one.store.check([f"done {rank}"])


@pytest.mark.parametrize("broken", [True, False])
def test_a_rank_that_leaves_has_said_all(broken, watching, monkeypatch):
    one = watching(1)
    flushed = []

    def fail():
        raise OSError("its reader has gone")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=fail))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(flush=lambda: flushed.append("stderr")))
    monkeypatch.setattr(os, "_exit", lambda code: flushed.append(code))
    if broken:
        one.store = SimpleNamespace(set=lambda *_: fail())
    one.leave(5)
    assert flushed == ["stderr", 5] and (broken or one.store.check(["done 1"]))


@pytest.mark.parametrize("stat, found", [
    (b"7 (python) S 1 2", True), (b"7 (a) Z (b) R 1", True), (b"7 (python) Z 1", False),
    (b"7 (a) S) X 1", False), (b"7 (\xff) Z 1", False), (b"7 (\xff) D 1", True), (None, False)])
def test_whether_a_process_has_ended(stat, found, tmp_path, monkeypatch):
    if stat:
        (tmp_path / "stat").write_bytes(stat)

    def opened(path, **how):
        assert path == "/proc/7/stat"
        return open(tmp_path / "stat", **how)
    monkeypatch.setattr(watch, "open", opened, raising=False)
    assert watch.runs(7) is found


def test_a_host_is_one_start_of_one_machine_and_one_space_of_processes():
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read()
    assert watch.host() == f"{boot[:-1]} {os.readlink('/proc/self/ns/pid')}" and "\n" not in watch.host()
