"""What differs between releases of the tools, and what they do without saying so; strict stand-ins again."""
import types

import pytest

from fusion_lab.measuring import roctx
from fusion_lab.rocm import kernel_summary
from fusion_lab.training.options import ProfilerConfig
from tests.rocm.fake_rocm.machine import RELEASES, manifest, start, summary_of

COMPUTE = (*RELEASES, "next")


# rocprofv3: regions and markers

@pytest.mark.parametrize("release", RELEASES[2:])
def test_selected_regions_record_the_measured_steps(release, machine):
    """7.0 to 7.2 listen to start and stop with marker tracing only; pip wheels have roctx as .so.1 only."""
    workplace = machine(release)
    done = start("run_rocprofv3.sh", "--selected-regions", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (summary_of(workplace / "x")["launches"], summary_of(workplace / "x")["steps"]) == (831, 10)


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


# rocprofv3: counters


def test_too_many_counters_for_one_pass(machine):
    machine("7.2")
    done = start("run_rocprofv3.sh", "--pmc", "A B C D E")
    assert done.returncode == 1 and "fewer counters in one --pmc" in done.stderr


@pytest.mark.parametrize("release, noted", [("7.0", True), ("7.2", True), ("7.12", True), ("7.13", False)])
def test_counters_that_ignore_selected_regions(release, noted, machine):
    """It is said; and a database, which cannot hold counters of what was not recorded, is not asked for."""
    workplace = machine(release)
    done = start("run_rocprofv3.sh", "--selected-regions", "--pmc", "SQ_WAVES", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("counts the whole run, whatever is selected" in done.stdout) == noted
    assert summary_of(workplace / "x")["launches"] == 831
    assert summary_of(workplace / "x")["counters"] == {"SQ_WAVES": 32 * (1663 if noted else 831)}


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


@pytest.mark.parametrize("release, trap, code, words", [
    ("6.3", "locale", 3, "locale-gen en_US.UTF-8"), ("7.2", "arch", 1, "Instinct"),
    ("7.0", "crash", 1, "rocprof-compute itself failed: KeyError: 'gpu_model'"),
])
def test_rocprof_compute_that_breaks_down(release, trap, code, words, machine):
    machine(release, FAKE_FAIL=trap)
    done = start("run_rocprof_compute.sh", "--skip-preflight")
    assert done.returncode == code and words in done.stderr and "\x1b" not in done.stderr, done.stderr


# rocprof-sys


# Tools that crash, releases nobody knows


@pytest.mark.parametrize("release, known", [("5.7", False), ("6.3", True), ("10.1", True), ("11.0", False)])
def test_releases_that_nobody_knows_are_said_to_be_unknown(release, known, machine):
    machine(None)
    shown = start("run_rocprofv3.sh", "--dry-run", "--rocm", release)
    assert shown.returncode == 0
    assert ("is not among those known here (6.3 to 10.1)" in shown.stdout) == (not known)
