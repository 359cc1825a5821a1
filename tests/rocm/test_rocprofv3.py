"""rocprofv3: databases first, counters once, several passes, and options that are passed on."""

import pytest

from fusion_lab.rocm import records
from fusion_lab.training import locks
from fusion_lab.training.files import UserError
from tests.rocm.fake_rocm.machine import manifest, recorded, start, summary_of, wrapper


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
