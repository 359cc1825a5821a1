"""What differs between releases of the tools, and what they do without saying so; strict stand-ins again."""
import json
import re
import types

import pytest

from fusion_lab.measuring import roctx
from fusion_lab.rocm import kernel_summary, wrappers
from fusion_lab.training.files import UserError
from fusion_lab.training.options import ProfilerConfig
from tests.rocm.fake_rocm.machine import RELEASES, manifest, start

pytest_plugins = ("tests.rocm.fake_rocm.plugin",)
COMPUTE = (*RELEASES, "next")


def wrapper(name, *arguments):
    return wrappers.WRAPPERS[name].from_arguments([*arguments])


def summary_of(directory):
    return json.loads((directory / "rocprofv3_summary.json").read_text())


# ---------------------------------------------------------------------------------------------------------
# rocprofv3: regions and markers

@pytest.mark.parametrize("release", RELEASES[2:])
def test_selected_regions_record_the_measured_steps(release, machine):
    """7.0 to 7.2 listen to start and stop with marker tracing only; pip wheels have roctx as .so.1 only."""
    workplace = machine(release)
    done = start("run_rocprofv3.sh", "--selected-regions", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (summary_of(workplace / "x")["launches"], summary_of(workplace / "x")["steps"]) == (831, 10)


def test_a_program_that_could_not_reach_roctx_is_named_as_the_reason(machine):
    machine("7.13", FAKE_FAIL="no_roctx")
    done = start("run_rocprofv3.sh", "--selected-regions")
    assert done.returncode == 6
    assert "could not say where its measured steps begin, librocprofiler" in done.stderr


class Loader:
    """ctypes.CDLL of a machine on which some names can be loaded; its libraries note what is called."""
    calls = []

    def __init__(self, *names):
        self.names = names

    def __call__(self, name):
        if name not in self.names and name is not None:
            raise OSError(f"{name}: cannot open shared object file")
        library = type("Library", (), {})()
        if name in self.names:
            library.roctxProfilerResume = lambda thread: self.calls.append((name, "resume", thread))
            library.roctxProfilerPause = lambda thread: self.calls.append((name, "pause", thread))
        return library


@pytest.mark.parametrize("names, used", [
    ((None, "librocprofiler-sdk-roctx.so.1", "librocprofiler-sdk-roctx.so"), None),
    (("librocprofiler-sdk-roctx.so.1",), "librocprofiler-sdk-roctx.so.1"),
    (("librocprofiler-sdk-roctx.so",), "librocprofiler-sdk-roctx.so"),
], ids=["preloaded", "wheels", "packages"])
def test_roctx_of_the_process_itself_comes_first(names, used, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", Loader(*names))
    monkeypatch.setattr(Loader, "calls", [])
    roctx.loaded.cache_clear()
    roctx.resume()
    roctx.pause()
    roctx.loaded.cache_clear()
    assert Loader.calls == [(used, "resume", 0), (used, "pause", 0)]


def test_no_roctx_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", Loader())
    roctx.loaded.cache_clear()
    with pytest.raises(OSError, match="librocprofiler-sdk-roctx.so"):
        roctx.resume()


def test_an_error_while_paused_leaves_no_two_pauses(monkeypatch):
    """The SDK before 1.3 aborts on them, and the program's own error would be lost."""
    ranges = pytest.importorskip("fusion_lab.measuring.ranges")
    monkeypatch.setattr("torch.version.hip", "7.0.0")
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("ctypes.CDLL", Loader(None))
    monkeypatch.setattr(Loader, "calls", [])
    roctx.loaded.cache_clear()
    config = ProfilerConfig(enable_rocm_profiling=True)
    with pytest.raises(ZeroDivisionError), ranges.Profiling(
            config, types.SimpleNamespace(type="cuda"), [], None, 4) as profiling, profiling.paused():
        raise ZeroDivisionError
    roctx.loaded.cache_clear()
    assert [word for _, word, _ in Loader.calls] == ["resume", "pause", "resume", "pause"]


@pytest.mark.parametrize("arguments, launches, words", [
    ([], 1663, "start-up and evaluation are in the count"),
    (["--marker-trace"], 1657, "start-up is in the count, evaluation is not"),
    (["--sys-trace"], 1657, "start-up is in the count, evaluation is not"),
])
def test_markers_end_the_record_with_the_measured_steps(arguments, launches, words, machine):
    workplace = machine("7.0")
    assert start("run_rocprofv3.sh", "-o", "x", *arguments).returncode == 0
    assert summary_of(workplace / "x")["launches"] == launches
    assert words in summary_of(workplace / "x")["steps_counted"]


# ---------------------------------------------------------------------------------------------------------
# rocprofv3: counters

@pytest.mark.parametrize("release", ["6.4", "7.2", "10.1"])
def test_an_unknown_counter_is_no_success(release, machine):
    """The tool warns and goes on; what was asked for is not there."""
    workplace = machine(release)
    done = start("run_rocprofv3.sh", "--pmc", "SQ_WAVES,SQ_WAVE", "-o", "x")
    assert done.returncode == 6 and "no value of SQ_WAVE:" in done.stderr, done.stderr
    assert summary_of(workplace / "x")["counters"] == {"SQ_WAVES": 1663 * 32}


def test_too_many_counters_for_one_pass(machine):
    machine("7.2")
    done = start("run_rocprofv3.sh", "--pmc", "A B C D E")
    assert done.returncode == 1 and "fewer counters in one --pmc" in done.stderr


def test_averages_and_percentages_are_not_summed(machine):
    workplace = machine("7.2")
    done = start("run_rocprofv3.sh", "--pmc", "SQ_WAVES OccupancyPercent FETCH_SIZE", "-o", "x")
    assert done.returncode == 0, done.stderr
    summary = summary_of(workplace / "x")
    assert summary["counters"] == {"SQ_WAVES": 1663 * 32, "FETCH_SIZE": 1663 * 2}
    assert summary["counter_averages"] == {"OccupancyPercent": 40}
    text = (workplace / "x" / "rocprofv3_summary.txt").read_text()
    assert re.search(r"OccupancyPercent +40.0 +mean", text)


@pytest.mark.parametrize("release, noted", [("7.0", True), ("7.2", True), ("7.12", True), ("7.13", False)])
def test_counters_that_ignore_selected_regions(release, noted, machine):
    """It is said; and a database, which cannot hold counters of what was not recorded, is not asked for."""
    workplace = machine(release)
    done = start("run_rocprofv3.sh", "--selected-regions", "--pmc", "SQ_WAVES", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("counts the whole run, whatever is selected" in done.stdout) == noted
    assert summary_of(workplace / "x")["launches"] == 831
    assert summary_of(workplace / "x")["counters"] == {"SQ_WAVES": 32 * (1663 if noted else 831)}


def test_counters_that_are_all_zero(machine):
    machine("7.2", FAKE_FAIL="zero_counters")
    done = start("run_rocprofv3.sh", "--pmc", "SQ_WAVES")
    assert done.returncode == 6 and "amd-smi set" in done.stderr


# ---------------------------------------------------------------------------------------------------------
# rocprof-compute

@pytest.mark.slow
@pytest.mark.parametrize("release", COMPUTE)
def test_rocprof_compute_counts_each_launch_once(release, machine):
    """No shell as the program, results in every form they have had, one of several passes."""
    workplace = machine(release)
    done = start("run_rocprof_compute.sh", "-o", "out", "--title", "it's", "--dropout", "0.1")
    assert done.returncode == 0 and "counters and roof collected" in done.stdout, done.stdout + done.stderr
    first, second = manifest(workplace / "out")["commands"][0]["argv"][-2:]
    assert first.startswith("/") and "python" in first and second == "workload.py"
    assert kernel_summary.summarize(workplace / "out")["launches"] == 1663


@pytest.mark.parametrize("release, code", [("6.4", 1), ("7.0", 6), ("7.2", 6)])
def test_pandas_3_is_not_taken_for_counters(release, code, machine):
    """The tool's own input lists in perfmon/ are no results, and its exit code 0 is no success."""
    machine(release, FAKE_FAIL="pandas")
    done = start("run_rocprof_compute.sh")
    assert done.returncode == code and "done" not in done.stdout, done.stdout
    assert "pandas<3" in done.stderr


@pytest.mark.parametrize("release", ["7.2", "7.13"])
def test_packages_that_are_advised(release, machine):
    machine(release, FAKE_FAIL="packages")
    done = start("run_rocprof_compute.sh")
    assert done.returncode == 3 and "pip install 'pandas<3' -r $ROCM_PATH/libexec" in done.stderr


def test_counters_that_are_missing_are_named(machine):
    workplace = machine("7.13")
    assert start("run_rocprof_compute.sh", "-o", "out", "--no-roof").returncode == 0
    (workplace / "out" / "run.log").write_text("")
    place, = (workplace / "out" / "workloads").glob("*/MI300X_A1")
    (place / "results_pmc_perf_1.csv").unlink()
    session = wrapper("rocprof-compute", "-o", "out", "--no-roof")
    assert session.judge("") == (0, "2 of 4 counters collected (not GRBM_COUNT, SQ_BUSY_CYCLES)")


@pytest.mark.parametrize("name", ["a-b", "a.b", "x" * 27, ""])
def test_workload_names_that_some_releases_refuse(name, machine):
    machine(None)
    with pytest.raises(UserError, match="--output-name"):
        wrapper("rocprof-compute", "--dry-run", "--output-name", name)
    wrapper("rocprof-compute", "--dry-run", "--output-name", "a_b" + "x" * 23)


@pytest.mark.parametrize("release, trap, code, words", [
    ("6.3", "locale", 3, "locale-gen en_US.UTF-8"), ("7.2", "arch", 1, "Instinct"),
    ("7.0", "crash", 1, "rocprof-compute itself failed: KeyError: 'gpu_model'"),
])
def test_rocprof_compute_that_breaks_down(release, trap, code, words, machine):
    machine(release, FAKE_FAIL=trap)
    done = start("run_rocprof_compute.sh", "--skip-preflight")
    assert done.returncode == code and words in done.stderr and "\x1b" not in done.stderr, done.stderr


# ---------------------------------------------------------------------------------------------------------
# rocprof-sys

@pytest.mark.parametrize("release, words", [("6.4", "left out"), ("7.1", "left out"), ("7.2", None)])
def test_rocpd_where_rocprof_sys_has_it(release, words, machine):
    workplace = machine(release)
    done = start("run_rocprof_sys.sh", "--rocpd", "-o", "x")
    assert done.returncode == 0, done.stderr
    assert bool(list((workplace / "x").glob("*.db"))) == (words is None)
    assert ("no rocpd database" in done.stdout) == (words is not None)


@pytest.mark.parametrize("release", [release for release in RELEASES if release != "wheels"])
def test_rocprof_sys_finds_the_libraries_of_torch(release, machine):
    workplace = machine(release, LD_LIBRARY_PATH="/theirs")
    done = start("run_rocprof_sys.sh", "-o", "x")
    assert done.returncode == 0 and "no GPU kernel" not in done.stdout
    trace, = (workplace / "x").glob("*.proto")
    assert b"rocm_kernel_dispatch" in trace.read_bytes()
    path = manifest(workplace / "x")["commands"][0]["environment"]["LD_LIBRARY_PATH"]
    assert path.endswith("torch/lib:/theirs")


def test_rocprof_sys_asks_for_cpu_time_and_memory(machine):
    workplace = machine("7.0")
    assert start("run_rocprof_sys.sh", "-o", "x").returncode == 0
    names = {re.sub(r"-\d+", "", path.name) for path in (workplace / "x").iterdir()}
    assert {"cpu_clock.txt", "peak_rss.txt", "page_rss.txt", "wall_clock.txt"} <= names


# ---------------------------------------------------------------------------------------------------------
# Tools that crash, releases nobody knows

@pytest.mark.parametrize("script, name", [("run_rocprofv3.sh", "rocprofv3"),
                                          ("run_rocprof_sys.sh", "rocprof-sys-python"),
                                          ("run_rocprof_compute.sh", "rocprof-compute")])
def test_a_crash_of_the_tool_is_not_the_programs(script, name, machine):
    machine("7.0", FAKE_FAIL="crash")
    done = start(script, "--skip-preflight")
    assert done.returncode == 1 and f"{name} itself failed" in done.stderr, done.stderr


@pytest.mark.parametrize("release, known", [("5.7", False), ("6.3", True), ("10.1", True), ("11.0", False)])
def test_releases_that_nobody_knows_are_said_to_be_unknown(release, known, machine):
    machine(None)
    shown = start("run_rocprofv3.sh", "--dry-run", "--rocm", release)
    assert shown.returncode == 0
    assert ("is not among those known here (6.3 to 10.1)" in shown.stdout) == (not known)
