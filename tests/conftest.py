"""Shared fixtures: where the ground truth lies, how a program of this project is started, that none stays."""
import contextlib
import ctypes
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"  # reference values and real proteins; never copied into the project
sys.path.insert(0, str(ROOT))
# One OpenMP thread: two that spin on a core shared with another process are a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Shells let what runs in the background ignore Ctrl-C, and that is handed on to every program started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
PATIENCE = 300  # s, on any machine under any load; only what hangs is kept waiting so long
# A program that is killed while it writes argv[1].
KILLED_WRITER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from fusion_lab.training import files
def write(file):
    file.write(b"half of the new checkpoint")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
files.write_atomically(sys.argv[1], write)
"""


def require_shared(*parts):
    """Path below ../shared. Absent: skip with the reason, except in CI, where that is a failure."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        reason = (f"ground truth not found: {path} (../shared, beside the checkout, holds the authors' "
                  "reference values and real proteins, which are not part of the project)")
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return path


@pytest.fixture(scope="session")
def families_dir():
    return require_shared("data", "families")


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch
        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm GPU"))


def wait_for(condition, patience=PATIENCE):
    """Return as soon as condition() holds; a test whose condition never comes fails."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("this should have happened by now")
        time.sleep(0.02)


def state_of(pid):
    """"S" of a process that sleeps, "T" of one that was stopped, "Z" of one that has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def gone(pid):
    """Whether a process has ended; a zombie that nobody has reaped yet has."""
    return state_of(pid) == "Z"


def complaint(stderr):
    """What an AMD wrapper says on stderr, but its sign of life, which only a busy machine brings."""
    return re.sub(r"^\S+: looking for .*\n", "", stderr, flags=re.MULTILINE)


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
OF_TORCH = b"compile_worker"  # ends with this process


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left_behind():
    """Whatever a module's tests have started has ended after them, grandchildren too: with this prctl they
    become children of this process when their parents end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(children())
    yield
    try:
        wait_for(lambda: set(children()) <= before, 20)
    except pytest.fail.Exception:
        left = {pid: line for pid, line in children().items() if pid not in before}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"left running: {left}")


def children():
    """{process id: command line} of the children of this process that have not ended."""
    found = {}
    for place in pathlib.Path("/proc/self/task").glob("*/children"):
        pids = ""
        with contextlib.suppress(OSError):  # a thread that has just ended
            pids = place.read_text()
        for pid in map(int, pids.split()):
            with contextlib.suppress(OSError):
                line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
                if not gone(pid) and OF_TORCH not in line:
                    found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def run_program(program, *args, cwd=None, env=None):
    """Run a program of this project as a user does; returns CompletedProcess with text output."""
    command = [sys.executable, str(ROOT / program), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                          timeout=PATIENCE, capture_output=True, text=True, check=False)


def last_json(result):
    """The contract of every run: its last stdout line is JSON of at most 1 kB, headline figures of the file
    that it names. Returns the content of that file."""
    text = result if isinstance(result, str) else result.stdout
    line = text.strip().splitlines()[-1]
    headline = json.loads(line)
    path = headline.pop("summary_file", None)
    if path is None:  # --check-flags, predictions: nothing but this line
        return headline
    assert len(line.encode()) <= 1024
    whole = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    for key, value in headline.items():
        assert contains(whole[key], value), key
    return whole


def contains(whole, part):
    """Whether part says nothing that whole does not say in the same place."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return all(contains(a, b) for a, b in zip(whole, part, strict=False))
    return whole == part or isinstance(part, str) and whole.startswith(part)
