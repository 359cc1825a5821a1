"""rocprofv3: databases first, counters once, several passes, and options that are passed on."""
import os
import pathlib
import sys

import pytest

from fusion_lab.rocm import kernel_summary, records
from fusion_lab.training import locks
from fusion_lab.training.files import NO_DATA, OK, UserError
from tests.rocm.fake_rocm.machine import (
    RELEASES,
    ROOT,
    TINY,
    csv,
    everywhere,
    manifest,
    recorded,
    run_of,
    start,
    summary_of,
    wrapper,
)


@pytest.mark.parametrize("release, source", [("6.4", "kernel statistics CSV"), ("7.0", "rocpd database"),
                                             ("10.1", "rocpd database"), ("wheels", "rocpd database")])
def test_time_by_range_from_what_the_release_writes(release, source, machine):
    workplace = machine(release)
    done = start("run_rocprofv3.sh", "--marker-trace", "--hip-trace", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(workplace / "x")
    assert summary["source"] == source and bool(list((workplace / "x").glob("*.csv"))) == (release == "6.4")
    assert {row["range"]: row["launches"] for row in summary["by_range"]} == {
        "pair_transition": 828, "pair_transition.backward": 829}
    assert summary["gpu_busy_percent"] == pytest.approx(93.6, abs=0.1)


def test_counters_of_several_passes_are_merged(machine, tmp_path):
    """One run of the program for each --pmc; a counter of two passes is that of the first."""
    workplace = machine("7.12")
    done = start("run_rocprofv3.sh", "-o", "x", "--pmc", "SQ_WAVES,FETCH_SIZE",
                 "--pmc", "WRITE_SIZE SQ_WAVES")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(recorded(tmp_path)) == 2 and {path.name for path in (workplace / "x").glob("pass_*")} == {
        "pass_1", "pass_2"}
    summary = summary_of(workplace / "x")
    assert (summary["launches"], summary["counters"]) == (1663, {
        "SQ_WAVES": 32 * 1663, "FETCH_SIZE": 2 * 1663, "WRITE_SIZE": 1663})
    assert summary["memory_gb_per_s"] == pytest.approx(3 * 1024 * 1663 / 17.026e6)
    assert [name for name, *_ in records.read_counters(workplace / "x")].count("SQ_WAVES") == 1663
    machine("7.2")
    with pytest.raises(UserError, match="releases before 7.12 keep the last"):
        wrapper("rocprofv3", "--pmc", "A", "--pmc", "B")


def test_words_that_are_passed_on(machine):
    workplace = machine("7.2")
    words = ["--tool-option=--collection-period", "--tool-option", "1:2:1", "--tool-option=--kernel-rename"]
    assert start("run_rocprofv3.sh", "-o", "x", *words, "--seed", "3").returncode == 0
    argv = manifest(workplace / "x")["commands"][0]["argv"]
    place = argv.index("--")
    assert argv[place - 3:place] == ["--collection-period", "1:2:1", "--kernel-rename"]
    assert argv[-2:] == ["--seed", "3"]


@pytest.mark.parametrize("behaviour, words", [("raise", "HIP out of memory"), ("exit3", "exit code 1")])
def test_a_program_that_fails_in_a_pass_is_not_the_profiler(behaviour, words, machine):
    """Of several passes rocprofv3 calls it a fatal error of its own, and returns 1."""
    machine("7.12", FAKE_TRAINER=behaviour)
    done = start("run_rocprofv3.sh", "--pmc", "SQ_WAVES", "--pmc", "FETCH_SIZE")
    assert done.returncode == 5 and words in done.stderr, done.stderr


@pytest.mark.parametrize("word, words", [
    ("--no-such=1", "--no-such: not an option of rocprofv3 of ROCm 7.2"), ("-P", "-P: not an option"),
    ("--", "--tool-option=--: this script says it"),
    ("--output-directory=/tmp", "--tool-option=--output-directory=/tmp: this script says it")])
def test_words_that_are_not_passed_on(word, words, machine):
    workplace = machine("7.2")
    with pytest.raises(UserError, match=words):
        wrapper("rocprofv3", f"--tool-option={word}").commands()
    locks.release()
    done = start("run_rocprofv3.sh", f"--tool-option={word}")
    assert done.returncode == 2 and words in done.stderr and not list(workplace.iterdir())


def test_words_for_a_tool_that_is_not_here(machine):
    machine(None)
    argv = wrapper("rocprofv3", "--dry-run", "--tool-option=--kernel-rename").commands()[0].argv
    assert argv[argv.index("--") - 1] == "--kernel-rename"
    assert argv[argv.index("--output-format") + 1] == "csv"  # which every release takes
    argv = wrapper("rocprofv3", "--dry-run", "--rocm", "7.0").commands()[0].argv
    assert argv[argv.index("--output-format") + 1] == "rocpd" and "--stats" not in argv


@pytest.mark.parametrize("release, arguments, expected, notes", [
    ("7.0", [], [], []), ("7.0", ["--hip-trace", "--sys-trace"], ["--hip-trace", "--sys-trace"], []),
    ("7.0", ["--memory-trace"], ["--memory-copy-trace", "--memory-allocation-trace"], []),
    ("7.0", ["--pmc", " A, B "], ["--pmc", "A", "B"], []),
    ("7.0", ["--selected-regions"], ["--marker-trace", "--selected-regions"], []),
    ("7.0", ["--selected-regions", "--marker-trace", "--pmc", "A"],
     ["--marker-trace", "--pmc", "A", "--selected-regions"],
     ["rocprofv3 of ROCm 7.0 counts the whole run, whatever is selected"]),
    ("10.0", ["--pmc", "A B", "--pmc", "C"], ["--hip-graph-trace", "--pmc", "A", "B", "--pmc", "C"], []),
    ("6.4", ["--selected-regions"], [], [
        " has no --selected-regions: the whole run is recorded, start-up and warm-up included"])])
def test_how_rocprofv3_is_called(release, arguments, expected, notes, machine):
    machine(release)
    found = wrapper("rocprofv3", "-o", "out", *arguments)
    command, = found.commands()
    paused = {"--selected-regions", "--pmc"} <= set(arguments)  # which rocpd cannot hold before 7.13
    csv = release == "6.4" or paused
    form = ["--kernel-trace", *["--stats"] * csv], ["--output-format", "csv" if csv else "rocpd"]
    assert command.argv[1:] == [
        *form[0], *expected, *form[1], "--output-directory", found.directory, "--output-file",
        f"{found.profiled.short_name()}_%pid%", "--", sys.executable, found.profiled.path,
        *found.program_flags]
    assert command.unset_env == ("ROCPROF_OUTPUT_FORMAT", "ROCPROF_OUTPUT_PATH", "ROCPROF_OUTPUT_FILE_NAME")
    assert all(note.endswith(words) for note, words in zip(found.notes, notes, strict=True))
    assert found.selected == (release == "7.0" and "--selected-regions" in arguments)


@pytest.mark.parametrize("switch, until_the_end", [
    ("--marker-trace", True), ("--runtime-trace", True), ("--sys-trace", True), ("--hip-trace", False)])
def test_with_markers_recording_ends_with_the_steps(switch, until_the_end, machine):
    machine("7.0")
    found = wrapper("rocprofv3", "-o", "out", switch, "--pftrace")
    steps = found.steps()
    assert steps["ends_with_steps"] is until_the_end and steps["selected_regions"] is False
    assert found.commands()[0].argv[3:6] == ["--output-format", "rocpd", "pftrace"]


def test_rocprofv3_refuses_what_would_mix_results(machine, tmp_path):
    machine("7.0")
    with pytest.raises(UserError, match="--pmc: given twice"):
        wrapper("rocprofv3", "--pmc", "A", "--pmc", "B")
    with pytest.raises(UserError, match="--compare: .*absent: no such directory"):
        wrapper("rocprofv3", "--compare", "absent")
    found = wrapper("rocprofv3", "-o", "out")
    os.makedirs(found.directory)
    assert found.replaced() == set()
    run_of(pathlib.Path(found.directory), ("k", 3, 1_500_000))
    with pytest.raises(UserError, match="holds kernel records \\(7_kernel_stats.csv\\)"):
        found.replaced()
    again = wrapper("rocprofv3", "-o", "more", "--compare", "out")
    os.makedirs(again.directory)
    run_of(pathlib.Path(again.directory), ("k", 6, 1_500_000))
    assert again.judge("") == (OK, "6 kernel launches, 1.500 ms of kernels")
    assert summary_of(pathlib.Path(again.directory))["comparison"]["rows"][0]["change_percent"] == 100
    assert pathlib.Path(again.directory, "rocprofv3_summary.txt").read_text().count("Compared with") == 1


@pytest.fixture
def v3_run(machine):
    """A wrapper of rocprofv3 that asked for two counters."""
    machine("7.0")
    found = wrapper("rocprofv3", "-o", "out", "--pmc", "SQ_WAVES:device=0, GRBM_COUNT")
    os.makedirs(found.directory)
    return found


def test_a_trace_without_its_counters_is_no_result(v3_run):
    directory = pathlib.Path(v3_run.directory)
    assert v3_run.judge("") == (NO_DATA, "rocprofv3 recorded no GPU kernel: the program used no GPU, or only "
                                "one that is hidden from the profiler")
    run_of(directory, ("k", 3, 1_500_000))
    code, reason = v3_run.judge("")
    assert code == NO_DATA and reason.startswith("rocprofv3 left no value of SQ_WAVES, GRBM_COUNT: miss")
    for value, words in ((0, "all counters are 0. On RDNA GPUs"), (5, None)):
        csv(directory / "7_counter_collection.csv", "Counter_Name,Counter_Value", ("SQ_WAVES", 0),
            ("GRBM_COUNT", value))
        verdict = v3_run.judge("")
        assert verdict[1].startswith(words) if words else verdict == (
            OK, "3 kernel launches, 1.500 ms of kernels")
    assert v3_run.why_no_counters(dict(SQ_WAVES=1)).startswith("rocprofv3 left no value of GRBM_COUNT:")
    v3_run.selected = True
    assert v3_run.why_no_kernel("no profiler start and stop (lib missing)").endswith("begin, lib missing")
    assert "no region was marked" in v3_run.why_no_kernel("")


@everywhere
def test_rocprofv3_switches(generation, machine):
    workplace = machine(generation, ROCPROF_OUTPUT_FORMAT="json", ROCPROF_OUTPUT_PATH="/nonexistent",
                        ROCPROF_OUTPUT_FILE_NAME="theirs")
    done = start("run_rocprofv3.sh", "--hip-trace", "--memory-trace", "--runtime-trace", "--sys-trace",
                 "--marker-trace", "--truncate-kernels", "--pftrace", "--pmc", "SQ_WAVES, GRBM_COUNT")
    assert done.returncode == 0, done.stdout + done.stderr
    out = workplace / "rocprofv3_profiles_v2"
    argv = manifest(out)["commands"][0]["argv"]
    assert argv[argv.index("--pmc") + 1:][:2] == ["SQ_WAVES", "GRBM_COUNT"]
    assert {"--memory-copy-trace", "--memory-allocation-trace"} < set(argv)
    form = "rocpd" if generation == "10.1" else "csv"  # 7.0 counts on where recording has ended
    assert argv[argv.index("--output-format") + 1:][:2] == [form, "pftrace"]
    assert argv.index("--") < argv.index("--enable-rocm-profiling")  # ranges come from the trainer
    records = "results.db" if form == "rocpd" else "kernel_stats.csv"
    assert list(out.glob(f"trainer_[0-9]*_{records}")) and list(out.glob("*.pftrace"))
    launches = 1663 if generation == "7.0" else 1657  # 7.0 counts the evaluation as well
    assert summary_of(out)["counters"] == dict.fromkeys(("SQ_WAVES", "GRBM_COUNT"), 32 * launches)


def test_modes_of_the_trainer_have_no_steps(machine):
    workplace = machine("7.0")
    assert start("run_rocprofv3.sh", "-o", "x", "--compare-fusion").returncode == 0
    assert summary_of(workplace / "x")["launches_per_step"] is None


def test_an_option_that_the_release_lacks(machine):
    machine(None)
    dry = ["--dry-run", "--rocm", "6.2"]
    with pytest.raises(UserError, match="--runtime-trace: not an option of rocprofv3 of ROCm 6.2; it came"):
        wrapper("rocprofv3", *dry, "--runtime-trace").commands()
    newer = wrapper("rocprofv3", "--dry-run", "--selected-regions")
    assert "this is for ROCm 7.0 to" in newer.script_text(newer.commands())
    copies = wrapper("rocprofv3", "--dry-run", "--memory-trace").commands()[0].argv
    assert "--memory-copy-trace" in copies and "--memory-allocation-trace" not in copies  # accepted by all


@pytest.mark.slow
def test_real_trainer(machine):
    """The flags of the wrapper are the trainer's, and its summary is found; torch here is no ROCm build."""
    workplace = machine("7.0", TINYOPENFOLD_SCRIPT=str(ROOT / "tiny_openfold_v2.py"), PYTHONPATH="",
                        PYTHONPYCACHEPREFIX="")
    done = start("run_rocprofv3.sh", "--skip-preflight", "-o", "out", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    record, summary = manifest(workplace / "out"), kernel_summary.summarize(workplace / "out")
    assert record["steps"] == {"measured": 2, "warmup": 1, "selected_regions": False,
                               "ends_with_steps": False}
    assert summary["steps"] == 3
    figures = kernel_summary.main_figures(workplace / "out")
    assert figures["median step ms"] > 0 and figures["samples/s"] > 0


@pytest.mark.parametrize("release", RELEASES[2:])
def test_selected_regions_record_the_measured_steps(release, machine):
    """7.0 to 7.2 listen to start and stop with marker tracing only; pip wheels have roctx as .so.1 only."""
    workplace = machine(release)
    done = start("run_rocprofv3.sh", "--selected-regions", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (summary_of(workplace / "x")["launches"], summary_of(workplace / "x")["steps"]) == (831, 10)


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
