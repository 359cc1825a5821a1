"""rocprof-compute: how it is called, what it collected, what it refuses."""
import sys

import pytest

from fusion_lab.rocm import kernel_summary
from tests.rocm.fake_rocm import common
from tests.rocm.fake_rocm.machine import everywhere, manifest, recorded, start, wrapper


def test_how_rocprof_compute_is_called(machine):
    machine("7.0")
    found = wrapper("rocprof-compute", "--output-name", "w", "--device", "3")
    program = ["--", sys.executable, "workload.py"]  # a path, and no shell
    assert [command.argv[1:] for command in found.commands()] == [
        ["profile", "--name", "w_counters", "--no-roof", *program],
        ["profile", "--name", "w_roof", "--roof-only", "--device", "3", *program]]
    assert found.own_flags == ["--device", "3"]
    found.has = "--roofline".__eq__  # of what comes after 10.1
    assert found.commands()[1].argv[4:] == ["--roofline", "--roofline-device", "3", *program]


@pytest.mark.parametrize("arguments, words", [
    (["--mode", "analyze", "--no-roof"], "not allowed with"), (["--roof-only", "--dispatch", "3"], "make it"),
    *((["--output-name", name], "at most 26") for name in ("a-b", "a.b", "a/b", "", "a" * 27)),
    (["--list-stats", "--seed", "3"], "runs no trainer")])
def test_what_contradicts_itself_is_refused(arguments, words, machine):
    machine("7.0")
    done = start("rocprof-compute", *arguments)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


@everywhere
def test_profile_then_analyze(release, machine, tmp_path):
    """Each launch counts once, whatever the form of the results; the stand-ins refuse a shell."""
    workplace = machine(release)
    done = start("rocprof-compute", "--device", "1", "--title", "it's", "--dropout", "0.1")
    assert done.returncode == 0 and "counters and roof collected" in done.stdout, done.stdout + done.stderr
    out = workplace / "rocprof_compute_profiles_v2"
    assert kernel_summary.summarize(out)["launches"] == common.LAUNCHES
    runs = recorded(tmp_path)
    assert len(runs) == 3 and runs[0]["argv"][-6:] == ["--device", "1", "--title", "it's", "--dropout", "0.1"]
    listed = start("rocprof-compute", "--list-stats", "--dispatch", "3", "--dispatch", "12")
    assert listed.returncode == 0 and "Dispatch list" in listed.stdout
    assert "12" in (out / "dispatch_12.txt").read_text() and (out / "list_stats.txt").exists()
    assert start("rocprof-compute", "--mode", "analyze").returncode == 0
    assert (out / "analysis_roof.txt").exists() and len(recorded(tmp_path)) == 3
    assert manifest(out)["reason"].startswith("counters") and manifest(out / "analysis")["exit_code"] == 0
    assert start("rocprof-compute", "--mode", "analyze", "--output-name", "x").returncode == 2  # no workload


def test_of_a_gpu_without_a_roofline_the_counters_are_a_result(machine):
    machine("10.1", FAKE_FAIL="no_roofline")
    done = start("rocprof-compute")
    assert done.returncode == 0 and "counters collected, no roofline of this GPU" in done.stdout
