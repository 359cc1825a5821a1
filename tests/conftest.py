"""Fixtures and rules for all tests: none is run without its GPU, none leaves a process behind."""
import contextlib
import ctypes
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

from puzzles.interpreter import interpreter_fault
from tests.support import gone, require_shared, wait_for

ENDED = "TESTS_SECOND_SESSION"  # the file into which the second session writes how it has ended
INTERPRETING = ENDED in os.environ
UNWRITTEN = "glibc.malloc.perturb=1:glibc.malloc.tcache_count=0"  # new memory: -1.7e38, no old result
SECOND = pytest.StashKey()  # whether a session in the interpreter follows
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton has it until 3.10, warning if it is unset
if INTERPRETING:
    from tests.kernels import interpreter

    interpreter.mend()
else:
    os.environ.pop("TRITON_INTERPRET", None)  # of who has been at the puzzles


@pytest.fixture(scope="session")
def families_dir():
    return require_shared("data", "families")


@pytest.fixture
def quick_runs(monkeypatch):
    """Runs in this process without what takes most of a small one: its picture, and the machine's ceiling."""
    from fusion_lab.measuring import metrics, summary
    monkeypatch.setattr(metrics.Metrics, "draw", lambda *_: None)
    monkeypatch.setattr(summary, "matmul_ceiling", lambda *_: 1e12)


@pytest.hookimpl(trylast=True)  # of what -k and -m have left
def pytest_collection_modifyitems(config, items):
    if config.option.markexpr != "full":
        leave_out(config, items, lambda item: marked(item, "full") and not marked(item, "sample"))
    left_out = leave_out(config, items, lambda item: marked(item, "interpreted") != INTERPRETING)
    config.stash[SECOND] = getattr(config, "workeroutput", {})["second"] = bool(left_out) and not INTERPRETING
    if INTERPRETING and importlib.util.find_spec("triton") and (fault := interpreter_fault()):
        for item in items:
            item.add_marker(pytest.mark.skip(reason=fault))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch
        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm GPU"))


def marked(item, name):
    return item.get_closest_marker(name) is not None


def leave_out(config, items, condition):
    """Of tests marked `full` only those marked `sample` run; with -m full all do: interpreting every tile and
    compiling every kernel for five GPUs takes long. Tests marked `interpreted` are for the second session."""
    left_out = [item for item in items if condition(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not condition(item)]
    return left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Of pytest-xdist, whose first process collects nothing."""
    stash = node.config.stash
    stash[SECOND] = stash.get(SECOND, False) or getattr(node, "workeroutput", {}).get("second", False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Triton chooses between compiler and interpreter where a kernel is defined, so one process cannot have
    both: tests marked `interpreted` run in a second session, with the arguments of this one."""
    yield
    config, nothing = session.config, pytest.ExitCode.NO_TESTS_COLLECTED
    if INTERPRETING and not hasattr(config, "workeroutput"):
        pathlib.Path(os.environ[ENDED]).write_text(str(int(session.exitstatus)))
    ended = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, nothing)
    if config.stash.get(SECOND, False) and ended and not (
            session.shouldfail or config.option.collectonly or hasattr(config, "workeroutput")):
        print(flush=True)
        command = [sys.executable, "-m", "pytest", *config.invocation_params.args]
        if report := config.getoption("xmlpath", None):  # --junitxml; the last one counts
            command.append(f"--junitxml={report.removesuffix('.xml')}.interpreted.xml")
        with tempfile.NamedTemporaryFile("r") as file:
            code = subprocess.run(command, cwd=config.invocation_params.dir, check=False, env={
                **os.environ, ENDED: file.name, "TRITON_INTERPRET": "1",
                "GLIBC_TUNABLES": UNWRITTEN}).returncode
            if code == 0 and file.read() != "0":  # it has ended within a test
                code = pytest.ExitCode.INTERNAL_ERROR
        session.exitstatus = code if session.exitstatus in (0, nothing) else session.exitstatus


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LAST_AS_LONG = b"compile_worker"  # torch's, as this process


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
                if not gone(pid) and LAST_AS_LONG not in line:
                    found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
    return found
