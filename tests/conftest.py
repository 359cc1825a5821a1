"""Fixtures and rules for all tests: none is run without its GPU, none leaves a process behind."""
import contextlib
import ctypes
import os
import pathlib
import signal

import pytest

from tests.interpreter import PIPES
from tests.support import gone, require_shared, wait_for

pytest_plugins = ("tests.interpreter", "tests.times")


@pytest.fixture(scope="session")
def families_dir():
    return require_shared("data", "families")


def pytest_collection_modifyitems(config, items):
    if config.option.markexpr != "full" and PIPES not in os.environ:  # the interpreter serves what it is told
        leave_out_all_but_samples(config, items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch
        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm GPU"))


def leave_out_all_but_samples(config, items):
    """Of tests marked `full` only those marked `sample` run; with -m full all do. Interpreting every tile and
    compiling every kernel for five GPUs takes long."""
    def stays(item):
        return not item.get_closest_marker("full") or item.get_closest_marker("sample")
    config.hook.pytest_deselected(items=[item for item in items if not stays(item)])
    items[:] = [item for item in items if stays(item)]


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LAST_AS_LONG = b"compile_worker", b"-m\0interpreted"  # as this process: torch's, and tests/interpreter.py's


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
                if not gone(pid) and not any(words in line for words in LAST_AS_LONG):
                    found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
    return found
