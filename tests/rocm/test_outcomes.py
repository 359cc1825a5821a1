"""Every wrapper, release and outcome: the right exit code and one line that helps."""
import contextlib
import json
import os
import signal
import threading

import pytest

from fusion_lab.rocm import all_profilers
from tests.rocm.fake_rocm.machine import RELEASES, TOOLS, start

NOTHING = {"rocprofv3": "recorded no GPU kernel", "rocprof-sys": "wrote no trace",
           "rocprof-compute": "left no counters and no roof"}
OUTCOMES = {  # (environment, arguments, exit code, words)
    "fine": ({}, [], 0, ""),
    "tool missing": ({"PATH": "/usr/bin:/bin", "ROCM_PATH": "/nonexistent"}, [], 3, "not found on PATH"),
    "no GPU": ({"KFD_DEVICE": "/nonexistent/kfd", "FAKE_GPUS": "0"}, [], 4, "--device=/dev/kfd"),
    "wrong use": ({}, ["--timeout", "soon"], 2, "--timeout: 'soon'"),
    "flags refused": ({}, ["--bad-flag"], 2, "unrecognized arguments: --bad-flag"),
    "tool crash": ({"FAKE_FAIL": "crash"}, ["--skip-preflight"], 1, "itself failed: "),
    "program raises": ({"FAKE_TRAINER": "raise"}, [], 5, "HIP out of memory"),
    "program fails": ({"FAKE_TRAINER": "exit3"}, [], 5, ""),
    "program crashes": ({"FAKE_TRAINER": "segv"}, [], 5, ""),
    "time limit": ({"FAKE_TRAINER": "hang"}, [], 124, "by --timeout"),
    "no data": ({"FAKE_FAIL": "no_data"}, [], 6, NOTHING),
    "interrupted": ({"FAKE_TRAINER": "hang"}, [], 130, "got SIGINT")}
BY_RELEASE = ("fine", "program raises", "no data")  # what depends on it
PANDAS = {"FAKE_FAIL": "pandas"}, [], 6, "'pandas<3'"  # it ends well, and 7.0 has joined nothing
UNKNOWN = {}, ["--pmc", "NO_SUCH_COUNTER"], 6, "no value of NO_SUCH_COUNTER"


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


@pytest.mark.parametrize("name, release, outcome", [
    *((name, "10.1", outcome) for name in TOOLS for outcome in OUTCOMES), ("rocprof-compute", "7.0", PANDAS),
    *((name, release, outcome) for name in TOOLS for release in RELEASES[:-1] for outcome in BY_RELEASE),
    *(("rocprofv3", release, UNKNOWN) for release in RELEASES)])
def test_outcome(name, release, outcome, machine, tmp_path, monkeypatch):
    environment, arguments, code, words = OUTCOMES.get(str(outcome), outcome)
    words = words[name] if words is NOTHING else words
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
