"""Every wrapper, release and outcome: the right exit code and one line that helps."""
import contextlib
import json
import os
import pathlib
import re
import signal
import threading

import pytest

from fusion_lab.rocm import machine as rocm_machine
from fusion_lab.rocm import wrappers
from tests.rocm.fake_rocm.machine import RELEASES, WRAPPERS, start
from tests.support import complaint

SCRIPTS = {"rocprofv3": "run_rocprofv3.sh", "rocprof-sys": "run_rocprof_sys.sh",
           "rocprof-compute": "run_rocprof_compute.sh"}
NOTHING_RECORDED = {"rocprofv3": "recorded no GPU kernel", "rocprof-sys": "wrote no trace",
                    "rocprof-compute": "left no counters and no roof"}
PANDAS = {"6.4": (1, "'pandas<3'"), **dict.fromkeys(("7.0", "7.1", "7.2"), (6, "'pandas<3'"))}


def no_counters(name, release):
    """(environment, arguments, exit code, words)"""
    if name == "rocprofv3":
        return {}, ["--pmc", "NO_SUCH_COUNTER"], 6, "no value of NO_SUCH_COUNTER"
    if name == "rocprof-compute" and release in PANDAS:
        return {"FAKE_FAIL": "pandas"}, [], *PANDAS[release]
    return {"FAKE_FAIL": "no_data"}, [], 6, NOTHING_RECORDED[name]


OUTCOMES = {
    "fine": lambda name, release: ({}, [], 0, ""),
    "tool missing": lambda name, release: ({"PATH": "/usr/bin:/bin", "ROCM_PATH": "/nonexistent"}, [], 3,
                                           f"{WRAPPERS[SCRIPTS[name]]} not found"),
    "wrong use": lambda name, release: ({}, ["--timeout", "soon"], 2, "--timeout: 'soon'"),
    "flags refused": lambda name, release: ({}, ["--bad-flag"], 2, "unrecognized arguments: --bad-flag"),
    "tool crash": lambda name, release: ({"FAKE_FAIL": "crash"}, ["--skip-preflight"], 1, "itself failed: "),
    "program crash": lambda name, release: ({"FAKE_TRAINER": "raise"}, [], 5, "HIP out of memory"),
    "time limit": lambda name, release: ({"FAKE_TRAINER": "hang"}, [], 124, "by --timeout"),
    "no data": lambda name, release: ({"FAKE_FAIL": "no_data"}, [], 6, NOTHING_RECORDED[name]),
    "no counters": no_counters,
    "interrupted": lambda name, release: ({"FAKE_TRAINER": "hang"}, [], 130, "got SIGINT"),
}


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


USUAL = "10.1"
BY_RELEASE = ("fine", "program crash", "no data", "no counters")  # what depends on it


@pytest.mark.parametrize("release, outcome", [
    *((USUAL, outcome) for outcome in OUTCOMES),
    *(pytest.param(release, outcome, marks=pytest.mark.slow) for release in RELEASES if release != USUAL
      for outcome in BY_RELEASE)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_outcome(name, release, outcome, machine, tmp_path, monkeypatch):
    environment, arguments, code, words = OUTCOMES[outcome](name, release)
    workplace = machine(release, **environment)
    if outcome == "tool missing":
        monkeypatch.setattr(rocm_machine, "wheel_folders", list)
    if outcome == "time limit":
        monkeypatch.setattr(wrappers.WRAPPERS[name], "timeout", 0.3)
    with interrupted_when(lambda: outcome == "interrupted" and (tmp_path / "record").exists()):
        done = start(SCRIPTS[name], "-o", "out", *arguments)
    error = complaint(done.stderr)
    assert done.returncode == code, done.stdout + done.stderr
    started = (workplace / "out").exists()
    assert started == (code not in (2, 3))
    if code == 0:
        assert not error and f"{SCRIPTS[name]}: done in" in done.stdout
    else:
        assert error.startswith(f"{SCRIPTS[name]}: ") and words in error, error
        assert "Traceback" not in error and len(error.splitlines()) == 1 or code == 3
    if started:
        record = json.loads((workplace / "out" / "manifest.json").read_text())
        assert record["exit_code"] == code and re.search(r"run\.log", error + str(record["files"]))
        assert outcome != "no data" or not (workplace / "out" / "rocprofv3_summary.txt").exists()
        assert all(pathlib.Path(workplace, "out", file["path"]).exists() for file in record["files"])
