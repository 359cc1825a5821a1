"""Every wrapper, release and outcome: the right exit code and one line that helps."""
import json

import pytest

from fusion_lab.rocm import all_profilers
from tests.rocm.fake_rocm.machine import RELEASES, TOOLS, start

NOTHING = {"rocprofv3": "recorded no GPU kernel", "rocprof-sys": "wrote no trace",
           "rocprof-compute": "left no counters and no roof"}
OF_EVERY_TOOL = {  # (environment, arguments, exit code, words)
    "tool missing": ({"PATH": "/usr/bin:/bin", "ROCM_PATH": "/nonexistent"}, [], 3, "not found on PATH"),
    "no torch": ({"FAKE_TRAINER": "no_torch"}, [], 3, "needs torch"),
    "no program": ({}, ["--program", "absent.py"], 2, "absent.py"),
    "no GPU": ({"FAKE_GPUS": "0"}, [], 4, "--device=/dev/kfd"),
    "wrong use": ({}, ["--timeout", "soon"], 2, "--timeout: 'soon'"),
    "tool crash": ({"FAKE_FAIL": "crash"}, ["--skip-preflight"], 1, "itself failed: "),
    "program raises": ({"FAKE_TRAINER": "raise"}, [], 5, "HIP out of memory"),
    "program fails": ({"FAKE_TRAINER": "exit3"}, [], 5, ""),
    "program crashes": ({"FAKE_TRAINER": "segv"}, [], 5, ""),
    "time limit": ({"FAKE_TRAINER": "hang"}, [], 124, "by --timeout"),
    "no data": ({"FAKE_FAIL": "no_data"}, [], 6, NOTHING)}
BY_RELEASE = ("program raises", "no data")
TWO = ["--pmc", "SQ_WAVES", "--pmc", "FETCH_SIZE"]
OF_ONE = [
    *(("rocprofv3", release, ({}, ["--pmc", "NO_SUCH"], 6, "no value of NO_SUCH")) for release in RELEASES),
    ("rocprofv3", "7.0", ({}, TWO, 6, "no value of SQ_WAVES: ")),  # the last --pmc counts
    ("rocprofv3", "10.1", ({"FAKE_TRAINER": "raise"}, TWO, 5, "HIP out of memory")),
    ("rocprofv3", "7.0", ({}, ["--pmc", "A B C D E"], 1, "fewer counters in one --pmc")),
    *((name, "7.0", ({}, ["--tool-option=--no-such"], 2, "look at --tool-option")) for name in TOOLS),
    ("rocprofv3", "7.0", ({"FAKE_FAIL": "fatal"}, [], 1, "librocprofiler-sdk-tool.so does not exist")),
    ("rocprof-compute", "7.0", ({"FAKE_FAIL": "pandas"}, [], 6, "'pandas<3'")),  # it ends well
    ("rocprof-compute", "10.1", ({"FAKE_FAIL": "no_roofline"}, ["--mode", "roof"], 6, "left no roof"))]


@pytest.mark.parametrize("name, release, outcome", [
    *((name, "10.1", outcome) for name in TOOLS for outcome in OF_EVERY_TOOL), *OF_ONE,
    *((name, release, outcome) for name in TOOLS for release in RELEASES[:-1] for outcome in BY_RELEASE)])
def test_outcome(name, release, outcome, machine, tmp_path, monkeypatch):
    environment, arguments, code, words = OF_EVERY_TOOL.get(str(outcome), outcome)
    words = words[name] if words is NOTHING else words
    workplace = machine(release, ROCPROFILER_REGISTER_LIBRARY="/of/the/parent", **environment)
    monkeypatch.setattr(all_profilers.WRAPPERS[name], "timeout", 0.3 if code == 124 else 60)
    done = start(name, "-o", "out put", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr and "\x1b" not in done.stderr, done.stderr
    *problems, last = done.stderr.splitlines()
    assert last.startswith("run_") and bool(problems) == (code in (3, 4)), done.stderr
    out = workplace / "out put"
    assert out.exists() == (code not in (2, 3, 4) or "look at" in words)
    if out.exists():
        assert json.loads((out / "manifest.json").read_text())["exit_code"] == code
        runs = (tmp_path / "record").read_text() if (tmp_path / "record").exists() else ""
        assert '"inherited": true' not in runs  # of the parent: with it nothing is recorded
