"""Every wrapper, release and outcome: the right exit code and one line that helps."""
import contextlib
import json
import os
import signal
import threading

import pytest

from fusion_lab.rocm import all_profilers
from tests.rocm.fake_rocm.machine import RELEASES, TOOLS, every_tool, start

NOTHING_RECORDED = {"rocprofv3": "recorded no GPU kernel", "rocprof-sys": "wrote no trace",
                    "rocprof-compute": "left no counters and no roof"}


def no_counters(name, release):
    """(environment, arguments, exit code, words)"""
    if name == "rocprofv3":
        return {}, ["--pmc", "NO_SUCH_COUNTER"], 6, "no value of NO_SUCH_COUNTER"
    if name == "rocprof-compute" and release == "7.0":  # with pandas 3 it ends well and has joined nothing
        return {"FAKE_FAIL": "pandas"}, [], 6, "'pandas<3'"
    return {"FAKE_FAIL": "no_data"}, [], 6, NOTHING_RECORDED[name]


OUTCOMES = {
    "fine": lambda name, release: ({}, [], 0, ""),
    "tool missing": lambda name, release: ({"PATH": "/usr/bin:/bin", "ROCM_PATH": "/nonexistent"}, [], 3,
                                           f"{TOOLS[name]} not found"),
    "no GPU": lambda name, release: ({"KFD_DEVICE": "/nonexistent/kfd", "FAKE_GPUS": "0"}, [], 4,
                                     "--device=/dev/kfd"),
    "wrong use": lambda name, release: ({}, ["--timeout", "soon"], 2, "--timeout: 'soon'"),
    "flags refused": lambda name, release: ({}, ["--bad-flag"], 2, "unrecognized arguments: --bad-flag"),
    "tool crash": lambda name, release: ({"FAKE_FAIL": "crash"}, ["--skip-preflight"], 1, "itself failed: "),
    "program raises": lambda name, release: ({"FAKE_TRAINER": "raise"}, [], 5, "HIP out of memory"),
    "program fails": lambda name, release: ({"FAKE_TRAINER": "exit3"}, [], 5, ""),
    "program crashes": lambda name, release: ({"FAKE_TRAINER": "segv"}, [], 5, ""),
    "time limit": lambda name, release: ({"FAKE_TRAINER": "hang"}, [], 124, "by --timeout"),
    "no data": lambda name, release: ({"FAKE_FAIL": "no_data"}, [], 6, NOTHING_RECORDED[name]),
    "no counters": no_counters,
    "interrupted": lambda name, release: ({"FAKE_TRAINER": "hang"}, [], 130, "got SIGINT"),
}
BY_RELEASE = ("fine", "program raises", "no data", "no counters")  # what depends on it


@contextlib.contextmanager
def interrupted_when(exists):
    """Within, Ctrl-C comes as soon as exists() is true."""
    over = threading.Event()

    def wait():
        while not exists() and not over.wait(0.01):
            pass
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("release, outcome", [
    *(("10.1", outcome) for outcome in OUTCOMES),
    *((release, outcome) for release in RELEASES[:-1] for outcome in BY_RELEASE)])
@every_tool
def test_outcome(name, release, outcome, machine, tmp_path, monkeypatch):
    environment, arguments, code, words = OUTCOMES[outcome](name, release)
    workplace = machine(release, ROCPROFILER_REGISTER_LIBRARY="/of/the/parent", **environment)
    if outcome == "time limit":
        monkeypatch.setattr(all_profilers.WRAPPERS[name], "timeout", 0.3)
    with interrupted_when(lambda: outcome == "interrupted" and (tmp_path / "record").exists()):
        done = start(name, "-o", "out put", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    started = (workplace / "out put").exists()
    assert started == (code not in (2, 3, 4))
    if code == 0:
        assert not done.stderr and ": done in" in done.stdout
    else:
        assert done.stderr.startswith("run_") and words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1 or code in (3, 4)
    if started:
        record = json.loads((workplace / "out put" / "manifest.json").read_text())
        assert record["exit_code"] == code and (workplace / "out put" / "run.log").exists()
        runs = (tmp_path / "record").read_text() if (tmp_path / "record").exists() else ""
        assert '"inherited": true' not in runs  # of the parent: with it nothing is recorded
