"""rocprof-compute: rooflines that a release does not draw, counters that have other names in results."""
import os
import pathlib
import sys

import pytest

from fusion_lab.rocm import kernel_summary
from fusion_lab.training.files import FAILED, NO_DATA, OK, PROGRAM_FAILED, TIMEOUT, UserError
from tests.rocm.fake_rocm.machine import RELEASES, everywhere, manifest, recorded, start, wrapper


@pytest.mark.slow
@pytest.mark.parametrize("release, version, name", [
    ("7.2", 90008, "gfx908"), ("6.3", 90402, "gfx942"), ("6.4", 90402, None), ("7.13", 110501, "gfx1151"),
    ("7.14", 110500, "gfx1150"), ("10.0", 110501, None), ("10.0", 110503, "gfx1153"),
    ("10.1", 120500, "gfx1250")])
def test_no_roofline_where_there_is_none(release, version, name, machine, gpu):
    """It is left out with a note, and the session succeeds; asked for by itself, it is refused."""
    workplace = machine(release)
    gpu(version)
    done = start("run_rocprof_compute.sh", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (f"draws no roofline of {name}: left out" in done.stdout) == (name is not None)
    assert len(manifest(workplace / "x")["commands"]) == (1 if name else 2)
    assert ("counters and roof collected" in done.stdout) == (name is None)
    alone = start("run_rocprof_compute.sh", "-o", "y", "--roof-only")
    assert (alone.returncode, "draws no roofline" in alone.stderr) == ((1, True) if name else (0, False))


def test_an_unknown_release_is_not_judged_by_its_gpus(machine, gpu):
    machine("next")
    gpu(110000)
    shown = start("run_rocprof_compute.sh", "--preflight")
    assert shown.returncode == 0 and "ROCm 10.2 is not among those known here" in shown.stdout


def test_options_are_those_of_the_mode(machine):
    """--block is known to both, --set to profile of 7.1 on."""
    machine("7.1")
    words = ["--tool-option=--set", "--tool-option", "launch_stats"]
    first, second = (command.argv for command in wrapper("rocprof-compute", *words).commands())
    assert first[4:7] == ["--no-roof", "--set", "launch_stats"] and second[-5:-3] == ["--set", "launch_stats"]
    assert start("run_rocprof_compute.sh", "-o", "x", "--no-roof", *words).returncode == 0
    assert start("run_rocprof_compute.sh", "-o", "x", "--mode=analyze", "--tool-option=--block",
                 "--tool-option=2").returncode == 0
    with pytest.raises(UserError, match="--set: not an option of rocprof-compute of ROCm 7.1"):
        wrapper("rocprof-compute", "-o", "x", "--mode=analyze", *words).commands()


@pytest.mark.parametrize("arguments, parts", [
    ([], ["counters", "roof"]), (["--mode", "profile"], ["counters", "roof"]), (["--no-roof"], ["counters"]),
    (["--mode", "roof"], ["roof"]), (["--roof-only"], ["roof"]),
    (["--roof-only", "--mode", "roof"], ["roof"]),
    (["--mode", "analyze"], None), (["--list-stats"], None), (["--dispatch", "0"], None),
    (["--mode", "analyze", "--list-stats", "--dispatch", "1"], None)])
def test_what_rocprof_compute_is_to_do(arguments, parts, machine):
    machine("7.0")
    found = wrapper("rocprof-compute", *arguments)
    assert (found.analyze, found.runs_program) == (parts is None, parts is not None)
    assert parts is None or found.parts == parts
    name = "analysis" if parts is None else "rocprof_compute_profiles_v2"
    assert os.path.basename(found.records) == name


@pytest.mark.parametrize("device, flags", [([], []), (["--device", "3"], ["--device", "3"])])
def test_how_rocprof_compute_is_called(device, flags, machine):
    machine("7.0")
    found = wrapper("rocprof-compute", "--output-name", "w", *device)
    commands, number = found.commands(), "3" if device else "0"
    program = ["--", sys.executable, "workload.py"]
    assert [command.argv[1:] for command in commands] == [
        ["profile", "--name", "w_counters", "--no-roof", *program],
        ["profile", "--name", "w_roof", "--roof-only", "--device", number, *program]]
    assert all(command.cwd == found.directory for command in commands) and found.own_flags == flags
    found.has = "--roofline".__eq__
    assert found.commands()[1].argv[4:] == ["--roofline", "--roofline-device", number, *program]


@pytest.mark.parametrize("arguments, words", [
    (["--roof-only", "--no-roof"], "contradicts"), (["--mode", "roof", "--no-roof"], "contradicts"),
    *((["--mode", "analyze", more], "are for") for more in ("--roof-only", "--no-roof")),
    (["--mode", "profile", "--list-stats"], "are for"), (["--roof-only", "--list-stats"], "are for"),
    (["--no-roof", "--dispatch", "1"], "are for"),
    *((["--output-name", name], "allowed are letters") for name in ("a-b", "a.b", "a/b", "")),
    (["--output-name", "a" * 27], "at most 26"),
    (["-o", "a..b"], "refuses a path")])
def test_what_contradicts_itself_is_refused(arguments, words, machine):
    machine("7.0")
    with pytest.raises(UserError, match=words):
        wrapper("rocprof-compute", *arguments)


def test_which_reports_rocprof_compute_writes(machine):
    """One a workload, or of the first workload what was asked for; the list of kernels is shown as well."""
    machine("7.0")
    _, place = compute_run()
    report = ["analyze", "--path", place]

    def reports(*arguments):
        found = wrapper("rocprof-compute", "-o", "out", "--mode", "analyze", *arguments)
        return [(command.argv[1:], command.log, command.echo) for command in found.commands()]
    assert reports() == [(report, "analysis_counters.txt", False)]
    assert reports("--list-stats", "--dispatch", "0", "--dispatch", "12") == [
        ([*report, "--list-stats"], "list_stats.txt", True),
        ([*report, "--dispatch", "0"], "dispatch_0.txt", False),
        ([*report, "--dispatch", "12"], "dispatch_12.txt", False)]
    roof = place.replace("counters", "roof")
    os.makedirs(roof)
    open(os.path.join(roof, "sysinfo.csv"), "w").close()
    assert reports()[1] == (["analyze", "--path", roof], "analysis_roof.txt", False)
    found = wrapper("rocprof-compute", "-o", "out", "--mode", "analyze", "--dry-run", "--output-name", "x")
    assert found.commands()[0].argv[-1] == os.path.join(found.directory, "workloads/x_counters/GPU_MODEL")
    assert found.notes == ["GPU_MODEL stands for the folder that profiling creates"]
    found.options.dry_run = False
    with pytest.raises(UserError, match="no workload x_\\* there. Run ./run_rocprof_compute.sh first"):
        found.commands()
    assert found.judge(" ") == (NO_DATA, "the report is empty") and found.steps() is None
    assert found.judge("a table") == (OK, f"wrote {found.reports}")
    found = wrapper("rocprof-compute", "--roof-only", "--num-steps", "2")
    assert found.steps()["measured"] == 2 and found.amount(None) == "roof collected"


def test_failures_of_rocprof_compute_are_told_from_those_of_the_program(machine):
    machine("6.4")
    explain = wrapper("rocprof-compute").explain
    assert explain(TIMEOUT, "late", "x") == (TIMEOUT, "late")
    assert explain(PROGRAM_FAILED, "said", "execution failed") == (PROGRAM_FAILED, "said")
    begins = "rocprof-compute itself failed: "
    assert explain(PROGRAM_FAILED, "", "ERROR a\nERROR b\nlast\n") == (FAILED, f"{begins}ERROR b")
    assert explain(PROGRAM_FAILED, "", f"first\n{'l' * 201}") == (FAILED, begins + "l" * 200)
    assert explain(PROGRAM_FAILED, "", "") == (FAILED, f"{begins}it printed nothing")
    nothing = "AttributeError: 'NoneType' object"
    assert explain(PROGRAM_FAILED, "", nothing)[1].startswith(f"{begins}{nothing}. ")
    machine("7.0")
    assert wrapper("rocprof-compute").explain(PROGRAM_FAILED, "", nothing)[1] == begins + nothing


def compute_run(*arguments):
    """A wrapper of rocprof-compute with the workload trainer_counters, of two counters asked for."""
    found = wrapper("rocprof-compute", "-o", "out", *arguments)
    place = os.path.join(found.directory, "workloads", "trainer_counters", "MI300X")
    os.makedirs(os.path.join(place, "perfmon"))
    for name, text in (("sysinfo.csv", "gpu\n"), ("perfmon/a.txt", "pmc: SQ_WAVES GRBM_COUNT\n"),
                       ("pmc_perf.csv", "Kernel_Name,SQ_WAVES,GRBM_COUNT\nk,1,2\n")):
        pathlib.Path(place, name).write_text(text)
    return found, place


def test_counters_without_a_roofline_are_not_all_that_was_asked_for(machine, capsys):
    """Of a tool that exits 0 and leaves no roofline."""
    machine("7.0")
    found, place = compute_run()
    assert found.judge("fine") == (NO_DATA, "rocprof-compute left no roof in workloads/")
    assert capsys.readouterr().out == f"counters: {place}\n"
    roof = os.path.join(found.directory, "workloads", "trainer_roof", "MI300X")
    os.makedirs(roof)
    for name in ("sysinfo.csv", "roofline.csv"):
        open(os.path.join(roof, name), "w").close()
    assert found.judge("Cannot write results for x")[1].startswith(
        "rocprof-compute left no roof in workloads/: Cannot write results for. It cannot work with pandas 3")
    pathlib.Path(roof, "roofline.csv").write_text("flops\n1\n")
    assert found.judge("fine") == (OK, "counters and roof collected")


def test_counters_that_are_missing_are_counted_and_named(machine):
    machine("7.0")
    found, place = compute_run("--no-roof")
    assert found.judge("") == (OK, "counters collected")
    os.remove(os.path.join(place, "pmc_perf.csv"))
    assert found.judge("") == (NO_DATA, "rocprof-compute left no counters in workloads/")
    pathlib.Path(place, "pmc_perf.csv").write_text("Kernel_Name,SQ_WAVES\nk,1\n")
    assert found.judge("") == (OK, "1 of 2 counters collected (not GRBM_COUNT)")
    for extra, text in ((4, " (not A0, A1, A2, A3, GRBM_COUNT)"),
                        (6, " (not A0, A1, A2, A3, A4 and 2 more)")):
        more = " ".join(f"A{i}" for i in range(extra))
        pathlib.Path(place, "perfmon", "a.txt").write_text(f"pmc: SQ_WAVES GRBM_COUNT {more}\n")
        assert found.judge("") == (OK, f"1 of {extra + 2} counters collected{text}")


@everywhere
def test_rocprof_compute_profile_then_analyze(generation, machine, tmp_path):
    workplace = machine(generation)
    done = start("run_rocprof_compute.sh", "--device", "1")
    assert done.returncode == 0 and "--list-stats" in done.stdout
    out = workplace / "rocprof_compute_profiles_v2"
    assert {path.name for path in out.glob("workloads/*")} == {"trainer_counters", "trainer_roof"}
    runs = 3 if generation == "6.3" else 4
    assert len(recorded(tmp_path)) == runs and recorded(tmp_path)[0]["argv"][-2:] == ["--device", "1"]
    assert "--deterministic" in recorded(tmp_path)[0]["argv"]
    listed = start("run_rocprof_compute.sh", "--list-stats", "--dispatch", "3", "--dispatch", "12")
    assert listed.returncode == 0 and "Dispatch list" in (out / "list_stats.txt").read_text()
    assert "12" in (out / "dispatch_12.txt").read_text() and (out / "dispatch_3.txt").exists()
    assert manifest(out)["reason"].startswith("counters") and manifest(out / "analysis")["exit_code"] == 0
    assert len(recorded(tmp_path)) == runs  # analyzing ran no trainer


def test_rocprof_compute_reports_are_set_aside(machine):
    out = machine("7.0") / "rocprof_compute_profiles_v2"
    for arguments in ([], ["--mode", "analyze"], ["--dispatch", "12"], ["--dispatch", "12"]):
        assert start("run_rocprof_compute.sh", *arguments).returncode == 0
    assert (out / "analysis_counters.txt").exists() and (out / "analysis_roof.txt").exists()
    assert len(list(out.glob("dispatch_12.txt.old-*"))) == 1 and len(list(out.glob("analysis.old-*"))) == 2


@everywhere
def test_rocprof_compute_into_a_directory_with_an_old_workload(generation, machine):
    """With --force; a release refuses, or mixes the old files in. A wrapper does neither."""
    workplace = machine(generation)
    old = workplace / "mine" / "workloads" / "trainer_counters" / "MI300X_A1" / "pmc_perf.csv"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    assert start("run_rocprof_compute.sh", "-o", "mine", "--force", "--no-roof").returncode == 0
    kept, = (workplace / "mine" / "workloads").glob("trainer_counters.old-*")
    assert (kept / "MI300X_A1" / "pmc_perf.csv").read_text() == "old"
    assert kernel_summary.summarize(workplace / "mine")["launches"] == 1663


COMPUTE = (*RELEASES, "next")


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
